"""Packed attention by npu_fusion_attention equals the plain oracle and the CPU's own path, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from corral.engine import kernels
from corral.engine.kernels import Segments, npu, sdpa
from corral.errors import ConfigError
from tests.engine.npu.mapping import npu_on_cpu, oracle

Attend = Callable[[Tensor, Tensor, Tensor, Segments, float], Tensor]


@pytest.fixture(autouse=True)
def standin() -> Iterator[ModuleType]:
    with npu_on_cpu() as module:
        yield module


def row(heads: int = 4, kv_heads: int = 2, tokens: int = 13, size: int = 8, seed: int = 2) -> tuple[Tensor, ...]:
    """q, k, v, and a gradient of the result."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(tokens, h, size, generator=generator) for h in (heads, kv_heads, kv_heads, heads))


def results(attend: Attend, given: tuple[Tensor, ...], bounds: tuple[int, ...], scaling: float) -> list[Tensor]:
    """The result and the three gradients, in float64."""
    *inputs, grad = given
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    out = attend(q, k, v, Segments(bounds), scaling)
    out.backward(grad.to(out.dtype))  # type: ignore[no-untyped-call]
    return [x.double() for x in (out.detach(), *(t.grad for t in (q, k, v) if t.grad is not None))]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("bounds", [(0, 13), (0, 5, 6, 13), (0, 1, 2, 12, 13)])
def test_forward_and_gradients(kv_heads: int, bounds: tuple[int, ...]) -> None:
    given = row(kv_heads=kv_heads)
    ours = results(npu.attend, given, bounds, 0.3)
    plain = results(lambda q, k, v, segments, scaling: oracle(q, k, v, segments.bounds, scaling), given, bounds, 0.3)
    cpu = results(sdpa.attend, given, bounds, 0.3)
    assert len(ours) == 4
    for mine, slow, other in zip(ours, plain, cpu, strict=True):
        assert float((mine - slow).abs().max()) < 1e-5
        assert float((mine - other).abs().max()) < 1e-5


def test_no_segment_sees_another() -> None:
    q, k, v, grad = row()
    bounds = (0, 5, 13)
    before = results(npu.attend, (q, k, v, grad), bounds, 0.3)
    changed = tuple(torch.cat([x[:5], x[5:] + 1]) for x in (q, k, v, grad))
    after = results(npu.attend, changed, bounds, 0.3)
    assert all(torch.equal(a[:5], b[:5]) for a, b in zip(before, after, strict=True))
    assert not any(torch.equal(a[5:], b[5:]) for a, b in zip(before, after, strict=True))


def test_more_segments_than_one_call_takes(standin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu, "SEGMENTS", 3)
    given, bounds = row(), (0, 1, 4, 6, 9, 11, 12, 13)
    ours, plain = (results(attend, given, bounds, 0.3) for attend in (npu.attend, sdpa.attend))
    assert standin.CALLS["npu_fusion_attention"] == 3
    assert all(float((a - b).abs().max()) < 1e-5 for a, b in zip(ours, plain, strict=True))


def test_under_autocast_all_three_have_its_dtype() -> None:
    """A norm leaves float32 where a projection leaves bfloat16."""
    q, k, v, _ = row()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = kernels.attend(q, k, v.bfloat16(), Segments((0, 5, 13)), 0.3)
    assert out.dtype == torch.bfloat16
    assert float((out.double() - oracle(q, k, v, (0, 5, 13), 0.3)).abs().max()) < 3e-2


def attend_zeros(
    dtype: torch.dtype = torch.float32, heads: int = 1, size: int = 8, values: int = 8, tokens: int = 2
) -> Tensor:
    q = torch.zeros(tokens, heads, size, dtype=dtype)
    return npu.attend(q, q, torch.zeros(tokens, heads, values, dtype=dtype), Segments((0, tokens)), 0.3)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"dtype": torch.float64}, "float64, float64, float64"),
        ({"size": 776, "values": 776}, "heads of 776"),
        ({"values": 16}, r"heads of 8 \(values 16\)"),
        ({"heads": 257}, "257 heads"),
        ({"tokens": (1 << 20) + 1, "size": 1, "values": 1}, "1048577 tokens"),
    ],
)
def test_limits_are_named(given: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        attend_zeros(**given)  # type: ignore[arg-type]


def test_mixed_dtypes_are_named() -> None:
    q, k, v, _ = row()
    with pytest.raises(ConfigError, match="float32, float32, bfloat16"):
        npu.attend(q, k, v.bfloat16(), Segments((0, 13)), 0.3)
