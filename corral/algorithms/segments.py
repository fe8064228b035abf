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

    A scan in blocks of 32 tokens: one product with the triangular matrix of powers solves all blocks at once, a block
    in which samples meet once for each of them. The sums at the starts of a sample's pieces obey the same recurrence
    with decay^32 (all pieces but the first and the last are whole blocks, and nothing follows the last or precedes the
    first), solved by recursion. Work is R · 32 multiplications, depth is log₃₂ of the longest sample. x must be finite.
    """
    base = torch.tensor(decay, dtype=x.dtype, device=x.device)  # a plain float would give powers in the default dtype
    step = torch.arange(_BLOCK, device=x.device)
    powers = (base ** (step[:, None] - step[None, :]).clamp(min=0)).tril()  # row: source token, column: target token
    to_end = base ** (_BLOCK - step)

    whole = x.numel() // _BLOCK * _BLOCK
    grid = x.new_empty(whole + _BLOCK).view(-1, _BLOCK)
    torch.mm(x[:whole].view(-1, _BLOCK), powers, out=grid[:-1])
    flat = grid.view(-1)

    starts, ends, rows = _pieces(offsets)
    block = starts // _BLOCK
    cut = (ends - starts < _BLOCK).nonzero().squeeze(1)
    at = block[cut, None] * _BLOCK + step
    inside = (at >= starts[cut, None]) & (at < ends[cut, None])
    cut_sums = torch.where(inside, x[at.clamp(max=x.numel() - 1)], 0) @ powers

    first = flat[starts]
    first[cut] = cut_sums.gather(1, starts[cut, None] % _BLOCK).squeeze(1)
    following = _following(first, rows, decay**_BLOCK)
    if following is not None:
        # A piece that is followed ends where its block ends.
        grid.addcmul_(x.new_zeros(grid.shape[0]).index_add_(0, block, following)[:, None], to_end)
        cut_sums.addcmul_(following[cut, None], to_end)
    flat[at[inside]] = cut_sums[inside]
    return flat[: x.numel()]


def _pieces(offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Runs of tokens in which both sample and block stay the same: starts [P], ends [P], and the rows [S+1] of pieces
    that make up the samples."""
    begin, end = offsets[:-1], offsets[1:]
    counts = torch.where(end > begin, (end - 1) // _BLOCK - begin // _BLOCK + 1, 0)
    rows = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    sample = sample_of_token(rows)
    block = torch.arange(sample.numel(), device=offsets.device) + (begin // _BLOCK - rows[:-1])[sample]
    starts = torch.maximum(begin[sample], block * _BLOCK)
    return starts, torch.minimum(end[sample], (block + 1) * _BLOCK), rows


def _following(first: Tensor, rows: Tensor, decay: float) -> Tensor | None:
    """[P]: the suffix sum at the start of the sample's next piece, 0 for its last piece; None when none is followed.

    first [P]: the sum at each piece's first token over the piece.
    """
    # Samples of several pieces only. They have at most two pieces for each border of blocks inside them, so there are
    # at most R / 16 numbers and the recursion ends.
    counts = rows.diff()
    many = counts > 1
    followed = many[sample_of_token(rows)].nonzero().squeeze(1)
    if followed.numel() == 0:
        return None
    ends = counts[many].cumsum(0)
    sums = discounted_suffix_sums(first[followed], torch.cat([ends.new_zeros(1), ends]), decay).roll(-1)
    sums[ends - 1] = 0
    return torch.zeros_like(first).index_copy_(0, followed, sums)
