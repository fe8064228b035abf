from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.batch import FINISH_REASONS, Batch

TOKEN_FIELDS = ("response_ids", "response_mask", "scores", "rollout_log_probs")
SAMPLE_FIELDS = ("row", "sample_index", "group", "finish", "is_padding")

Sample = tuple[list[int], list[int], str]


@st.composite
def samples(draw: st.DrawFn) -> list[Sample]:
    """(prompt, response, finish reason), with empty responses likely."""
    tokens = st.integers(0, 1000)
    one = st.tuples(
        st.lists(tokens, min_size=1, max_size=5), st.lists(tokens, max_size=5), st.sampled_from(FINISH_REASONS)
    )
    return draw(st.lists(one, min_size=1, max_size=6))


def build(rows: list[Sample], first_row: int = 0) -> Batch:
    """A batch whose every token field differs from token to token."""
    batch = Batch.from_samples(
        [prompt for prompt, _, _ in rows],
        [response for _, response, _ in rows],
        row=[first_row + i for i in range(len(rows))],
        sample_index=[i % 2 for i in range(len(rows))],
        group=[first_row + i // 2 for i in range(len(rows))],
        finish=[finish for _, _, finish in rows],
        rollout_log_probs=[[-0.1 * j - i for j in range(len(response))] for i, (_, response, _) in enumerate(rows)],
    )
    tokens = batch.response_ids.numel()
    return batch.with_fields(
        response_mask=torch.arange(tokens) % 3 != 1, scores=torch.arange(tokens, dtype=torch.float32) + 1000 * first_row
    )


def contents(batch: Batch) -> list[dict[str, object]]:
    """Sample by sample, as plain data: what two batches must share to mean the same."""
    return [
        {
            "prompt": batch.prompt(i).tolist(),
            **{name: batch.response(i, name).tolist() for name in TOKEN_FIELDS},
            **{name: getattr(batch, name)[i].item() for name in SAMPLE_FIELDS},
        }
        for i in range(len(batch))
    ]


@settings(deadline=None)
@given(samples())
def test_samples_come_back_as_they_went_in(rows: list[Sample]) -> None:
    batch = build(rows)
    assert len(batch) == len(rows)
    assert batch.lengths == [len(prompt) + len(response) for prompt, response, _ in rows]
    assert [batch.prompt(i).tolist() for i in range(len(rows))] == [prompt for prompt, _, _ in rows]
    assert [batch.response(i).tolist() for i in range(len(rows))] == [response for _, response, _ in rows]
    assert [FINISH_REASONS[i] for i in batch.finish.tolist()] == [finish for _, _, finish in rows]
    owners = [i for i, (_, response, _) in enumerate(rows) for _ in response]
    assert batch.sample_of_token.tolist() == owners


@settings(deadline=None)
@given(st.data(), samples())
def test_select_takes_whole_samples_in_the_order_asked_for(data: st.DataObject, rows: list[Sample]) -> None:
    batch = build(rows)
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    expected = contents(batch)
    assert contents(batch.select(index)) == [expected[i] for i in index]
    assert contents(batch.select(torch.tensor(index, dtype=torch.int64))) == [expected[i] for i in index]


@settings(deadline=None)
@given(st.data(), samples())
def test_concat_puts_back_what_select_took_apart(data: st.DataObject, rows: list[Sample]) -> None:
    batch = build(rows)
    order = data.draw(st.permutations(range(len(rows))))
    at = data.draw(st.integers(0, len(rows)))
    joined = Batch.concat([batch.select(order[:at]), batch.select(order[at:])])
    back = joined.select([order.index(i) for i in range(len(rows))])
    assert contents(back) == contents(batch)
    for name in ("prompt_offsets", "response_offsets"):
        assert torch.equal(getattr(back, name), getattr(batch, name))
        assert getattr(back, name).dtype == torch.int64


@settings(deadline=None)
@given(samples(), samples(), st.integers(0, 4))
def test_concat_and_padding_keep_every_sample(left: list[Sample], right: list[Sample], count: int) -> None:
    a, b = build(left), build(right, first_row=50)
    joined = Batch.concat([a, b]).padded(count)
    real = len(left) + len(right)
    assert contents(joined)[:real] == contents(a) + contents(b)
    assert joined.is_padding.tolist() == [False] * real + [True] * count
    for i in range(real, real + count):
        assert joined.lengths[i] == 2
        assert not joined.response(i, "response_mask").any()
        assert joined.response(i, "scores").tolist() == [0.0]
        assert joined.group[i] == -1
    for name in (*TOKEN_FIELDS, *SAMPLE_FIELDS):
        assert getattr(joined, name).dtype == getattr(a, name).dtype


def test_an_unset_field_stays_unset_and_a_field_set_in_one_part_only_is_refused() -> None:
    batch = build([([1], [2, 3], "stop")])
    assert batch.select([0, 0]).values is None
    assert batch.padded(1).values is None
    with pytest.raises(ValueError, match="values is set in some of the parts only"):
        Batch.concat([batch, batch.with_fields(values=torch.zeros(2))])


@pytest.mark.parametrize("name", ["scores", "response_mask", "group", "advantages"])
def test_a_field_of_the_wrong_size_is_refused(name: str) -> None:
    batch = build([([1], [2, 3], "stop")])
    with pytest.raises(ValueError, match=name):
        batch.with_fields(**{name: torch.zeros(5)})


def test_the_dtype_of_log_probs_is_the_callers() -> None:
    batch = Batch.from_samples(
        [[1]],
        [[2]],
        row=[0],
        sample_index=[0],
        group=[0],
        finish=["stop"],
        rollout_log_probs=[[-1 / 3]],
        dtype=torch.float64,
    )
    assert batch.rollout_log_probs is not None
    assert batch.rollout_log_probs.tolist() == [-1 / 3]
