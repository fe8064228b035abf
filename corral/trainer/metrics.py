"""Metrics of one iteration, by the names users of this family of trainers know.

Means over samples leave out samples without a response; means over tokens are over tokens the policy generated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import psutil
import torch
from torch import Tensor

from corral.batch import FINISH_REASONS, Batch
from corral.config.plan import EnginePlan
from corral.engine.packing import split
from corral.workers.worker import Speed


def data_metrics(batch: Batch, sample_scores: Tensor, max_prompt_length: int) -> dict[str, float]:
    """What the batch looks like once advantages are known. sample_scores [S] are the scores as the scorer gave them."""
    answered = batch.response_lengths > 0
    finish = batch.finish
    rewards = _per_sample(batch, batch.rewards)
    out = {
        **_spread("critic/score", sample_scores[answered]),
        **_spread("critic/rewards", rewards[answered]),
        **_spread("critic/advantages", _valid(batch, batch.advantages)),
        **_spread("critic/returns", _valid(batch, batch.returns)),
        **_spread("response_length", batch.response_lengths),
        **_spread("response_length_non_aborted", batch.response_lengths[answered]),
        **_spread("prompt_length", batch.prompt_lengths),
        "response_length/clip_ratio": _share(finish == FINISH_REASONS.index("length")),
        "prompt_length/clip_ratio": _share(batch.prompt_lengths >= max_prompt_length),
        "response/aborted_ratio": _share(~answered),
    }
    if bool(answered.any()):
        out["response_length_non_aborted/clip_ratio"] = _share(finish[answered] == FINISH_REASONS.index("length"))
    if batch.values is not None:
        values, returns = _valid(batch, batch.values), _valid(batch, batch.returns)
        out.update(_spread("critic/values", values))
        if returns.numel() > 1:
            out["critic/vf_explained_var"] = float(1 - (returns - values).var() / (returns.var() + 1e-5))
    return out


def rollout_metrics(batch: Batch, log_probs: Tensor) -> dict[str, float]:
    """How far the engine's probabilities are from the trainer's, log_probs [R], on the same tokens."""
    rollout, old = _valid(batch, batch.rollout_log_probs).exp(), _valid(batch, log_probs).exp()
    gap = (rollout - old).abs()
    out = {"training/rollout_probs_diff_valid": float(gap.numel() > 0)}
    if gap.numel():
        out["training/rollout_probs_diff_max"] = float(gap.max())
        out["training/rollout_probs_diff_mean"] = float(gap.mean())
    if gap.numel() > 1:
        out["training/rollout_probs_diff_std"] = float(gap.std())
        out["training/rollout_actor_probs_pearson_corr"] = float(torch.corrcoef(torch.stack([rollout, old]))[0, 1])
    return {name: value for name, value in out.items() if value == value}


def balance_metrics(batch: Batch, engine: EnginePlan, balance: bool) -> dict[str, float]:
    """global_seqlen/*: tokens of each data-parallel rank of one engine when it scores the batch.

    min, max and their difference as contiguous runs of samples would have them, balanced_* as the ranks get them.
    """
    lengths = batch.lengths
    plain, given = (
        [sum(lengths[i] for micro in share for i in micro if i < len(lengths)) for share in cut.shares]
        for cut in (split(lengths, engine.dp, engine.infer, balance=spread) for spread in (False, balance))
    )
    sizes = {
        "min": min(plain),
        "max": max(plain),
        "minmax_diff": max(plain) - min(plain),
        "balanced_min": min(given),
        "balanced_max": max(given),
        "mean": sum(lengths) / engine.dp,
    }
    return prefixed("global_seqlen", sizes)


def memory_metrics() -> dict[str, float]:
    """Memory in use on the driver's machine, by everything that runs there, in GiB."""
    return {"actor/perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30}


def timing_metrics(batch: Batch, seconds: Mapping[str, float], world: int, generated: int) -> dict[str, float]:
    """timing_s/*, milliseconds per token of the phase, and throughput in tokens per second and device.

    generated: response tokens that were generated, which may be more than the batch holds, or none.
    """
    tokens = sum(batch.lengths)
    out = {f"timing_s/{name}": value for name, value in seconds.items()}
    for name in ("gen", "ref", "values", "adv", "update_critic", "update_actor"):
        count = generated if name == "gen" else tokens
        if name in seconds and count:
            out[f"timing_per_token_ms/{name}"] = seconds[name] * 1000 / count
    out["perf/total_num_tokens"] = float(tokens)
    out["perf/time_per_step"] = seconds["step"]
    out["perf/throughput"] = tokens / (seconds["step"] * world)
    return out


def mfu_metrics(
    speed: Speed, training: Batch, passes: Mapping[str, int], seconds: Mapping[str, float], world: int
) -> dict[str, float]:
    """perf/mfu/ROLE of the updates: operations over what `world` devices could do in that time; none without a peak.

    passes: how often each role's update goes through the samples.
    """
    out = {}
    for role, cost in speed.costs.items():
        time = seconds.get(f"update_{role}")
        if speed.peak is not None and time:
            out[f"perf/mfu/{role}"] = cost.training(training.lengths) * passes[role] / (time * world * speed.peak)
    return out


def mean_of_tokens(batch: Batch, field: Tensor) -> float:
    """Mean of [R] over the tokens the policy generated; 0 when there are none."""
    valid = _valid(batch, field)
    return float(valid.mean()) if valid.numel() else 0.0


def prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Every name under `prefix/`."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def console_line(step: int, metrics: Mapping[str, float]) -> str:
    """`step:N - key:value - ...`, the line users and their scripts read."""
    return " - ".join([f"step:{step}", *(f"{name}:{_readable(value)}" for name, value in metrics.items())])


def _readable(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:.6g}"


def _spread(name: str, values: Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {}
    values = values.double()
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _share(flags: Tensor) -> float:
    """Share of samples; there is at least one sample in a batch."""
    return float(flags.double().mean())


def _valid(batch: Batch, field: Tensor | None) -> Tensor:
    assert field is not None
    return field[batch.response_mask].double()


def _per_sample(batch: Batch, field: Tensor | None) -> Tensor:
    """[S] sums of a token field."""
    assert field is not None
    return torch.zeros(len(batch), dtype=torch.float64).index_add(0, batch.sample_of_token, field.double())


def mean(values: Iterable[float]) -> float:
    """Mean over samples; the denominator is their number, which is at least one."""
    listed = list(values)
    return sum(listed) / len(listed)
