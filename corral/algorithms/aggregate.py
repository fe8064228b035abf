"""From a loss per token to one number: loss = Σ weight · token loss, with weights fixed before any split.

A weight holds the whole normalisation of its token, with denominators of the complete mini-batch. So the loss, and its
gradient, of any cut of the mini-batch into ranks, micro-batches and sequence slices is the plain sum over the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from corral.algorithms.segments import valid_offsets
from corral.batch import Batch

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)


@dataclass(frozen=True)
class Denominators:
    """Of one whole mini-batch, over all ranks: valid response tokens, and real samples.

    Padding samples count in neither. A real sample without a valid token adds nothing to a loss, yet counts as a
    sample.
    """

    tokens: int
    samples: int

    @staticmethod
    def of(mini_batch: Batch) -> Denominators:
        """Counted before the mini-batch is split."""
        return Denominators(tokens=int(loss_mask(mini_batch).sum()), samples=int((~mini_batch.is_padding).sum()))


def loss_mask(batch: Batch) -> Tensor:
    """[R] bool: the tokens a loss sees, that is the policy's own on samples that are not padding."""
    return batch.response_mask & ~batch.is_padding[batch.sample_of_token]


def token_weights(
    mode: str,
    mask: Tensor,
    offsets: Tensor,
    denominators: Denominators,
    scale: float | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weights [R] of the tokens of mask [R] bool, offsets [S+1], zero outside the mask. T, N: the denominators.

    token-mean 1/T; token-sum 1; seq-mean-token-sum 1/N; seq-mean-token-sum-norm 1/(N · scale), with scale in tokens
    (the longest response the configuration allows, never the width of a tensor); seq-mean-token-mean 1/(N · the
    sample's valid tokens). offsets must hold whole samples: the length of a sample is not known from a slice of it.
    Raises ValueError for an unknown mode, and for seq-mean-token-sum-norm without a scale.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {mode!r}: expected one of {AGGREGATIONS}")
    weights = mask.to(torch.float64)
    if mode == "token-mean":
        weights /= max(denominators.tokens, 1)  # no valid token anywhere: all weights are zero
    elif mode != "token-sum":
        weights /= max(denominators.samples, 1)
    if mode == "seq-mean-token-mean":
        valid = valid_offsets(mask, offsets).diff().clamp(min=1)
        weights /= torch.repeat_interleave(valid, offsets.diff())
    if mode == "seq-mean-token-sum-norm":
        if scale is None:
            raise ValueError("seq-mean-token-sum-norm needs a scale: the longest allowed response, in tokens")
        weights /= scale
    return weights.to(dtype)
