"""The packed kernels of GPUs, executed on the CPU: the two libraries by stand-ins with their documented semantics.

A stand-in refuses every call that the real function's signature, dtypes or layout would refuse. What it computes is
the plain definition, so the code around it is compared with transformers' eager attention, one sample at a time.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen as torch_varlen

from corral.engine import kernels
from corral.engine.engine import Engine
from corral.engine.kernels import Segments, sdpa, varlen
from corral.engine.rank import Rank
from corral.errors import ConfigError
from tests.engine.parity import Case, Outcome, gaps, train
from tests.engine.ranks import on_ranks
from tests.engine.small import eager_log_probs, engine_plan, objective, random_batch

TORCH = inspect.signature(torch_varlen.varlen_attn)
FLASH = inspect.Signature(
    [
        *(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        ),
        *(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
            for name, default in (
                ("dropout_p", 0.0),
                ("softmax_scale", None),
                ("causal", False),
                ("window_size", (-1, -1)),
                ("softcap", 0.0),
                ("alibi_slopes", None),
                ("deterministic", False),
                ("return_attn_probs", False),
                ("block_table", None),
            )
        ),
    ]
)
"""flash_attn 2.8: flash_attn_varlen_func."""


def definition(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], scale: float, *, causal: bool) -> Tensor:
    """[T, H, D]: softmax(q kᵀ · scale) v within each stretch, query head h with key/value head h // (H / G)."""
    groups = q.shape[1] // k.shape[1]
    out = []
    for start, end in pairwise(bounds):
        a, b, c = (x[start:end].transpose(0, 1) for x in (q, k, v))
        b, c = b.repeat_interleave(groups, 0), c.repeat_interleave(groups, 0)
        scores = a @ b.transpose(1, 2) * scale
        if causal:
            later = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        out.append((scores.softmax(-1) @ c).transpose(0, 1))
    return torch.cat(out)


@dataclass
class StandIn:
    """One of the two functions. calls: how often it ran; offsets: the bounds' tensors it was given, kept alive;
    given: the arguments of the last call."""

    signature: inspect.Signature
    names: dict[str, str]
    calls: int = 0
    offsets: list[Tensor] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = {ours: bound.arguments[theirs] for ours, theirs in self.names.items()}
        q, k, v, at = given["q"], given["k"], given["v"], given["at"]
        assert q.dim() == k.dim() == v.dim() == 3
        assert k.shape == v.shape
        assert q.dtype == k.dtype == v.dtype
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        assert at is given["at_k"]
        assert at.dtype == torch.int32
        assert at.is_contiguous()
        bounds = at.tolist()
        assert (bounds[0], bounds[-1]) == (0, q.shape[0])
        longest = max(b - a for a, b in pairwise(bounds))
        assert given["longest"] == given["longest_k"] == longest
        if "gqa" in given:
            assert given["gqa"] or q.shape[1] == k.shape[1]
        causal = given["causal"] if "causal" in given else given["window"] == (-1, 0)
        scale = q.shape[-1] ** -0.5 if given["scale"] is None else given["scale"]
        self.calls += 1
        self.given = dict(bound.arguments)
        self.offsets.append(at)
        return definition(q, k, v, bounds, scale, causal=causal)


def torch_stand_in() -> StandIn:
    names = {"q": "query", "k": "key", "v": "value", "at": "cu_seq_q", "at_k": "cu_seq_k", "longest": "max_q"}
    names |= {"longest_k": "max_k", "scale": "scale", "window": "window_size", "gqa": "enable_gqa"}
    return StandIn(TORCH, names)


def flash_stand_in() -> StandIn:
    names = {"q": "q", "k": "k", "v": "v", "at": "cu_seqlens_q", "at_k": "cu_seqlens_k", "longest": "max_seqlen_q"}
    names |= {"longest_k": "max_seqlen_k", "scale": "softmax_scale", "causal": "causal"}
    return StandIn(FLASH, names)


def install(patch: pytest.MonkeyPatch, library: str) -> StandIn:
    """The stand-in in place of the library, every dtype allowed (comparisons are in float64), and the CPU a GPU."""
    patch.setattr(varlen, "DTYPES", (torch.float64, torch.float32, torch.bfloat16))
    varlen._beyond.cache_clear()
    if library == "torch":
        stand_in = torch_stand_in()
        patch.setattr(torch_varlen, "varlen_attn", stand_in)
        patch.setitem(kernels._BY_DEVICE, "cpu", varlen.attend)
    else:
        stand_in = flash_stand_in()
        module = ModuleType("flash_attn")
        module.flash_attn_varlen_func = stand_in  # type: ignore[attr-defined]
        module.__spec__ = sys.__spec__
        patch.setitem(sys.modules, "flash_attn", module)
        patch.setitem(kernels._BY_DEVICE, "cpu", varlen.attend_flash)
    return stand_in


@pytest.fixture(params=["torch", "flash"])
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    yield install(monkeypatch, request.param)
    varlen._beyond.cache_clear()


def row(heads: int, kv_heads: int, bounds: tuple[int, ...], seed: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(bounds[-1], h, 16) for h in (heads, kv_heads, kv_heads)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("bounds", [(0, 9), (0, 1, 2, 9), (0, 4, 9, 10)])
def test_forward_and_backward_equal_sdpa(stand_in: StandIn, heads: int, kv_heads: int, bounds: tuple[int, ...]) -> None:
    outcomes = []
    for attend in (kernels.attend, sdpa.attend):
        q, k, v = row(heads, kv_heads, bounds)
        out = attend(q, k, v, Segments(bounds), 0.3)
        weighed = (out * torch.arange(out.numel()).reshape(out.shape).cos()).sum()
        outcomes.append([out, *torch.autograd.grad(weighed, (q, k, v))])
    assert stand_in.calls == 1
    for found, wanted in zip(*outcomes, strict=True):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_model_scores_like_eager_attention_one_sample_at_a_time(
    stand_in: StandIn, models: dict[str, Path], family: str
) -> None:
    batch = random_batch(6, dtype=torch.float64)
    engine = Engine(engine_plan(models[family], dtype="float64"), Rank(), horizon=1)
    found = engine.infer(batch, [[0, 3, 1], [5, 2, 4]], temperature=0.8, entropy=True)
    log_probs, entropies = eager_log_probs(models[family], batch, 0.8, torch.float64)
    assert torch.allclose(found["log_probs"], log_probs, rtol=0, atol=1e-5)  # its norms round to float32
    assert torch.allclose(found["entropy"], entropies, rtol=0, atol=1e-5)
    assert stand_in.calls == 4  # two rows, two layers


def test_the_bounds_go_to_the_device_once_a_row(stand_in: StandIn, models: dict[str, Path]) -> None:
    """Also where layers are computed again in the backward pass."""
    batch = random_batch(4, dtype=torch.float64)
    engine = Engine(engine_plan(models["qwen3"], dtype="float64", checkpointing=True), Rank(), horizon=1)
    engine.train_step(batch, [[0, 1], [2, 3]], objective("actor", batch))
    assert stand_in.calls == 8  # two rows, two layers, twice each
    assert len({id(at) for at in stand_in.offsets}) == 2


def test_a_sample_does_not_see_its_neighbours(stand_in: StandIn) -> None:
    bounds = (0, 3, 9)
    q, k, v = row(4, 2, bounds)
    before = kernels.attend(q, k, v, Segments(bounds), 0.25)
    with torch.no_grad():
        for x in (q, k, v):
            x[:3] += 100.0
    after = kernels.attend(q, k, v, Segments(bounds), 0.25)
    assert torch.equal(before[3:], after[3:])
    assert not torch.allclose(before[:3], after[:3])


def test_training_with_sequence_parallelism_is_that_of_one_process(models: dict[str, Path]) -> None:
    case = Case(models["qwen3"], dtype="float64", sp=2, checkpointing=True)
    wanted = train(Rank(), case.alone())
    for of_rank in on_ranks(2, _train_with_both, case):
        for outcome, calls in of_rank:
            assert calls > 0
            assert max(gaps(wanted, outcome).values()) < 1e-9


def _train_with_both(rank: Rank, case: Case) -> list[tuple[Outcome, int]]:
    out = []
    for library in ("torch", "flash"):
        with pytest.MonkeyPatch.context() as patch:
            stand_in = install(patch, library)
            out.append((train(rank, case), stand_in.calls))
    return out


@pytest.mark.parametrize(
    ("dtype", "size", "said"),
    [
        (torch.float32, 16, "half precision only, and this is float32"),
        (torch.float64, 16, "half precision only, and this is float64"),
        (torch.bfloat16, 20, "heads of at most 256 in steps of 8, and these are 20"),
        (torch.bfloat16, 264, "heads of at most 256 in steps of 8, and these are 264"),
    ],
)
@pytest.mark.parametrize("attend", [varlen.attend, varlen.attend_flash])
def test_what_is_beyond_the_kernels_is_sdpa_and_said_once(
    attend: Any, dtype: torch.dtype, size: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    varlen._say.cache_clear()
    bounds = (0, 4, 9)
    q, k, v = (torch.randn(9, 2, size).to(dtype) for _ in range(3))
    for _ in range(3):
        out = attend(q, k, v, Segments(bounds), 0.3)
    assert torch.equal(out, sdpa.attend(q, k, v, Segments(bounds), 0.3))
    assert [said in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(("capability", "runs"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_an_old_gpu_is_seen(capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    varlen._beyond.cache_clear()
    reason = varlen._beyond(torch.bfloat16, 64, torch.device("cuda", 0))
    varlen._beyond.cache_clear()
    assert (reason is None) == runs
    assert runs or "has 7.5" in str(reason)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_installed_torch_takes_the_call(kv_heads: int) -> None:
    """Its real operators, forward and backward, on tensors without data: arguments, shapes and dtypes are checked."""
    with FakeTensorMode():
        q, k, v = (
            torch.empty(9, heads, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (4, kv_heads, kv_heads)
        )
        out = kernels.kernel("cuda")(q, k, v, Segments((0, 4, 9)), 0.125)
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


def test_the_installed_torch_takes_the_call_on_a_gpu_without_waiting_for_it() -> None:
    with torch.no_grad(), FakeTensorMode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        q, k, v = (torch.empty(9, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2))
        assert kernels.attend(q, k, v, Segments((0, 4, 9)), 0.125).device == q.device


def test_under_autocast_the_kernel_gets_one_dtype(stand_in: StandIn) -> None:
    """A norm's output is float32 there, a projection's bfloat16; the kernels take one dtype."""
    bounds = (0, 4, 9)
    q, k, v = (x.detach().float() for x in row(4, 2, bounds))
    with torch.autocast("cpu", torch.bfloat16):
        out = kernels.attend(q, k, v.bfloat16(), Segments(bounds), 0.25)
    assert out.dtype == torch.bfloat16
    assert stand_in.calls == 1


def test_flash_attn_has_to_be_there_when_it_is_asked_for(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="flash-attn is not installed"):
        Engine(engine_plan(models["qwen3"], attention="flash_attention_2"), Rank(), horizon=1)


def test_flash_attn_runs_when_it_is_asked_for(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = install(monkeypatch, "flash")
    monkeypatch.delitem(kernels._BY_DEVICE, "cpu")
    batch = random_batch(2, dtype=torch.float64)
    plan = engine_plan(models["qwen3"], dtype="float64", attention="flash_attention_2")
    Engine(plan, Rank(), horizon=1).infer(batch, [[0, 1]])
    varlen._beyond.cache_clear()
    assert stand_in.calls == 2


def test_flash_attn_is_deterministic_where_the_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = install(monkeypatch, "flash")
    q = torch.randn(5, 4, 8, dtype=torch.float64)
    try:
        for wanted in (False, True):
            torch.use_deterministic_algorithms(wanted, warn_only=True)
            varlen.attend_flash(q, q, q, kernels.Segments((0, 5)), 1.0)
            assert stand_in.given["deterministic"] is wanted
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_function_that_cannot_be_told_of_grouped_heads_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 has no enable_gqa."""
    install(monkeypatch, "torch")
    known = [parameter for name, parameter in TORCH.parameters.items() if name != "enable_gqa"]
    names = {name: theirs for name, theirs in torch_stand_in().names.items() if name != "gqa"}
    older = StandIn(inspect.Signature(known), names)
    monkeypatch.setattr(torch_varlen, "varlen_attn", older)
    monkeypatch.setattr(varlen, "_told_of_groups", lambda: False)
    q, k, v = (torch.randn(7, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    out = varlen.attend(q, k, v, kernels.Segments((0, 1, 7)), 0.5)
    torch.testing.assert_close(out, definition(q, k, v, [0, 1, 7], 0.5, causal=True))
    assert older.calls == 1
