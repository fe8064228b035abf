"""The engine that generates: which one runs here, with which options, and how many replicas of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from corral.config import names
from corral.config.engines import divisors
from corral.config.plan import EnginePlan, RolloutPlan, Sampling, Topology, VllmPlan
from corral.config.schema.data import Data
from corral.config.schema.rollout import Rollout, ValKwargs
from corral.errors import ConfigError
from corral.platform import detect, platform

_ROLLOUT = "actor_rollout_ref.rollout"
_KWARGS = f"{_ROLLOUT}.engine_kwargs.vllm"
_NATIVE = f"{_ROLLOUT}.name=native"
_PROBE_TOLERANCE = {"float64": 1e-8, "float32": 1e-3, "bfloat16": 0.2}
"""Log-prob gap that rounding alone explains, by compute dtype."""
_CACHE = "kv_cache_memory_bytes"
_CPU_CACHE = 1 << 30
"""Bytes: of a rank, which shares the memory with all others; pages that are not used take none."""

_OWN = (
    *("model", "tokenizer", "skip_tokenizer_init", "trust_remote_code", "hf_overrides", "generation_config"),
    *("seed", "logprobs_mode", "enable_sleep_mode", "worker_extension_cls", "worker_cls"),
    *("distributed_executor_backend", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
)
"""Options of vllm that follow from the run."""
_WITH_A_KEY = (
    *("dtype", "gpu_memory_utilization", "enable_chunked_prefill", "enable_prefix_caching", "enforce_eager"),
    *("max_num_batched_tokens", "max_num_seqs", "max_model_len", "load_format"),
)
"""Options of vllm that are keys of the rollout."""


def rollout_plan(
    rollout: Rollout, data: Data, where: Topology, actor: EnginePlan, notices: list[str], environ: Mapping[str, str]
) -> RolloutPlan:
    """How the run generates; what the user should know is added to `notices`.

    Raises ConfigError for an engine that is not there, or that does not do what is asked.
    """
    name = _engine(rollout, where, notices)
    tp = rollout.tensor_model_parallel_size
    _check_tensor_parallel(tp, name, where)
    vllm = _vllm(rollout, data, where, actor, environ) if name == "vllm" else None
    tolerance = _PROBE_TOLERANCE[actor.compute_dtype]
    if vllm is not None:
        tolerance = max(tolerance, _PROBE_TOLERANCE[vllm.dtype])
    return RolloutPlan(
        name=name,
        requested=rollout.name or name,
        replicas=where.world // tp,
        tensor_model_parallel_size=tp,
        prompt_length=data.max_prompt_length,
        response_length=data.max_response_length,
        max_num_seqs=rollout.max_num_seqs,
        ignore_eos=rollout.ignore_eos,
        seed=rollout.seed,
        sampling=_sampling(rollout),
        val_sampling=_sampling(rollout.val_kwargs),
        probe_tolerance=tolerance if rollout.probe_tolerance is None else rollout.probe_tolerance,
        graphs=name == "native" and where.device == "cuda" and not rollout.enforce_eager,
        vllm=vllm,
        environment=_environment(vllm, where.device, environ),
    )


def _sampling(section: Rollout | ValKwargs) -> Sampling:
    return Sampling(
        temperature=section.temperature,
        top_k=section.top_k,
        top_p=section.top_p,
        do_sample=section.do_sample,
        n=section.n,
    )


def _engine(rollout: Rollout, where: Topology, notices: list[str]) -> str:
    """native or vllm. Whether it is installed counts where the devices are; a plan for others takes it for granted."""
    there, cpu = _installed(where.device), where.device == "cpu"
    if rollout.name is None:
        return "vllm" if there and not cpu else "native"
    if rollout.name == "native" or there:
        return rollout.name
    if not cpu and rollout.fallback != "native":
        if detect().device != where.device:
            notices.append(f"{_ROLLOUT}.name=vllm: {_missing(where.device)} here; every node of the run needs it")
            return "vllm"
        raise ConfigError(
            f"{_ROLLOUT}.name=vllm on {where.device}: {_missing(where.device)}; install it (docs/vllm.md), or set "
            f"{_ROLLOUT}.fallback=native to generate with the native engine"
        )
    notices.append(f"{_ROLLOUT}.name=vllm: {_missing(where.device)}: the native engine generates instead")
    return "native"


def _check_tensor_parallel(tp: int, name: str, where: Topology) -> None:
    key = f"{_ROLLOUT}.tensor_model_parallel_size={tp}"
    if tp > 1 and name == "native":
        raise ConfigError(f"{key} needs the vllm engine and native runs here; set it to 1")
    if where.world % tp:
        raise ConfigError(
            f"{key} does not divide the world of {where.world} ranks ({where.nnodes} nodes × {where.devices_per_node} "
            f"devices); use one of {divisors(where.world)}"
        )
    if where.device == "cpu" and where.devices_per_node % tp:
        raise ConfigError(
            f"{key} does not divide the {where.devices_per_node} devices of a node, and on cpu the ranks of a replica "
            f"share memory; use one of {divisors(where.devices_per_node)}"
        )


def _packages(device: str) -> tuple[str, ...]:
    return ("vllm", "vllm_ascend") if device == "npu" else ("vllm",)


def _installed(device: str) -> bool:
    """Looked for without importing it, which takes many seconds."""
    return all(find_spec(name) is not None for name in _packages(device))


def _missing(device: str) -> str:
    lacking = [name for name in _packages(device) if find_spec(name) is None]
    return f"{' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not installed"


def _vllm(rollout: Rollout, data: Data, where: Topology, actor: EnginePlan, environ: Mapping[str, str]) -> VllmPlan:
    dtype = "float32" if actor.compute_dtype == "float64" else actor.compute_dtype
    if rollout.dtype is not None:
        dtype = names.dtype(f"{_ROLLOUT}.dtype", rollout.dtype)
        if dtype == "float64":
            raise ConfigError(f"{_ROLLOUT}.dtype={rollout.dtype}: vllm computes in bfloat16 or float32; use float32")
    _check_log_probs(_sampling(rollout), where.device)
    cpu = where.device == "cpu"
    # One position more than a sample has: the probe is scored by generating one token behind it.
    longest = max(rollout.max_model_len or 0, data.max_prompt_length + data.max_response_length + 1)
    _check_lengths(rollout, longest, chunked=rollout.enable_chunked_prefill or cpu)
    kwargs = _kwargs(rollout)
    cache = kwargs.get(_CACHE, _CPU_CACHE if cpu else None)
    if not isinstance(cache, int | None):
        raise ConfigError(f"{_KWARGS}.{_CACHE}={cache!r}: must be a number of bytes")
    return VllmPlan(
        dtype=dtype,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        cache_bytes=cache,
        # It cannot rewind the stream of a sample whose prompt is computed in parts.
        enable_chunked_prefill=rollout.enable_chunked_prefill and not cpu,
        enable_prefix_caching=rollout.enable_prefix_caching,
        enforce_eager=rollout.enforce_eager or cpu,  # compiling takes minutes there
        sleeps=rollout.free_cache_engine and not cpu,
        max_num_batched_tokens=max(rollout.max_num_batched_tokens, longest if cpu else 0),
        max_model_len=longest,
        load_format=rollout.load_format,
        engine_kwargs=kwargs,
    )


def _check_log_probs(drawn: Sampling, device: str) -> None:
    """vllm's log-probs have to be those that the trainer recomputes: at the temperature, of the whole vocabulary."""
    given = f"{_ROLLOUT}.temperature={drawn.temperature:g}"
    if drawn.temperature == 1:
        return
    if device == "npu":
        raise ConfigError(f"{given}: vllm on npu gives log-probs at temperature 1 only; set it to 1, or {_NATIVE}")
    if drawn.greedy:
        raise ConfigError(
            f"{given} with do_sample=False: vllm gives log-probs of greedy samples at temperature 1 only; set it to 1, "
            f"or {_NATIVE}"
        )
    if drawn.top_k > 0 or drawn.top_p < 1:
        raise ConfigError(
            f"{given} with top_k={drawn.top_k} and top_p={drawn.top_p:g}: vllm gives log-probs of the whole vocabulary "
            f"at temperature 1, or without the other two; set temperature=1, or top_k=-1 and top_p=1, or {_NATIVE}"
        )


def _check_lengths(rollout: Rollout, longest: int, *, chunked: bool) -> None:
    """longest: tokens that vllm is to hold."""
    step, length = rollout.max_num_batched_tokens, rollout.max_model_len
    if length is not None and length < longest - 1:
        raise ConfigError(
            f"{_ROLLOUT}.max_model_len={length} is below data.max_prompt_length + data.max_response_length = "
            f"{longest - 1}; set it to {longest - 1} or more, or leave it out"
        )
    if step < rollout.max_num_seqs:
        raise ConfigError(
            f"{_ROLLOUT}.max_num_batched_tokens={step} is below max_num_seqs={rollout.max_num_seqs}: a step of vllm "
            "has a token of each sequence; raise the one or lower the other"
        )
    if step < longest and not chunked:
        raise ConfigError(
            f"{_ROLLOUT}.enable_chunked_prefill=False with max_num_batched_tokens={step}: a prompt goes through vllm "
            f"in one step, and the longest sequence has {longest} tokens; set max_num_batched_tokens={longest} or more"
        )


def _environment(vllm: VllmPlan | None, device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """On npu the memory that vllm gives back is of a pool that cannot be made of expandable segments."""
    name = platform(device).allocator
    if vllm is None or not vllm.sleeps or name is None:
        return {}
    value = environ.get(name, "")
    if "expandable_segments:true" in value.replace(" ", "").lower():
        raise ConfigError(
            f"{name}={value}: vllm cannot give memory back while the run trains with expandable segments; take them "
            f"out of {name}, or set {_ROLLOUT}.free_cache_engine=False"
        )
    return {name: "expandable_segments:False"}


def _kwargs(rollout: Rollout) -> dict[str, Any]:
    """engine_kwargs.vllm: null is left out, text that is a JSON object is one."""
    given = rollout.engine_kwargs.get("vllm")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{_KWARGS}={given!r} is no group of options; write {_KWARGS}.OPTION=VALUE")
    out = {}
    for option, value in given.items():
        if value is None:
            continue
        if option in _OWN:
            raise ConfigError(f"{_KWARGS}.{option} follows from the run and cannot be set; leave it out")
        if option in _WITH_A_KEY:
            raise ConfigError(f"{_KWARGS}.{option}: set {_ROLLOUT}.{option} instead, which is the same option")
        out[option] = _decoded(option, value)
    return out


def _decoded(option: str, value: Any) -> Any:
    if not (isinstance(value, str) and value.lstrip().startswith("{")):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ConfigError(
            f"{_KWARGS}.{option}={value!r} is no JSON object ({error}); mend it, or write {_KWARGS}.{option}.NAME=VALUE"
        ) from None
