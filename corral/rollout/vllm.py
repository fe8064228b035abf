"""The vllm engine: one replica in the processes of its ranks, which hold a part of the model each.

Everything is through vllm's own interface for offline use; what its workers need to take over new weights is in
`vllm_worker.py`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import shake_256
from typing import Any

import torch
from torch import Tensor

from corral.config.overrides import nearest
from corral.config.plan import Model, RolloutPlan, Sampling
from corral.engine.distributed import device_of
from corral.engine.rank import Rank
from corral.errors import ConfigError
from corral.rollout.base import Completion, Request

_KWARGS = "actor_rollout_ref.rollout.engine_kwargs.vllm"
_WORKER = "corral.rollout.vllm_worker.TakesWeights"
_CPU_WORKER = "corral.rollout.vllm_cpu.CpuRank"
_ASCEND: dict[str, Any] = {"weight_nz_mode": 0, "enable_cpu_binding": False}
"""Of vllm-ascend: weights stay in the layout in which they come, and this process on the cores it has."""


class VllmEngine:
    """A replica of `plan.tensor_model_parallel_size` neighbouring ranks, which all call it with the same arguments.

    Weights are dummies until the first `update_weights`, unless plan.vllm.load_format says otherwise. The seed of a
    sample is keyed like the native engine's streams, but the stream that vllm makes of it is its own, and in batches of
    other sizes its kernels may round differently.

    Raises ConfigError when vllm does not start with these options.
    """

    def __init__(self, model: Model, rank: Rank, *, eos_token_ids: Sequence[int], plan: RolloutPlan) -> None:
        assert plan.vllm is not None
        device = device_of(rank)
        _prepare(rank, device)
        try:
            from vllm import LLM, SamplingParams
        except ImportError as error:
            raise ConfigError(f"rollout.name=vllm: vllm cannot be imported: {error}; see docs/vllm.md") from error
        self._plan = plan
        self._options = plan.vllm
        self._stops = [] if plan.ignore_eos else list(eos_token_ids)
        self._params = SamplingParams
        self._awake = True
        try:
            with _own_random_state(device), _quiet("vllm.renderers.base"):  # a chat template needs the tokenizer
                self._llm = LLM(**_arguments(model, rank, plan))
        except (ValueError, RuntimeError) as error:  # memory that is not there, options that do not fit the model
            raise ConfigError(f"vllm does not start: {_gist(error)}") from error

    def generate(self, requests: Sequence[Request], sampling: Sampling, *, step: int) -> list[Completion]:
        """Completions in the order of the requests; greedy ones have log-probs at temperature 1."""
        assert self._awake, "the engine is asleep"
        if not requests:
            return []
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        params = [self._sampling(request, sampling, step) for request in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [_completion(output.outputs[0]) for output in outputs]

    def _sampling(self, request: Request, sampling: Sampling, step: int) -> Any:
        return self._params(
            temperature=0.0 if sampling.greedy else sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=None if sampling.greedy else stream_seed(self._plan.seed, step, request.row, request.sample_index),
            max_tokens=self._plan.response_length,
            stop_token_ids=self._stops,
            ignore_eos=True,  # the tokens that end a response are those just given, not those of the model's files
            logprobs=0,
            detokenize=False,
        )

    def score(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> list[float]:
        """Log-probs of a given response at temperature 1, as a prompt."""
        assert self._awake, "the engine is asleep"
        ids = [*prompt_ids, *response_ids]
        params = self._params(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        (output,) = self._llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        scored = zip(output.prompt_logprobs[len(prompt_ids) :], response_ids, strict=True)
        return [float(by_token[token].logprob) for by_token, token in scored]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over full parameters by their names in the model's folder (tied weights once). What is cached of the
        old ones is forgotten.

        Raises ValueError on a name too many or twice, on a weight that is too small, and when a whole one of vllm's is
        missing (of its fused ones a part may be missing, and of a large one a part is taken, which the probe after an
        update shows). It is of no use after that.
        """
        with _quiet("vllm.model_executor.model_loader.reload.layerwise"):  # of layers that have no weights
            self._llm.collective_rpc("take_weights", args=(weights,))
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vllm did not forget the prefixes that it computed with the old weights")

    def sleep(self) -> None:
        """Give the device's memory back, the weights to the host, until wake(). Nothing to do on the CPU."""
        if self._options.sleeps and self._awake:
            self._llm.sleep(level=1)
        self._awake = False

    def wake(self) -> None:
        if self._options.sleeps and not self._awake:
            self._llm.wake_up()
        self._awake = True

    def close(self) -> None:
        """End it; its memory is free afterwards."""
        self._llm.llm_engine.engine_core.shutdown()


@contextmanager
def _own_random_state(device: torch.device) -> Iterator[None]:
    """vllm seeds the generators of the process when it starts."""
    import numpy as np

    python, numpy = random.getstate(), np.random.get_state()
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=device.type):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Without the warnings of one logger of vllm. A filter, as vllm sets the levels of its loggers when it starts."""
    logger = logging.getLogger(name)
    logger.addFilter(_is_error)
    try:
        yield
    finally:
        logger.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def stream_seed(seed: int, step: int, row: int, sample_index: int) -> int:
    """[0, 2^63): the seed of one sample's stream, keyed by its four arguments alone."""
    (word,) = struct.unpack("<Q", shake_256(struct.pack("<4q", seed, step, row, sample_index)).digest(8))
    return int(word) >> 1


def _completion(output: Any) -> Completion:
    ids = tuple(output.token_ids)
    log_probs = tuple(float(by_token[token].logprob) for by_token, token in zip(output.logprobs, ids, strict=True))
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vllm ended a response by {output.finish_reason!r}")
    return Completion(ids, log_probs, output.finish_reason)


def _prepare(rank: Rank, device: torch.device) -> None:
    """Variables that vllm reads when it is imported: the engine is in this process, and calls nobody."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if rank.world > 1:
        os.environ["LOCAL_RANK"] = str(device.index or 0)  # a process mostly sees one device alone
    defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if rank.device == "cpu":
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # ranks share the cores as the trainer has it
    elif rank.device == "npu":
        defaults["VLLM_ASCEND_ENABLE_NZ"] = "0"  # before vllm-ascend 0.30, beside the option
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _arguments(model: Model, rank: Rank, plan: RolloutPlan) -> dict[str, Any]:
    """Of vllm.LLM. Raises ConfigError for one in engine_kwargs that it does not have."""
    from vllm import EngineArgs

    options = plan.vllm
    assert options is not None
    known = [each.name for each in dataclasses.fields(EngineArgs)]
    for name in options.engine_kwargs:
        if name not in known:
            raise ConfigError(f"{_KWARGS}.{name}: vllm has no such option; the nearest is {nearest(name, known)!r}")
    arguments: dict[str, Any] = {
        "model": model.path,
        "tokenizer": model.tokenizer_path,
        "skip_tokenizer_init": True,  # token ids go in and come out
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": dict(model.override_config),
        "generation_config": "vllm",  # not that of the model's folder: sampling is what the run says
        "dtype": options.dtype,
        "load_format": options.load_format,
        "max_model_len": options.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_memory_bytes": options.cache_bytes,
        "enable_chunked_prefill": options.enable_chunked_prefill,
        "enable_prefix_caching": options.enable_prefix_caching,
        "enforce_eager": options.enforce_eager,
        "enable_sleep_mode": options.sleeps,
        "tensor_parallel_size": plan.tensor_model_parallel_size,
        "worker_extension_cls": _WORKER,
        "logprobs_mode": "raw_logprobs" if plan.sampling.temperature in (0, 1) else "processed_logprobs",
        "disable_log_stats": True,
    }
    if rank.world > 1:
        arguments["distributed_executor_backend"] = "external_launcher"  # the ranks are there, and know each other
        if rank.device == "cpu":
            arguments["worker_cls"] = _CPU_WORKER
    arguments |= options.engine_kwargs
    if rank.device == "npu":
        arguments["additional_config"] = {**_ASCEND, **arguments.get("additional_config", {})}
    return arguments


def _gist(error: Exception) -> str:
    """What is wrong, on one line: pydantic puts it on its third, between "Value error, " and what it was given."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line.removeprefix("Value error, ").partition(" [type=")[0] for line in lines if " [type=" in line]
    return (told or lines or [repr(error)])[0]
