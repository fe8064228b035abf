from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from corral.algorithms.aggregate import Denominators
from corral.batch import Batch
from corral.config.plan import ActorUpdate, CriticUpdate
from corral.engine.losses import ActorObjective, CriticObjective, Objective
from tests.algorithms.ragged import MODES, flat, flat_mask, masks, numbers, offsets_of, rows_like
from tests.oracles import ppo

SCALE = 12.0  # of seq-mean-token-sum-norm
ACTOR = ActorUpdate(
    mini_batch_prompts=4,
    epochs=1,
    shuffle=False,
    shuffle_seed=0,
    loss_mode="vanilla",
    clip_ratio_low=0.2,
    clip_ratio_high=0.28,
    clip_ratio_c=3.0,
    loss_agg_mode="token-mean",
    loss_scale_factor=SCALE,
    entropy_coeff=0.01,
    calculate_entropy=True,
    use_kl_loss=True,
    kl_loss_coef=0.3,
    kl_loss_type="k3",
    optimizer_steps=1,
)
CRITIC = CriticUpdate(
    mini_batch_prompts=4,
    epochs=1,
    shuffle=False,
    shuffle_seed=0,
    cliprange_value=0.5,
    loss_agg_mode="token-mean",
    loss_scale_factor=SCALE,
    optimizer_steps=1,
)
Rows = list[list[float]]
Result = tuple[float, dict[str, float], list[Tensor]]


class Case:
    """A mini-batch with everything an objective may read, as rows for the oracle and as a Batch."""

    def __init__(self, mask: list[list[bool]], draw: Callable[[], Rows]) -> None:
        self.mask = mask
        self.rows = {
            name: draw()
            for name in (
                "log_probs",
                "old_log_probs",
                "ref_log_probs",
                "entropy",
                "values",
                "returns",
                "advantages",
                "old_values",
            )
        }
        samples = torch.arange(len(mask))
        ids = torch.zeros(len(flat(mask)), dtype=torch.int64)
        self.batch = Batch(
            prompt_ids=torch.zeros(len(mask), dtype=torch.int64),
            prompt_offsets=torch.arange(len(mask) + 1),
            response_ids=ids,
            response_offsets=offsets_of(mask),
            response_mask=flat_mask(mask),
            row=samples,
            sample_index=samples * 0,
            group=samples,
            finish=(samples * 0).to(torch.uint8),
            is_padding=samples < 0,
            **{name: flat(self.rows[name]) for name in ("old_log_probs", "ref_log_probs", "advantages", "returns")},
            values=flat(self.rows["old_values"]),
        )
        self.predictions = {name: flat(self.rows[name]) for name in ("log_probs", "entropy", "values")}

    @property
    def denominators(self) -> Denominators:
        return Denominators.of(self.batch)

    def aggregate(self, mode: str, rows: Rows, scale: float = SCALE) -> float:
        tokens, samples = sum(map(sum, self.mask)), len(self.mask)
        return ppo.aggregate(mode, rows, self.mask, tokens, samples, scale)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mask = draw(masks())
    return Case(mask, lambda: rows_like(draw, mask, numbers.map(lambda x: x / 3)))


def seeded_case(seed: int) -> Case:
    """Eight samples of different lengths, one empty, one fully masked, tool tokens inside."""
    generator = torch.Generator().manual_seed(seed)
    mask = [(torch.rand(n, generator=generator) > 0.25).tolist() for n in (3, 0, 7, 1, 12, 5, 9)] + [[False, False]]
    return Case(
        mask, lambda: [torch.randn(len(row), generator=generator, dtype=torch.float64).tolist() for row in mask]
    )


def run(objective: Objective, case: Case, slices: list[Tensor]) -> Result:
    """Sum of losses and statistics over slices of token positions, with the gradient of every prediction."""
    weights = objective.token_weights(case.batch)
    leaves = {name: x.clone().requires_grad_() for name, x in case.predictions.items()}
    fields = {
        name: getattr(case.batch, name)
        for name in ("old_log_probs", "ref_log_probs", "advantages", "returns", "values")
    }
    total, statistics = 0.0, dict[str, float]()
    for at in slices:
        tokens = {name: x[at] for name, x in {**fields, "mask": case.batch.response_mask, "weight": weights}.items()}
        loss, parts = objective({name: x[at] for name, x in leaves.items()}, tokens)
        loss.backward()
        total += loss.item()
        for name, value in parts.items():
            assert not value.requires_grad
            statistics[name] = statistics.get(name, 0.0) + value.item()
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves.values()]
    return total, statistics, gradients


def everything(case: Case) -> list[Tensor]:
    return [torch.arange(case.batch.response_ids.numel())]


def map_tokens(function: Callable[..., float], *rows: Rows) -> Rows:
    return [[function(*token) for token in zip(*row, strict=True)] for row in zip(*rows, strict=True)]


def oracle_actor(case: Case, update: ActorUpdate, log_probs: Rows | None = None) -> dict[str, float]:
    r = {**case.rows, "log_probs": log_probs or case.rows["log_probs"]}
    mode, scale = update.loss_agg_mode, update.loss_scale_factor

    def token(place: int) -> Rows:
        return map_tokens(
            lambda x, y, a: ppo.policy_token(x, y, a, 0.2, 0.28, 3.0)[place],
            r["log_probs"],
            r["old_log_probs"],
            r["advantages"],
        )

    kl = map_tokens(lambda x, y: ppo.kl_token(x, y, update.kl_loss_type), r["log_probs"], r["ref_log_probs"])
    out = {
        "pg_loss": case.aggregate(mode, token(0), scale),
        "entropy_loss": case.aggregate(mode, r["entropy"], scale),
        "kl_loss": case.aggregate(mode, kl, scale),
        "pg_clipfrac": case.aggregate("token-mean", token(1)),
        "pg_clipfrac_lower": case.aggregate("token-mean", token(2)),
        "ppo_kl": case.aggregate("token-mean", token(3)),
    }
    out["loss"] = out["pg_loss"] - 0.01 * out["entropy_loss"] + 0.3 * out["kl_loss"]
    return out


def oracle_critic(case: Case, update: CriticUpdate, values: Rows | None = None) -> dict[str, float]:
    predicted = values or case.rows["values"]

    def token(place: int) -> Rows:
        return map_tokens(
            lambda v, o, t: ppo.value_token(v, o, t, 0.5)[place],
            predicted,
            case.rows["old_values"],
            case.rows["returns"],
        )

    loss = case.aggregate(update.loss_agg_mode, token(0), update.loss_scale_factor)
    return {
        "loss": loss,
        "vf_loss": loss,
        "vf_clipfrac": case.aggregate("token-mean", token(1)),
        "vpred_mean": case.aggregate("token-mean", predicted),
    }


def actor(case: Case, **changes: object) -> ActorObjective:
    return ActorObjective(replace(ACTOR, **changes), case.denominators)


def critic(case: Case, **changes: object) -> CriticObjective:
    return CriticObjective(replace(CRITIC, **changes), case.denominators)


@settings(deadline=None)
@given(cases(), st.sampled_from(MODES), st.sampled_from([SCALE, 7.0]))
def test_objectives_match_the_oracle(case: Case, mode: str, scale: float) -> None:
    for objective, oracle in ((actor, oracle_actor), (critic, oracle_critic)):
        built = objective(case, loss_agg_mode=mode, loss_scale_factor=scale)
        loss, statistics, _ = run(built, case, everything(case))
        expected = oracle(case, built.update)
        assert statistics == pytest.approx(expected, rel=1e-10, abs=1e-10)
        assert loss == pytest.approx(expected["loss"], rel=1e-10, abs=1e-10)


def cut(data: st.DataObject, case: Case) -> list[Tensor]:
    """Any partition of the tokens, in any order, with empty slices among them."""
    positions = data.draw(st.permutations(range(case.batch.response_ids.numel())))
    ends = sorted(data.draw(st.lists(st.integers(0, len(positions)), min_size=1, max_size=4)))
    pairs = zip([0, *ends], [*ends, len(positions)], strict=True)
    return [torch.tensor(positions[a:b], dtype=torch.int64) for a, b in pairs]


def assert_same(got: Result, expected: Result) -> None:
    assert got[0] == pytest.approx(expected[0], rel=1e-10, abs=1e-10)
    assert got[1] == pytest.approx(expected[1], rel=1e-10, abs=1e-10)
    for x, y in zip(got[2], expected[2], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@settings(deadline=None)
@given(st.data(), cases(), st.sampled_from(MODES))
def test_any_cut_of_the_tokens_gives_the_same_loss_statistics_and_gradients(
    data: st.DataObject, case: Case, mode: str
) -> None:
    for objective in (actor(case, loss_agg_mode=mode), critic(case, loss_agg_mode=mode)):
        assert_same(run(objective, case, cut(data, case)), run(objective, case, everything(case)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [actor, critic])
def test_a_cut_into_ranks_with_local_denominators_is_told_apart(
    mode: str, make: Callable[..., ActorObjective | CriticObjective]
) -> None:
    """The comparison of the tests above can fail: two ranks that count for themselves give another result."""
    case = seeded_case(1)
    whole = run(make(case, loss_agg_mode=mode), case, everything(case))
    local = replace(make(case, loss_agg_mode=mode), denominators=Denominators.of(case.batch.select([0, 1, 2, 3])))
    with pytest.raises(AssertionError):
        assert_same(run(local, case, everything(case)), whole)


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_a_ranks_share_are_those_of_the_whole_mini_batch(mode: str) -> None:
    case = seeded_case(2)
    for objective in (actor(case, loss_agg_mode=mode), critic(case, loss_agg_mode=mode)):
        whole = objective.token_weights(case.batch)
        shares = [[4, 0, 2], [7, 6, 1, 5, 3]]
        parts = [objective.token_weights(case.batch.select(share).padded(2)) for share in shares]
        order = [sample for share in shares for sample in share]
        arranged = case.batch.with_fields(values=whole).select(order).values
        got = torch.cat([part[:-2] for part in parts])
        assert torch.equal(got, arranged)
        assert all((part[-2:] == 0).all() for part in parts)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_agree_with_central_differences(mode: str) -> None:
    case = seeded_case(3)
    _, _, (log_prob_gradient, entropy_gradient, _) = run(actor(case, loss_agg_mode=mode), case, everything(case))
    _, _, (_, _, value_gradient) = run(critic(case, loss_agg_mode=mode), case, everything(case))
    step = 1e-6

    def nudged(rows: Rows, at: int, by: float) -> Rows:
        entries = iter(range(sum(map(len, rows))))
        return [[x + by if next(entries) == at else x for x in row] for row in rows]

    for at in range(log_prob_gradient.numel()):
        for rows, oracle, update, gradient in (
            (case.rows["log_probs"], oracle_actor, replace(ACTOR, loss_agg_mode=mode), log_prob_gradient),
            (case.rows["values"], oracle_critic, replace(CRITIC, loss_agg_mode=mode), value_gradient),
        ):
            ahead, behind = (oracle(case, update, nudged(rows, at, by))["loss"] for by in (step, -step))
            assert gradient[at].item() == pytest.approx((ahead - behind) / (2 * step), rel=1e-5, abs=1e-7)
    torch.testing.assert_close(entropy_gradient, -0.01 * actor(case, loss_agg_mode=mode).token_weights(case.batch))


def test_on_policy_nothing_is_clipped_and_the_divergence_is_zero() -> None:
    case = seeded_case(4)
    case.predictions["log_probs"] = flat(case.rows["old_log_probs"])
    _, statistics, _ = run(actor(case), case, everything(case))
    assert [statistics[name] for name in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl")] == [0, 0, 0]


@pytest.mark.parametrize("mask", [[[]], [[False, False]], [[], [False]]])
def test_nothing_valid_gives_an_exact_zero_that_is_attached_to_the_graph(mask: list[list[bool]]) -> None:
    case = Case(mask, lambda: [[0.5] * len(row) for row in mask])
    for objective in (actor(case), critic(case)):
        _, statistics, gradients = run(objective, case, everything(case))
        assert all(value == 0 for value in statistics.values())
        assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("outside", [float("nan"), float("inf"), float("-inf")])
def test_what_lies_outside_the_mask_never_leaks(outside: float) -> None:
    case, dirty = seeded_case(5), seeded_case(5)
    masked = ~case.batch.response_mask
    for x in dirty.predictions.values():
        x[masked] = outside
    dirty.batch = dirty.batch.with_fields(
        **{
            name: getattr(dirty.batch, name).masked_fill(masked, outside)
            for name in ("old_log_probs", "ref_log_probs", "advantages", "returns", "values")
        }
    )
    for make in (actor, critic):
        assert_same(run(make(dirty), dirty, everything(dirty)), run(make(case), case, everything(case)))


def test_a_padding_sample_is_invisible_whatever_its_mask_says() -> None:
    case, marked = seeded_case(6), seeded_case(6)
    sample = 4
    real = [i for i in range(len(case.batch)) if i != sample]
    marked.batch = replace(marked.batch, is_padding=torch.arange(len(case.batch)) == sample)
    alone = replace(case.batch.select(real))
    assert Denominators.of(marked.batch) == Denominators.of(alone)
    keep = case.batch.sample_of_token != sample
    case.batch, case.predictions = alone, {name: x[keep] for name, x in case.predictions.items()}
    for make in (actor, critic):
        got, expected = run(make(marked), marked, everything(marked)), run(make(case), case, everything(case))
        assert_same((got[0], got[1], [x[keep] for x in got[2]]), expected)
        assert all((x[~keep] == 0).all() for x in got[2])


def test_only_what_the_update_asks_for_is_computed() -> None:
    case = seeded_case(7)
    plain = actor(case, entropy_coeff=0.0, calculate_entropy=False, use_kl_loss=False)
    del case.predictions["entropy"]
    _, statistics, _ = run(plain, case, everything(case))
    assert not plain.needs_entropy
    assert set(statistics) == {"loss", "pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"}
    assert statistics["loss"] == statistics["pg_loss"]
    assert actor(case, entropy_coeff=0.0).needs_entropy
    assert actor(case, calculate_entropy=False).needs_entropy
    assert not critic(case).needs_entropy


def test_entropy_that_is_only_measured_has_no_gradient() -> None:
    case = seeded_case(8)
    _, statistics, (_, entropy_gradient, _) = run(actor(case, entropy_coeff=0.0), case, everything(case))
    assert statistics["entropy_loss"] == pytest.approx(oracle_actor(case, ACTOR)["entropy_loss"])
    assert (entropy_gradient == 0).all()


def test_objectives_travel_to_other_processes() -> None:
    case = seeded_case(9)
    for objective in (actor(case), critic(case)):
        assert pickle.loads(pickle.dumps(objective)) == objective  # noqa: S301
