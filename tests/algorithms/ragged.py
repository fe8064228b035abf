"""Ragged inputs for property tests: rows of plain floats, and the flat tensors that hold the same."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

OUTSIDE = (float("nan"), float("inf"), float("-inf"), 0.0, 3.0)
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")

# Rounded: a product of two tiny numbers underflows, and which branch of a clip won is then undecided.
numbers = st.floats(-5, 5).map(lambda x: round(x, 6))


@st.composite
def masks(draw: st.DrawFn, max_samples: int = 5, max_length: int = 9) -> list[list[bool]]:
    """Rows with empty responses, fully masked ones and tool tokens in the middle all likely."""
    row = st.one_of(
        st.just([]),
        st.lists(st.booleans(), max_size=max_length),
        st.integers(1, max_length).map(lambda n: [True] * n),
        st.integers(1, max_length).map(lambda n: [False] * n),
        st.integers(1, max_length // 3).map(lambda n: [True] * n + [False] * n + [True] * n),
    )
    return draw(st.lists(row, min_size=1, max_size=max_samples))


def rows_like(draw: st.DrawFn, mask: list[list[bool]], values: st.SearchStrategy[float] = numbers) -> list[list[float]]:
    """One number per token."""
    return [[draw(values) for _ in row] for row in mask]


def flat(rows: list[list[float]] | list[list[bool]]) -> Tensor:
    """[R] float64, or bool for masks."""
    entries = [x for row in rows for x in row]
    return torch.tensor(entries, dtype=torch.bool if entries and isinstance(entries[0], bool) else torch.float64)


def flat_mask(rows: list[list[bool]]) -> Tensor:
    """[R] bool, also when empty."""
    return flat(rows).bool()


def offsets_of(rows: list[list[float]] | list[list[bool]]) -> Tensor:
    return torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)


def poisoned(x: Tensor, mask: Tensor, value: float) -> Tensor:
    """x with `value` at every masked token."""
    return torch.where(mask, x, value)
