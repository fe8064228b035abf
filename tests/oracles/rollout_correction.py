"""Rollout correction sample by sample and token by token, in plain Python floats. Shares no code with Corral.

A row is one sample: a list with one entry per response token. `mask` entries are booleans. A band is (lower or None,
upper).
"""

from __future__ import annotations

import math

Row = list[float]
Mask = list[bool]
Band = tuple[float | None, float]


def log_ratios(old: Row, rollout: Row, mask: Mask) -> list[float]:
    """Of the valid tokens alone."""
    return [a - b for a, b, keep in zip(old, rollout, mask, strict=True) if keep]


def ratio(log_ratio: float) -> float:
    return math.exp(min(max(log_ratio, -20.0), 20.0))


def bounded(weight: float, band: Band) -> float:
    lower, upper = band
    if lower is None:
        return min(weight, upper)
    return weight if lower <= weight <= upper else 0.0


def weights(
    level: str, band: Band, normalise: bool, old: list[Row], rollout: list[Row], mask: list[Mask], kept: list[Mask]
) -> list[Row]:
    out: list[Row] = []
    counted: list[float] = []
    for sample in range(len(mask)):
        row = [0.0] * len(mask[sample])
        if level == "sequence":
            weight = bounded(ratio(sum(log_ratios(old[sample], rollout[sample], mask[sample]))), band)
            if any(kept[sample]):
                counted.append(weight)
        for t in range(len(row)):
            if not kept[sample][t]:
                continue
            if level == "token":
                weight = bounded(ratio(old[sample][t] - rollout[sample][t]), band)
                counted.append(weight)
            row[t] = weight
        out.append(row)
    mean = sum(counted) / len(counted) if counted else 0.0
    if normalise and mean > 0:
        out = [[w / mean for w in row] for row in out]
    return out


def k(kind: str, log_ratio: float) -> float:
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * log_ratio * log_ratio
    if log_ratio > 20:
        log_ratio = 20.0
    return math.expm1(max(log_ratio, -20.0)) - log_ratio


def inside(kind: str, value: float, band: Band) -> bool:
    lower, upper = band
    if kind == "k1":
        if lower is None:
            lower = 1 / upper
        return math.log(lower) <= value <= math.log(upper)
    return value <= upper and (lower is None or value >= lower)


def kept(rules: list[tuple[str, Band]], old: list[Row], rollout: list[Row], mask: list[Mask]) -> list[Mask]:
    """The mask that is left."""
    out = []
    for old_row, rollout_row, row in zip(old, rollout, mask, strict=True):
        left = list(row)
        for name, band in rules:
            kind = name[-2:]
            values = [k(kind, d) for d in log_ratios(old_row, rollout_row, row)]
            if name.startswith("token"):
                for t in range(len(row)):
                    if row[t] and not inside(kind, k(kind, old_row[t] - rollout_row[t]), band):
                        left[t] = False
                continue
            if not values:
                continue
            value = {"seq_sum": sum(values), "seq_mean": sum(values) / len(values), "seq_max": max(values)}[name[:-3]]
            if not inside(kind, value, band):
                left = [False] * len(row)
        out.append(left)
    return out


def mismatch(old: list[Row], rollout: list[Row], mask: list[Mask]) -> dict[str, float]:
    tokens: list[float] = []
    sums, gaps, trainer, engine = [], [], [], []
    for old_row, rollout_row, row in zip(old, rollout, mask, strict=True):
        ds = log_ratios(old_row, rollout_row, row)
        if not ds:
            continue
        tokens += ds
        sums.append(sum(ds))
        trainer.append(-sum(x for x, keep in zip(old_row, row, strict=True) if keep) / len(ds))
        engine.append(-sum(x for x, keep in zip(rollout_row, row, strict=True) if keep) / len(ds))
        gaps.append(trainer[-1] - engine[-1])
    if not tokens:
        return {}

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    return {
        "kl": mean([-d for d in tokens]),
        "k3_kl": mean([k("k3", d) for d in tokens]),
        "chi2_token": mean([ratio(d) ** 2 for d in tokens]) - 1,
        "chi2_seq": mean([ratio(d) ** 2 for d in sums]) - 1,
        "training_ppl": mean([math.exp(min(x, 700)) for x in trainer]),
        "rollout_ppl": mean([math.exp(min(x, 700)) for x in engine]),
        "training_log_ppl": mean(trainer),
        "rollout_log_ppl": mean(engine),
        "log_ppl_diff": mean(gaps),
        "log_ppl_abs_diff": mean([abs(g) for g in gaps]),
        "log_ppl_diff_max": max(gaps),
        "log_ppl_diff_min": min(gaps),
        "ppl_ratio": mean([ratio(g) for g in gaps]),
    }
