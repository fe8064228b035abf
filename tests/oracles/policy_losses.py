"""Every policy loss of a whole mini-batch, token by token in plain Python floats. Shares no code with Corral.

A row is one sample: a list with one entry per response token. The mini-batch's loss is a function of all log-probs, as
the formulas say it; `at` are the log-probs of the present weights, which stop-gradients, means and selections are of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from tests.oracles import ppo

Row = list[float]
Rows = list[Row]
Masks = list[list[bool]]
Place = tuple[int, int]


@dataclass(frozen=True)
class Settings:
    low: float = 0.2
    high: float = 0.28
    c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    clip_cov_ratio: float = 0.3
    clip_cov_lb: float = 0.1234567
    clip_cov_ub: float = 3.0
    kl_cov_ratio: float = 0.3
    ppo_kl_coef: float = 0.1
    dro_beta: float = 0.4


@dataclass(frozen=True)
class Case:
    """A mini-batch. draws: any distinct number per token. weights: importance weights, 1 where there are none."""

    log_probs: Rows
    at: Rows
    old: Rows
    advantages: Rows
    masks: Masks
    draws: list[list[int]]
    weights: Rows


Tokens = dict[Place, float]
"""By (sample, token): a number of every valid token."""


def places(masks: Masks) -> list[Place]:
    return [(i, t) for i, mask in enumerate(masks) for t, keep in enumerate(mask) if keep]


def ratio(log_ratio: float) -> float:
    return math.exp(min(max(log_ratio, -20.0), 20.0))


def ppo_max(r: float, advantage: float, s: Settings) -> tuple[float, float]:
    """(loss, whether the clip decides) by cases."""
    if advantage > 0 and r > 1 + s.high:
        return -advantage * (1 + s.high), 1.0
    if advantage < 0 and r < 1 - s.low:
        return -advantage * (1 - s.low), 1.0
    return -advantage * r, 0.0


def token_loss(name: str, x: float, frozen: float, old: float, a: float, s: Settings) -> tuple[float, dict[str, float]]:
    """(loss, what happened) of a token that needs to know nothing of the others; frozen is x under a stop-gradient."""
    d, kl = x - old, {"ppo_kl": old - x}
    if name == "vanilla":
        loss, clipped, lower, _ = ppo.policy_token(x, old, a, s.low, s.high, s.c)
        return loss, {"pg_clipfrac": clipped, "pg_clipfrac_lower": lower, **kl}
    if name in ("dppo_tv", "dppo_kl"):
        p, q = math.exp(min(frozen, 0.0)), math.exp(min(old, 0.0))
        inside = tv_inside(p, q, a, s) if name == "dppo_tv" else kl_inside(frozen, old, a, s)
        r = ratio(frozen - old)
        happened = {"pg_clipfrac": float(not inside), "pg_clipfrac_lower": float(r > s.c), **kl}
        return (-a * min(r, s.c) * x if inside else 0.0), happened
    if name == "sapo":
        tau = s.tau_pos if a > 0 else s.tau_neg
        return -a * 4 / tau * sigmoid(tau * (ratio(d) - 1)), kl
    if name == "gpg":
        return -a * x, {}
    if name == "dro":
        return -(x * a - s.dro_beta / 2 * d * d), kl
    if name == "reinforce":
        return -a * x, kl
    assert name == "cispo"
    r = ratio(frozen - old)
    weight = min(max(r, 1 - s.low), 1 + s.high)
    return -weight * a * x, {"pg_clipfrac": float(weight != r), **kl}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def tv_inside(p: float, q: float, a: float, s: Settings) -> bool:
    return p - q <= s.high if a > 0 else p - q >= -s.low


def kl_inside(x: float, old: float, a: float, s: Settings) -> bool:
    log_p, log_q = min(x, 0.0), min(old, 0.0)
    p, q = math.exp(log_p), math.exp(log_q)
    divergence = q * (log_q - log_p)
    if q < 1:
        other = -math.expm1(log_p)
        divergence += (1 - q) * (math.log(-math.expm1(log_q)) - math.log(other)) if other > 0 else math.inf
    return divergence <= s.high or p <= q if a > 0 else divergence <= s.low or p >= q


def mean(values: Row) -> float:
    return sum(values) / len(values)


def sequence_mean(rows: Rows, old: Rows, masks: Masks, i: int) -> float:
    """Mean of the log-ratio over a sample's valid tokens."""
    return mean([x - y for x, y, keep in zip(rows[i], old[i], masks[i], strict=True) if keep])


def gspo(case: Case, s: Settings) -> tuple[Tokens, dict[str, Tokens]]:
    loss, clipped = {}, {}
    for i, t in places(case.masks):
        mean_ratio = sequence_mean(case.at, case.old, case.masks, i)
        r = math.exp(min(case.log_probs[i][t] - case.at[i][t] + mean_ratio, 10.0))
        loss[i, t], clipped[i, t] = ppo_max(r, case.advantages[i][t], s)
    return loss, {"pg_clipfrac": clipped}


def one_sided(d: float, a: float, s: Settings) -> float:
    if a > 0:
        return min(d, s.high)
    return max(d, -s.low) if a < 0 else 0.0


def geo_mean(case: Case, s: Settings) -> tuple[Tokens, dict[str, Tokens]]:
    """Each token carries its sample's loss, of all live log-probs: no stop-gradient here."""
    loss: Tokens = {}
    happened: dict[str, Tokens] = {"pg_clipfrac": {}, "pg_clipfrac_lower": {}}
    for i, t in places(case.masks):
        valid = [u for j, u in places(case.masks) if j == i]
        d = {u: case.log_probs[i][u] - case.old[i][u] for u in valid}
        e = {u: one_sided(d[u], case.advantages[i][u], s) for u in valid}
        advantage = mean([case.advantages[i][u] for u in valid])
        loss[i, t] = -advantage * ratio(mean(list(e.values())))
        happened["pg_clipfrac"][i, t] = float(case.advantages[i][t] > 0 and e[t] != d[t])
        happened["pg_clipfrac_lower"][i, t] = float(case.advantages[i][t] < 0 and e[t] != d[t])
    return loss, happened


def covariances(case: Case) -> dict[Place, Fraction]:
    """Exactly, so that equal ones are equal."""
    at = places(case.masks)
    advantages = {(i, t): Fraction(case.advantages[i][t]) for i, t in at}
    log_probs = {(i, t): Fraction(case.at[i][t]) for i, t in at}
    count = max(1, len(at))
    centre, middle = sum(advantages.values()) / count, sum(log_probs.values()) / count
    return {place: (advantages[place] - centre) * (log_probs[place] - middle) for place in at}


def clip_cov_choice(case: Case, s: Settings) -> set[Place]:
    candidates = []
    for (i, t), covariance in covariances(case).items():
        _, clipped = ppo_max(ratio(case.at[i][t] - case.old[i][t]), case.advantages[i][t], s)
        if not clipped and s.clip_cov_lb < covariance < s.clip_cov_ub:
            candidates.append((i, t))
    count = max(1, int(s.clip_cov_ratio * len(places(case.masks))))
    return set(sorted(candidates, key=lambda at: case.draws[at[0]][at[1]])[:count])


def kl_cov_choice(case: Case, s: Settings) -> set[Place]:
    found = covariances(case)
    count = max(1, int(s.kl_cov_ratio * len(found)))
    return set(sorted(found, key=lambda at: (-found[at], case.draws[at[0]][at[1]]))[:count])


def clip_cov(case: Case, s: Settings) -> tuple[Tokens, dict[str, Tokens]]:
    chosen = clip_cov_choice(case, s)
    loss, clipped, selected = {}, {}, {}
    for i, t in places(case.masks):
        loss[i, t], clipped[i, t] = ppo_max(ratio(case.log_probs[i][t] - case.old[i][t]), case.advantages[i][t], s)
        selected[i, t] = 0.0
        if (i, t) in chosen:
            loss[i, t], clipped[i, t], selected[i, t] = 0.0, 0.0, 1.0
    return loss, {"pg_clipfrac": clipped, "pg_selected": selected}


def kl_cov(case: Case, s: Settings) -> tuple[Tokens, dict[str, Tokens]]:
    chosen = kl_cov_choice(case, s)
    loss, selected = {}, {}
    for i, t in places(case.masks):
        d = case.log_probs[i][t] - case.old[i][t]
        loss[i, t] = -case.advantages[i][t] * ratio(d)
        selected[i, t] = float((i, t) in chosen)
        if (i, t) in chosen:
            loss[i, t] += s.ppo_kl_coef * abs(d)
    return loss, {"pg_selected": selected}


WHOLE = {"gspo": gspo, "geo_mean": geo_mean, "clip_cov": clip_cov, "kl_cov": kl_cov}
FORCED = ("gspo", "sapo", "geo_mean")


def tokens(name: str, case: Case, s: Settings) -> tuple[Tokens, dict[str, Tokens]]:
    """(loss, what happened by metric) of every valid token, before importance weights."""
    name = {"bypass_mode/ppo_clip": "vanilla", "bypass_mode/reinforce": "reinforce"}.get(name, name)
    if name in WHOLE:
        loss, happened = WHOLE[name](case, s)
        kl = {(i, t): case.old[i][t] - case.log_probs[i][t] for i, t in places(case.masks)}
        return loss, {**happened, "ppo_kl": kl}
    loss = {}
    happened = {metric: {} for metric in token_loss(name, -1.0, -1.0, -1.0, 1.0, s)[1]}
    for i, t in places(case.masks):
        loss[i, t], seen = token_loss(
            name, case.log_probs[i][t], case.at[i][t], case.old[i][t], case.advantages[i][t], s
        )
        for metric, value in seen.items():
            happened[metric][i, t] = value
    return loss, happened


def as_rows(values: Tokens, masks: Masks) -> Rows:
    return [[values.get((i, t), 0.0) for t in range(len(mask))] for i, mask in enumerate(masks)]


def mini_batch(name: str, mode: str, scale: float, case: Case, s: Settings) -> dict[str, float]:
    """pg_loss and the token means of what happened."""
    loss, happened = tokens(name, case, s)
    weighted = {(i, t): value * case.weights[i][t] for (i, t), value in loss.items()}
    count, samples = len(loss), len(case.masks)
    mode = "seq-mean-token-mean" if name in FORCED else mode
    out = {"pg_loss": ppo.aggregate(mode, as_rows(weighted, case.masks), case.masks, count, samples, scale)}
    for metric, values in happened.items():
        out[metric] = sum(values.values()) / count if count else 0.0
    return out
