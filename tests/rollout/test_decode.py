"""The static decode step: what a device graph needs of it, and that it changes no result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from corral.config.plan import Sampling
from corral.engine.attention import CONTEXT
from corral.errors import ConfigError, TrainingError
from corral.rollout import decode, native
from corral.rollout.base import Completion, Request
from corral.rollout.kv_cache import CacheLayout, KVCache
from corral.rollout.native import NativeEngine
from tests.rollout.captured import Watching, capture
from tests.rollout.models import GREEDY, SAMPLED, build, rollout_plan

FILTERED = replace(SAMPLED, temperature=1.3, top_k=20, top_p=0.9)
ASKED = [
    Request(tuple((7 * i + j) % 48 for j in range(1 + 5 * i % 17)), row=i, sample_index=k)
    for i in range(5)
    for k in range(2)
]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several widths also for short sequences."""
    monkeypatch.setattr(decode, "_WIDTH", 8)


def generate(sampling: Sampling, *, graphs: bool, slots: int = 5, dtype: torch.dtype = torch.float64) -> Any:
    plan = replace(rollout_plan(max_num_seqs=slots), graphs=graphs)
    engine = NativeEngine(build("qwen3", dtype), eos_token_ids=(3, 9), plan=plan, max_length=128)
    return engine, [engine.generate(ASKED, sampling, step=step) for step in (1, 2)]


def assert_same(found: list[list[Completion]], wanted: list[list[Completion]], tolerance: float) -> None:
    for a, b in zip(chain(*found), chain(*wanted), strict=True):
        assert (a.token_ids, a.finish) == (b.token_ids, b.finish)
        assert a.log_probs == pytest.approx(b.log_probs, abs=tolerance, rel=0)


@pytest.mark.parametrize("sampling", [SAMPLED, FILTERED, GREEDY], ids=["plain", "filtered", "greedy"])
@pytest.mark.parametrize("slots", [3, 64])
def test_static_steps_change_no_sample(sampling: Sampling, slots: int) -> None:
    """They compute unused slots and masked positions along, which nobody sees."""
    assert_same(
        generate(sampling, graphs=True, slots=slots)[1], generate(sampling, graphs=False, slots=slots)[1], 1e-12
    )


@pytest.mark.parametrize("sampling", [SAMPLED, FILTERED, GREEDY], ids=["plain", "filtered", "greedy"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_replayed_step_is_the_step(sampling: Sampling, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded at its second run, from then on without its Python code: bit for bit the same."""
    wanted = generate(sampling, graphs=True, dtype=dtype)[1]
    replays, made = [0], []

    def counted(run: Callable[[], None]) -> Callable[[], None]:
        replay = capture(run)
        made.append(run)

        def count() -> None:
            replays[0] += 1
            replay()

        return count

    class Captured(decode.Decoder):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "capture": counted})

    monkeypatch.setattr(native, "Decoder", Captured)
    assert generate(sampling, graphs=True, dtype=dtype)[1] == wanted
    assert replays[0] > 3 * len(made) > 3


def decoder_of(engine: NativeEngine) -> decode.Decoder:
    assert engine._decoder is not None
    return engine._decoder


@pytest.mark.parametrize("sampling", [SAMPLED, FILTERED, GREEDY], ids=["plain", "filtered", "greedy"])
def test_two_steps_of_a_size_are_the_same_operators_on_the_same_shapes(sampling: Sampling) -> None:
    engine, _ = generate(sampling, graphs=True)
    decoder = decoder_of(engine)
    decoder.slots.clear()
    decoder.slots.enter(0, [3, 11, 1], torch.rand(3, 12, dtype=torch.float64))
    seen = []
    for live in (3, 4):  # a slot that holds nothing is computed along
        with torch.no_grad(), Watching() as watching:
            decoder.step(live, 14, sampling)
        seen.append(watching.shapes)
    assert seen[0] == seen[1]
    assert len(seen[0]) > 100


class OnDevice(TorchDispatchMode):
    """Fails on an operator that takes a tensor of the host, other than to make one there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, Tensor):
                assert x.device.type == "meta", f"{func}: a tensor of the host"
        return out


@pytest.mark.parametrize("sampling", [SAMPLED, FILTERED, GREEDY], ids=["plain", "filtered", "greedy"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_on_a_device_the_step_copies_nothing_from_the_host_and_reads_nothing_back(
    family: str, sampling: Sampling
) -> None:
    """On tensors without data: what reads one, or mixes one with the host's, fails."""
    module = build(family, torch.bfloat16).to("meta")

    def forward(ids: Any, positions: Any, context: Any, keep: Any) -> Tensor:
        options = {"use_cache": False, "logits_to_keep": keep, CONTEXT: context}
        logits: Tensor = module(input_ids=ids, position_ids=positions, **options).logits
        return logits

    cache = KVCache(CacheLayout.of(module, torch.bfloat16), 4, 32)
    decoder = decode.Decoder(forward, cache, 12, (3, 9), static=True)
    with torch.no_grad(), OnDevice():
        decoder.step(3, 14, sampling)


def test_what_cannot_be_captured_is_seen() -> None:
    """The two detectors above detect."""
    with pytest.raises(AssertionError, match="_local_scalar_dense"), Watching():
        torch.ones(3).sum().item()
    with pytest.raises(AssertionError, match="lift_fresh"), Watching():
        torch.ones(3) + torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(AssertionError, match="host"), OnDevice():
        torch.ones(3).to("meta")
    x = torch.zeros(())
    replay = capture(lambda: [x.add_(1)].clear())
    assert x == 0
    for _ in range(3):
        replay()
    assert x == 3


def test_a_host_decision_inside_a_step_would_show() -> None:
    """The stand-in replays what was recorded, not what Python would do now."""
    x, step = torch.zeros(()), [1]
    replay = capture(lambda: [x.add_(step[0])].clear())
    step[0] = 100
    replay()
    assert x == 1


def test_weights_that_moved_are_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With offload a parameter comes back to another place; new values in place need no new capture."""
    engine, _ = generate(SAMPLED, graphs=True)
    forgotten = []
    monkeypatch.setattr(decoder_of(engine), "forget", lambda: forgotten.append(1))
    with torch.no_grad():
        for p in engine._module.parameters():
            p.mul_(0.5)
    engine.generate(ASKED, SAMPLED, step=3)
    assert not forgotten
    before = [p.data for p in engine._module.parameters()]  # kept, so that no new place is an old one
    for p in engine._module.parameters():
        p.data = p.data.clone()
    engine.generate(ASKED, SAMPLED, step=4)
    assert forgotten == [1]
    assert before


def test_buffers_that_moved_alone_are_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary frequencies are read where they were captured too."""
    engine, _ = generate(SAMPLED, graphs=True)
    forgotten = []
    monkeypatch.setattr(decoder_of(engine), "forget", lambda: forgotten.append(1))
    before = list(engine._module.buffers())  # kept, so that no new place is an old one
    assert before
    for buffer in before:
        buffer.data = buffer.data.clone()
    engine.generate(ASKED, SAMPLED, step=3)
    assert forgotten == [1]


def test_logits_that_are_not_finite_are_seen_in_a_static_step() -> None:
    engine, _ = generate(SAMPLED, graphs=True)
    with torch.no_grad():
        engine._module.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(TrainingError, match="logits are not finite"):
        engine.generate(ASKED, SAMPLED, step=1)


def test_a_forward_that_waits_for_the_device_is_one_line_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def __enter__(self) -> None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore\nlines")

        def __exit__(self, *error: Any) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Refusing)
    with pytest.raises(ConfigError, match=r"is capturing; set .*\.enforce_eager=True$"):
        decode.capture_on_cuda()(lambda: None)


def test_the_reason_of_a_failed_capture_is_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch ends the capture on the way out, which fails for every capture that has failed before."""

    class Ending:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: Any) -> None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def run() -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Ending)
    with pytest.raises(ConfigError, match=r"not permitted when stream is capturing; set .*\.enforce_eager=True$"):
        decode.capture_on_cuda()(run)
