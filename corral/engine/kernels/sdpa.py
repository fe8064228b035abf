"""Packed attention with PyTorch's scaled_dot_product_attention: any device, any float dtype."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from corral.engine.kernels.segments import Segments


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scaling: float) -> Tensor:
    """One kernel call a segment: a block mask would cost L² on CPU."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    parts = zip(*(torch.split(x, segments.lengths, dim=2) for x in (q, k, v)), strict=True)
    out = [scaled_dot_product_attention(a, b, c, is_causal=True, scale=scaling) for a, b, c in parts]
    return torch.cat(out, dim=2)[0].transpose(0, 1)
