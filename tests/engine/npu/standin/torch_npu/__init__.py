"""Stands in for torch_npu in tests: the calls Corral makes, with CPU tensors, as torch_npu's own text describes them.

Plain on purpose: one segment at a time, in float64, with the backward pass of attention written out. Whatever the text
rules out is an error here, also where a device would compute something.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__version__ = ".".join(torch.__version__.split("+")[0].split(".")[:2]) + ".0"

CALLS: dict[str, int] = {}
"""How often each function was called in this process."""

_GOOD_MASKS: list[Tensor] = []
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_INT_MAX = 2147483647


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _INT_MAX,
    next_tockens: int = _INT_MAX,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Attention in the TND layout: query [T, N, D], key and value [T, Nkv, D]."""
    _count("npu_fusion_attention")
    _must(input_layout == "TND", "the stand-in knows layout TND only")
    _must(query.dtype == key.dtype == value.dtype and query.dtype in _FLOATS, "one of float16, bfloat16, float32")
    _must(query.dim() == key.dim() == value.dim() == 3, "TND has three dimensions")
    _must(head_num == query.shape[1] and head_num % key.shape[1] == 0, "N is a multiple of Nkv")
    _must(key.shape[:2] == value.shape[:2] and key.shape[2] == query.shape[2] >= value.shape[2], "sizes of heads")
    _must(1 <= query.shape[2] <= 768 and head_num <= 256, "D up to 768, N up to 256")
    _must(pse is None and padding_mask is None and prefix is None and sink is None, "not used by Corral")
    _must(keep_prob == 1.0 and dropout_mask is None, "no dropout")
    _must(all(x.is_contiguous() for x in (query, key, value)), "contiguous")
    of_q, of_k = _segments(query.shape[0], actual_seq_qlen), _segments(key.shape[0], actual_seq_kvlen)
    seen = _visible(atten_mask, sparse_mode)
    out = _Attention.apply(query, key, value, scale, of_q, of_k, seen)  # type: ignore[no-untyped-call]
    unused = query.new_zeros(0)
    return out, unused.float(), unused.float(), unused, 0, 0, 0


def _segments(tokens: int, ends: list[int] | None) -> list[tuple[int, int]]:
    """Start and end of each segment, from ends without a leading 0 (lengths 2, 2, 2 are given as 2, 4, 6)."""
    _must(
        isinstance(ends, list) and all(type(end) is int for end in ends), "the ends of the segments are a list of int"
    )
    assert ends is not None
    _must(1 <= len(ends) <= 1024, "1 to 1024 segments")
    _must(ends[0] > 0 and ends == sorted(ends) and ends[-1] == tokens, "cumulated lengths, the last is T")
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _visible(mask: Tensor | None, sparse_mode: int) -> Any:
    """(queries, keys) → [queries, keys] bool, true where the key is seen. Without a mask everything is."""
    if mask is None:
        return lambda queries, keys: torch.ones(queries, keys, dtype=torch.bool)
    _must(sparse_mode == 3, "the stand-in knows mode 3, right-down causal")
    _must(
        tuple(mask.shape) == (2048, 2048) and mask.dtype in (torch.bool, torch.uint8), "a 2048 x 2048 mask of 0 and 1"
    )
    if not any(mask is one for one in _GOOD_MASKS):
        _must(torch.equal(mask.bool(), torch.ones(2048, 2048).triu(1).bool()), "true above the diagonal")
        _GOOD_MASKS.append(mask)
    return lambda queries, keys: torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, of_q: Any, of_k: Any, seen: Any) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.given = scale, of_q, of_k, seen
        parts = []
        for rows, columns in _pairs(of_q, of_k):
            weights = _weights(q[rows], k[columns], scale, seen)
            parts.append(torch.einsum("hij,jhd->ihd", weights, _per_query_head(v[columns], q)))
        return torch.cat(parts).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        scale, of_q, of_k, seen = ctx.given
        grad = grads[0].double()
        dq, dk, dv = [], [], []
        for rows, columns in _pairs(of_q, of_k):
            weights = _weights(q[rows], k[columns], scale, seen)
            dweights = torch.einsum("ihd,jhd->hij", grad[rows], _per_query_head(v[columns], q))
            dscores = weights * (dweights - (dweights * weights).sum(-1, keepdim=True)) * scale
            dq.append(torch.einsum("hij,jhd->ihd", dscores, _per_query_head(k[columns], q)))
            dk.append(_per_key_head(torch.einsum("hij,ihd->jhd", dscores, q[rows].double()), k))
            dv.append(_per_key_head(torch.einsum("hij,ihd->jhd", weights, grad[rows]), v))
        out = [torch.cat(parts).to(x.dtype) for parts, x in ((dq, q), (dk, k), (dv, v))]
        return *out, None, None, None, None


def _pairs(of_q: Any, of_k: Any) -> Any:
    """The rows of q and of k of each segment."""
    return [(slice(*ours), slice(*theirs)) for ours, theirs in zip(of_q, of_k, strict=True)]


def _weights(q: Tensor, k: Tensor, scale: float, seen: Any) -> Tensor:
    """[N, queries, keys] of one segment."""
    scores = torch.einsum("ihd,jhd->hij", q.double(), _per_query_head(k, q)) * scale
    return torch.softmax(scores.masked_fill(~seen(len(q), len(k)), -torch.inf), dim=-1)


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """[T, Nkv, D] to [T, N, D]: query head h reads key/value head h // (N / Nkv)."""
    return x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _per_key_head(x: Tensor, k: Tensor) -> Tensor:
    """[T, N, D] to [T, Nkv, D]: what the query heads of one key/value head add up to."""
    return x.view(x.shape[0], k.shape[1], -1, x.shape[2]).sum(2)


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    """y = self / rms(self) · gamma over the last dimensions, and 1 / rms."""
    _count("npu_rms_norm")
    _must(self.dtype == gamma.dtype and self.dtype in _FLOATS, "one dtype for both")
    _must(2 <= self.dim() <= 8 and self.shape[-1:] == gamma.shape, "gamma has the size of the last dimension")
    wide = self.double()
    rstd = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * rstd * gamma.double()).to(self.dtype), rstd.float()


def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    """A · sigmoid(A) · B for the halves A and B of `self` along `dim`."""
    _count("npu_swiglu")
    _must(self.dtype in _FLOATS and self.shape[dim] % 2 == 0, "two halves")
    a, b = self.double().chunk(2, dim)
    return (a * torch.sigmoid(a) * b).to(self.dtype)


def npu_rotary_mul(
    self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """self · r1 + (-second half, first half) · r2, all with four dimensions, of which r1 and r2 may broadcast two."""
    _count("npu_rotary_mul")
    _must(rotary_mode == "half" and rotate is None, "the stand-in knows mode half")
    _must(self.dim() == r1.dim() == r2.dim() == 4 and r1.shape == r2.shape, "four dimensions")
    _must(self.dtype == r1.dtype == r2.dtype and self.dtype in _FLOATS, "one dtype for all")
    _must(self.shape[3] == r1.shape[3] < 896 and self.shape[3] % 2 == 0, "D is even and below 896")
    batch, heads, rows, _ = self.shape
    _must(batch < 1000 and heads < 1000, "B and N below 1000")
    _must(tuple(r1.shape[:3]) in {(1, 1, rows), (batch, 1, rows), (batch, heads, rows)}, "11SD, B1SD or BNSD")
    first, second = self.double().chunk(2, -1)
    return (self.double() * r1.double() + torch.cat((-second, first), -1) * r2.double()).to(self.dtype)


def _count(name: str) -> None:
    CALLS[name] = CALLS.get(name, 0) + 1


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"torch_npu stand-in: {what}")
