"""A packed row scores its samples as transformers' eager attention does, one sample at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from corral.batch import Batch
from corral.config.plan import MicroBatches
from corral.engine.engine import Engine
from corral.engine.packing import split
from corral.engine.rank import Rank
from tests.engine.parity import share_of
from tests.engine.ranks import on_ranks
from tests.engine.small import (
    ARCHITECTURES,
    eager_distributions,
    eager_log_probs,
    eager_values,
    engine_plan,
    objective,
    random_batch,
)

ONE_ROW = MicroBatches(100_000, None)


def scored(rank: Rank, folder: Path, role: str, sp: int, dtype: str = "float32") -> dict[str, Tensor]:
    """Results of one packed row that holds the whole batch; a critic is saved beside its folder by the first rank."""
    plan = engine_plan(folder, role, dtype=dtype, sp=sp, dp=rank.world // sp, limits=ONE_ROW, checkpointing=True)
    engine = Engine(plan, rank, horizon=1)
    batch = random_batch()
    share, micro, picked = share_of(batch, engine, ONE_ROW)
    assert (len(micro), sorted(picked)) == (1, list(range(len(batch))))
    if role == "critic":
        engine.save(folder.parent / f"critic-{folder.name}-{sp}")
    results = engine.infer(share, micro, temperature=0.7, entropy=True, sum_pi_squared=True)
    back = torch.tensor(picked).argsort()
    ordered = {name: share.with_fields(values=values).select(back).values for name, values in results.items()}
    return {name: values for name, values in ordered.items() if values is not None}


def scored_with_two_ranks(rank: Rank, folders: list[Path]) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    return [(scored(rank, folder, "actor", 2), scored(rank, folder, "critic", 2)) for folder in folders]


def assert_like_eager(folder: Path, sp: int, actor: dict[str, Tensor], critic: dict[str, Tensor]) -> None:
    batch = random_batch()
    log_probs, entropies = eager_log_probs(folder, batch, 0.7, torch.float32)
    assert log_probs.std() > 0.5
    assert torch.allclose(actor["log_probs"], log_probs, rtol=0, atol=1e-5)
    assert torch.allclose(actor["entropy"], entropies, rtol=0, atol=1e-5)
    squares = eager_distributions(folder, batch, 0.7, torch.float32).exp().square().sum(-1)
    assert torch.allclose(actor["sum_pi_squared"], squares, rtol=0, atol=1e-5)
    values = eager_values(folder.parent / f"critic-{folder.name}-{sp}", batch, torch.float32)
    assert values.std() > 0.1
    assert torch.allclose(critic["values"], values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_process(architecture: str, models: dict[str, Path]) -> None:
    folder = models[architecture]
    assert_like_eager(folder, 1, scored(Rank(), folder, "actor", 1), scored(Rank(), folder, "critic", 1))


def test_two_ranks_that_share_the_row(models: dict[str, Path]) -> None:
    folders = [models["qwen3"], models["llama"]]
    for rank in on_ranks(2, scored_with_two_ranks, folders):
        for folder, (actor, critic) in zip(folders, rank, strict=True):
            assert_like_eager(folder, 2, actor, critic)


def infer(engine: Engine, batch: Batch, limits: MicroBatches, **how: float) -> dict[str, Tensor]:
    return engine.infer(batch, split(batch.lengths, 1, limits, False).shares[0], **how)


def test_no_sample_sees_another(models: dict[str, Path]) -> None:
    """Changing every other sample of the row leaves a sample's log-probs as they were, to the last bit."""
    engine = Engine(engine_plan(models["qwen3"]), Rank(), horizon=1)
    batch = random_batch()
    other = batch.with_fields(prompt_ids=(batch.prompt_ids + 7) % 97, response_ids=(batch.response_ids + 5) % 97)
    ids = batch.response_offsets
    keep = slice(int(ids[4]), int(ids[5]))
    mixed_prompts, mixed_responses = other.prompt_ids.clone(), other.response_ids.clone()
    at = slice(int(batch.prompt_offsets[4]), int(batch.prompt_offsets[5]))
    mixed_prompts[at], mixed_responses[keep] = batch.prompt_ids[at], batch.response_ids[keep]
    mixed = batch.with_fields(prompt_ids=mixed_prompts, response_ids=mixed_responses)
    before, after = (infer(engine, b, ONE_ROW)["log_probs"] for b in (batch, mixed))
    assert torch.equal(before[keep], after[keep])
    assert not torch.allclose(before, after)


def test_entropy_only_when_asked_and_temperature_counts(models: dict[str, Path]) -> None:
    engine = Engine(engine_plan(models["qwen3"]), Rank(), horizon=1)
    batch = random_batch(4)
    assert set(infer(engine, batch, ONE_ROW)) == {"log_probs"}
    cold, warm = (infer(engine, batch, ONE_ROW, temperature=t, entropy=True)["entropy"] for t in (0.5, 2.0))
    assert bool((cold < warm).all())


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_only_empty_responses(role: str, models: dict[str, Path]) -> None:
    """Nothing to predict in the whole batch: results are empty, a step has zero gradient and leaves no NaN."""
    batch = Batch.from_samples(
        [[5, 6], [7]], [[], []], row=[0, 1], sample_index=[0, 0], group=[0, 1], finish=["abort", "abort"]
    )
    empty = torch.zeros(0)
    batch = batch.with_fields(old_log_probs=empty, ref_log_probs=empty, advantages=empty, values=empty, returns=empty)
    engine = Engine(engine_plan(models["qwen3"], role, limits=ONE_ROW), Rank(), horizon=1)
    assert all(values.shape == (0,) for values in infer(engine, batch, ONE_ROW, entropy=True).values())
    step = engine.train_step(batch, [[0], [1]], objective(role, batch))
    assert (step.grad_norm, step.skipped, step.stats["loss"]) == (0.0, False, 0.0)
    assert all(torch.isfinite(weight).all() for _, weight in engine.full_weights())


def test_micro_batches_have_to_cover_the_batch(models: dict[str, Path]) -> None:
    engine = Engine(engine_plan(models["qwen3"]), Rank(), horizon=1)
    with pytest.raises(ValueError, match="exactly once"):
        engine.infer(random_batch(3), [[0, 1], [1]])


def test_prompts_cost_no_vocabulary_projection(models: dict[str, Path]) -> None:
    engine = Engine(engine_plan(models["qwen3"]), Rank(), horizon=1)
    batch = random_batch()
    rows: list[int] = []
    head = engine.module.get_output_embeddings()
    handle = head.register_forward_hook(lambda _module, inputs, _output: rows.append(inputs[0].shape[1]))
    infer(engine, batch, ONE_ROW)
    handle.remove()
    assert rows == [batch.response_ids.numel()]


def test_torch_compile_setting_keeps_the_numbers(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled log-prob function is what runs; traced with the eager backend, its numbers are the same."""
    compiled: list[object] = []
    real = torch.compile

    def eager_backend(function: object, **options: object) -> object:
        compiled.append(function)
        return real(function, backend="eager", **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "compile", eager_backend)
    batch = random_batch(4)
    plain = Engine(engine_plan(models["qwen3"]), Rank(), horizon=1)
    fast = Engine(engine_plan(models["qwen3"], use_torch_compile=True), Rank(), horizon=1)
    assert len(compiled) == 1
    assert torch.equal(infer(plain, batch, ONE_ROW)["log_probs"], infer(fast, batch, ONE_ROW)["log_probs"])
