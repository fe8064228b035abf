"""Ragged rows: which sample a token belongs to, valid tokens per sample, and discounted sums along each sample."""

from __future__ import annotations

import torch
from torch import Tensor

from corral.algorithms.masked import select

_BLOCK = 32  # tokens handled by one row of a matrix product; three levels of them for samples of 32³ tokens


def sample_of_token(offsets: Tensor) -> Tensor:
    """[R] int64: the sample each token of the ragged rows offsets [S+1] belongs to."""
    lengths = offsets.diff()
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=offsets.device), lengths)


def valid_offsets(mask: Tensor, offsets: Tensor) -> Tensor:
    """[S+1] int64: offsets of the rows that are left when only the valid tokens, mask [R] bool, are kept."""
    before = torch.cat([offsets.new_zeros(1), mask.cumsum(0)])
    return before[offsets]


def mean_of_sample_means(x: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """Scalar: mean of x [R] over each sample's valid tokens, then over the samples that have any (0 when none has)."""
    counts = valid_offsets(mask, offsets).diff()
    sums = x.new_zeros(counts.numel()).index_add_(0, sample_of_token(offsets), select(x, mask))
    return (sums / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)


def discounted_suffix_sums(x: Tensor, offsets: Tensor, decay: float) -> Tensor:
    """[R]: y_t = x_t + decay · y_{t+1} inside each sample of x [R], offsets [S+1]; 0 follows a sample's last token.

    A scan in blocks: samples are cut into blocks of 32 tokens, one product with the triangular matrix of powers
    solves all blocks at once, and the sums at the block starts obey the same recurrence with decay^32, solved by
    recursion. Work is R · 32 multiplications, depth is log₃₂ of the longest sample. x must be finite.
    """
    blocks = (offsets.diff() + _BLOCK - 1) // _BLOCK
    block_offsets = torch.cat([offsets.new_zeros(1), blocks.cumsum(0)])
    slot = _slots(offsets.diff(), block_offsets)
    grid = x.new_zeros(int(block_offsets[-1]) * _BLOCK).index_copy_(0, slot, x)

    step = torch.arange(_BLOCK, device=x.device)
    exponent = step[:, None] - step[None, :]  # row: source token, column: target token
    base = torch.tensor(decay, dtype=x.dtype, device=x.device)  # a plain float would give powers in the default dtype
    sums = grid.view(-1, _BLOCK) @ (base ** exponent.clamp(min=0)).tril()
    if bool((blocks > 1).any()):
        starts = discounted_suffix_sums(sums[:, 0], block_offsets, decay**_BLOCK)
        following = torch.cat([starts[1:], starts.new_zeros(1)])
        following[block_offsets[1:][blocks > 0] - 1] = 0
        sums.addcmul_(following[:, None], base ** (_BLOCK - step))
    return sums.view(-1).index_select(0, slot)


def _slots(lengths: Tensor, block_offsets: Tensor) -> Tensor:
    """[R]: where each token lies when every sample starts a new block and leaves a gap behind its last token."""
    behind = torch.arange(_BLOCK, device=lengths.device)
    ends = block_offsets[1:, None] * _BLOCK - 1 - behind
    taken = torch.ones(int(block_offsets[-1]) * _BLOCK, dtype=torch.bool, device=lengths.device)
    taken[ends[behind < (-lengths % _BLOCK)[:, None]]] = False
    return taken.nonzero().squeeze(1)
