"""Balancing and cutting: properties that hold for any lengths, and small cases worked by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.config.plan import MicroBatches
from corral.engine.packing import PADDING_LENGTH, balance, split, workload

lengths = st.lists(st.integers(1, 300), max_size=40)
limits = st.one_of(
    st.builds(MicroBatches, token_budget=st.integers(2, 400), samples=st.none()),
    st.builds(MicroBatches, token_budget=st.none(), samples=st.integers(1, 7)),
)


def test_differencing_beats_greedy() -> None:
    # The textbook case: longest-first greedy ends at 17 and 13.
    parts = balance([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]
    assert balance([5, 5, 5, 5], 2) == balance([5, 5, 5, 5], 2)
    assert sorted(len(part) for part in balance([5, 5, 5, 5], 2)) == [2, 2]


def test_one_long_sample_weighs_as_much_as_many_short_ones() -> None:
    parts = balance([90, 10, 10, 10, 10, 10, 10, 10, 10, 10], 2)
    assert sorted(parts, key=len) == [[0], list(range(1, 10))]
    even = balance([90, 10, 10, 10, 10, 10, 10, 10, 10, 10], 2, equal_counts=True)
    assert [len(part) for part in even] == [5, 5]


@given(st.lists(st.integers(1, 10_000), max_size=60), st.integers(1, 9), st.booleans())
def test_balance_is_a_partition(work: list[int], parts: int, equal: bool) -> None:
    out = balance(work, parts, equal_counts=equal)
    assert sorted(i for part in out for i in part) == list(range(len(work)))
    assert len(out) == parts
    if len(work) >= parts:
        assert all(out)
    if equal:
        assert max(map(len, out)) - min(map(len, out)) <= 1
    elif work:
        sums = [sum(work[i] for i in part) for part in out]
        assert max(sums) - min(sums) <= max(work)


@settings(max_examples=300)
@given(lengths, st.integers(1, 6), limits, st.booleans())
def test_split_keeps_its_promises(tokens: list[int], dp: int, limit: MicroBatches, by_workload: bool) -> None:
    cut = split(tokens, dp, limit, by_workload)
    padded = tokens + [PADDING_LENGTH] * cut.padding
    micro = [row for share in cut.shares for row in share]
    assert sorted(i for row in micro for i in row) == list(range(len(padded)))
    assert len(cut.shares) == dp
    assert len({len(share) for share in cut.shares}) == 1
    assert len(cut.shares[0]) >= 1
    assert all(micro)
    for row in micro:
        if limit.samples is not None:
            assert len(row) <= limit.samples
        elif sum(padded[i] for i in row) > limit.token_budget:
            assert len(row) == 1
            assert row[0] in cut.oversized
    budget = limit.token_budget
    assert cut.oversized == [i for i, n in enumerate(tokens) if budget is not None and n > budget]
    assert split(tokens, dp, limit, by_workload) == cut


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 4))
def test_padding_is_only_what_ranks_without_samples_need(tokens: list[int], dp: int) -> None:
    cut = split(tokens, dp, MicroBatches(None, 1), balance=True)
    assert cut.padding == -len(tokens) % dp
    assert len(cut.shares[0]) == -(-len(tokens) // dp)


def test_nothing_to_do_still_runs_once_on_every_rank() -> None:
    cut = split([], 3, MicroBatches(64, None), True)
    assert cut.padding == 3
    assert cut.shares == [[[0]], [[1]], [[2]]]


def test_a_sample_longer_than_the_budget_is_alone_and_reported() -> None:
    cut = split([5, 100, 6, 7], 1, MicroBatches(20, None), True)
    assert cut.oversized == [1]
    assert cut.shares == [[[1], [0, 2, 3]]]


def test_ranks_without_balancing_take_contiguous_runs() -> None:
    cut = split([3, 3, 90, 3, 3], 2, MicroBatches(None, 8), False)
    assert [sorted(i for row in share for i in row) for share in cut.shares] == [[0, 1], [2, 3, 4]]


def test_workload_grows_with_the_square() -> None:
    assert workload(1) == 24577
    assert workload(1000) == 25_576_000


def test_no_limit_is_an_error() -> None:
    with pytest.raises(ValueError, match="token budget"):
        split([1], 1, MicroBatches(None, None), True)
