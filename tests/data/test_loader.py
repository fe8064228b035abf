"""The order of prompts: complete epochs, the seed and the epoch alone decide, and a resumed loader does not differ."""

from dataclasses import dataclass
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.data.loader import PromptLoader
from corral.data.prompts import Prompt
from corral.errors import DataError


@dataclass
class Rows:
    """A data set of numbered prompts."""

    count: int

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: list[int]) -> list[Prompt]:
        return [Prompt(i, (i,), "source", "1", {}, []) for i in indices]


def loader(count: int, batch_size: int, *, shuffle: bool = True, seed: int = 0) -> PromptLoader:
    return PromptLoader(Rows(count), batch_size=batch_size, shuffle=shuffle, seed=seed)


def rows(source: PromptLoader, batches: int) -> list[list[int]]:
    return [[prompt.row for prompt in source.next_batch()] for _ in range(batches)]


sizes = st.integers(1, 6).flatmap(lambda batch: st.tuples(st.integers(batch, 25), st.just(batch)))


@given(sizes, st.booleans(), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_an_epoch_shows_no_row_twice_and_drops_only_the_rest(size, shuffle, seed) -> None:
    count, batch_size = size
    source = loader(count, batch_size, shuffle=shuffle, seed=seed)
    assert source.steps_per_epoch == count // batch_size
    for epoch in range(3):
        assert source.epoch == epoch
        seen = list(chain.from_iterable(rows(source, source.steps_per_epoch)))
        assert len(seen) == len(set(seen)) == count - count % batch_size
        if not shuffle:
            assert seen == list(range(len(seen)))


@given(sizes, st.booleans(), st.integers(0, 3), st.integers(0, 30), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_resuming_anywhere_equals_not_stopping(size, shuffle, seed, before, after) -> None:
    straight = loader(*size, shuffle=shuffle, seed=seed)
    expected = rows(straight, before + after)[before:]
    stopped = loader(*size, shuffle=shuffle, seed=seed)
    rows(stopped, before)
    resumed = loader(*size, shuffle=shuffle, seed=seed)
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.epoch == stopped.epoch
    assert rows(resumed, after) == expected
    assert resumed.state_dict() == straight.state_dict()


def test_epochs_and_seeds_give_different_orders_and_the_same_seed_the_same() -> None:
    first, second = loader(50, 50), loader(50, 50)
    orders = list(chain.from_iterable(rows(first, 4)))
    assert orders == list(chain.from_iterable(rows(second, 4)))
    epochs = [tuple(orders[start : start + 50]) for start in range(0, 200, 50)]
    assert len(set(epochs)) == 4
    assert tuple(rows(loader(50, 50, seed=1), 1)[0]) not in epochs


def test_the_order_of_a_seed_is_fixed_for_good() -> None:
    """A checkpoint of last year has to continue in the same order."""
    assert rows(loader(10, 5, seed=7), 2) == [[5, 3, 1, 6, 2], [9, 7, 4, 8, 0]]


def test_fewer_rows_than_a_batch_says_so_with_both_numbers() -> None:
    with pytest.raises(DataError, match=r"has 3 prompts.*train_batch_size=4"):
        loader(3, 4)


@pytest.mark.parametrize("other", [loader(11, 5), loader(10, 2), loader(10, 5, seed=1), loader(10, 5, shuffle=False)])
def test_a_state_of_other_data_or_order_is_refused(other) -> None:
    with pytest.raises(DataError, match=r"cannot resume the data order: .* was "):
        other.load_state_dict(loader(10, 5).state_dict())
