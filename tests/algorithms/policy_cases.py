"""Mini-batches for tests of policy losses: rows for the oracle, and the Batch and objective that hold the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from corral.algorithms.aggregate import Denominators
from corral.algorithms.policy_losses import policy_loss
from corral.algorithms.policy_losses_interface import PolicyLoss, StatisticsInput
from corral.algorithms.policy_losses_selection import token_draws
from corral.batch import Batch
from corral.config.plan import ActorUpdate, PolicyLossOptions, RolloutCorrection
from corral.engine.losses import ActorObjective, needs_statistics, with_statistics
from tests.algorithms.ragged import flat, flat_mask, masks, numbers, offsets_of, rows_like
from tests.oracles.policy_losses import Case, Settings

NAMES = (
    *("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo"),
    *("bypass_mode/ppo_clip", "bypass_mode/reinforce"),
)
SELECTING = ("clip_cov", "kl_cov")
SETTINGS = Settings()
OPTIONS = PolicyLossOptions(
    tau_pos=SETTINGS.tau_pos,
    tau_neg=SETTINGS.tau_neg,
    clip_cov_ratio=SETTINGS.clip_cov_ratio,
    clip_cov_lb=SETTINGS.clip_cov_lb,
    clip_cov_ub=SETTINGS.clip_cov_ub,
    kl_cov_ratio=SETTINGS.kl_cov_ratio,
    ppo_kl_coef=SETTINGS.ppo_kl_coef,
    dro_beta=SETTINGS.dro_beta,
)
RESPONSE_LENGTH = 12
STEP = (3, 1)

# Near 1, at the clip's edges, beyond the dual clip, and far beyond what exp can hold.
log_ratios = st.one_of(st.floats(-0.4, 0.4), st.floats(-3, 3), st.sampled_from([0.0, 1e4, -1e4]))
# Multiples of 1/64: sums and differences are exact, so ties of covariances are ties.
dyadic = st.integers(-320, 320).map(lambda n: n / 64)
dyadic_log_ratios = st.integers(-128, 128).map(lambda n: n / 64)


def correction_of(name: str, rollout_is: str | None = None) -> RolloutCorrection | None:
    mode, _, kind = name.partition("/")
    return RolloutCorrection(rollout_is, None, 2.0, False, (), True, kind) if mode == "bypass_mode" else None


def loss_of(name: str) -> PolicyLoss:
    return policy_loss(name.partition("/")[0], correction_of(name))


def update_of(name: str, **changes: object) -> ActorUpdate:
    update = ActorUpdate(
        mini_batch_prompts=4,
        epochs=1,
        shuffle=False,
        shuffle_seed=0,
        loss_mode=name.partition("/")[0],
        clip_ratio_low=SETTINGS.low,
        clip_ratio_high=SETTINGS.high,
        clip_ratio_c=SETTINGS.c,
        loss_agg_mode="token-mean",
        loss_scale_factor=float(RESPONSE_LENGTH),
        entropy_coeff=0.0,
        calculate_entropy=False,
        use_kl_loss=False,
        kl_loss_coef=0.0,
        kl_loss_type="k3",
        optimizer_steps=1,
        options=OPTIONS,
        selection_seed=7,
    )
    return replace(update, **changes)


def batch_of(case: Case) -> Batch:
    samples = torch.arange(len(case.masks))
    tokens = sum(map(len, case.masks))
    return Batch(
        prompt_ids=torch.zeros(len(samples), dtype=torch.int64),
        prompt_offsets=torch.arange(len(samples) + 1),
        response_ids=torch.zeros(tokens, dtype=torch.int64),
        response_offsets=offsets_of(case.masks),
        response_mask=flat_mask(case.masks),
        row=samples,
        sample_index=samples * 0,
        group=samples,
        finish=(samples * 0).to(torch.uint8),
        is_padding=samples < 0,
        old_log_probs=flat(case.old),
        advantages=flat(case.advantages),
        rollout_is_weights=flat(case.weights),
    )


def prepared(name: str, case: Case) -> tuple[Batch, Tensor]:
    """The batch with the statistics of its loss, and the log-probs [R]."""
    batch, log_probs = batch_of(case), flat(case.log_probs)
    update, correction = update_of(name), correction_of(name)
    if needs_statistics(update, correction):
        batch = with_statistics(batch, flat(case.at), update, correction, STEP)
    return batch, log_probs


def objective_of(name: str, batch: Batch, **changes: object) -> ActorObjective:
    return ActorObjective(update_of(name, **changes), Denominators.of(batch), correction_of(name))


def statistics_input(batch: Batch, log_probs: Tensor, **changes: object) -> StatisticsInput:
    assert batch.old_log_probs is not None
    assert batch.advantages is not None
    return replace(
        StatisticsInput(
            log_probs=log_probs,
            old_log_probs=batch.old_log_probs,
            advantages=batch.advantages,
            mask=batch.response_mask,
            offsets=batch.response_offsets,
            clip_low=SETTINGS.low,
            clip_high=SETTINGS.high,
            clip_c=SETTINGS.c,
            options=OPTIONS,
            draw=token_draws(batch, 7, *STEP),
        ),
        **changes,
    )


def complete(
    masks: list[list[bool]], old: list[list[float]], log_probs: list[list[float]], advantages: list[list[float]]
) -> Case:
    """With all weights 1, and the draws Corral makes."""
    weights = [[1.0] * len(row) for row in masks]
    case = Case(log_probs, log_probs, old, advantages, masks, [[0] * len(row) for row in masks], weights)
    draws = iter(token_draws(batch_of(case), 7, *STEP).tolist())
    return replace(case, draws=[[next(draws) for _ in row] for row in masks])


@st.composite
def cases(draw: st.DrawFn, name: str) -> Case:
    """Ragged rows with empty and fully masked ones; importance weights, one a sample for geo_mean."""
    mask = draw(masks())
    values, ratios = (dyadic, dyadic_log_ratios) if name in SELECTING else (numbers, log_ratios)
    old, advantages = rows_like(draw, mask, values), rows_like(draw, mask, values)
    log_probs = [[x + draw(ratios) for x in row] for row in old]
    case = complete(mask, old, log_probs, advantages)
    weights = [[draw(st.sampled_from([0.0, 0.5, 1.0, 2.0]))] * len(row) for row in mask]
    if name != "geo_mean":
        weights = rows_like(draw, mask, st.sampled_from([0.0, 0.5, 1.0, 2.0]))
    return replace(case, weights=weights)


def seeded_case(seed: int, equal_advantages: bool = False) -> Case:
    """Eight samples of different lengths, one empty, one fully masked, tool tokens inside; everything happens."""
    generator = torch.Generator().manual_seed(seed)

    def rows(scale: float) -> list[list[float]]:
        return [(scale * torch.randn(len(row), generator=generator, dtype=torch.float64)).tolist() for row in mask]

    mask = [(torch.rand(n, generator=generator) > 0.25).tolist() for n in (3, 0, 7, 1, 12, 5, 9)] + [[False, False]]
    old = [[x - 2.5 for x in row] for row in rows(0.8)]
    log_probs = [[x + d for x, d in zip(*pair, strict=True)] for pair in zip(old, rows(0.4), strict=True)]
    advantages = rows(1.5)
    if equal_advantages:
        advantages = [[row[0]] * len(row) if row else [] for row in advantages]
    weights = [[abs(row[0])] * len(row) if row else [] for row in rows(1.0)]
    return replace(complete(mask, old, log_probs, advantages), weights=weights)


def one_token(log_prob: float, old: float, advantage: float) -> Case:
    return complete([[True]], [[old]], [[log_prob]], [[advantage]])


def nudged(rows: list[list[float]], at: int, by: float) -> list[list[float]]:
    """The same rows with `by` added to one token."""
    entries = iter(range(sum(map(len, rows))))
    return [[x + by if next(entries) == at else x for x in row] for row in rows]


def central_differences(function: Callable[[list[list[float]]], float], rows: list[list[float]]) -> Tensor:
    """[R]: the function's derivative by each token."""
    step = 1e-6
    return torch.tensor(
        [
            (function(nudged(rows, at, step)) - function(nudged(rows, at, -step))) / (2 * step)
            for at in range(sum(map(len, rows)))
        ],
        dtype=torch.float64,
    )
