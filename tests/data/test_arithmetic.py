"""Generated word problems: right answers, graded, disjoint splits, the same for the same seed."""

import random
import re

import pyarrow.parquet as pq
import pytest

from corral.data.arithmetic import arithmetic_rows, word_problem, write_arithmetic
from corral.errors import DataError


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_every_line_of_a_worked_answer_is_true_and_follows_from_the_line_before(level: int) -> None:
    for seed in range(300):
        problem = word_problem(random.Random(seed), level)
        *steps, final = problem.answer.splitlines()
        assert len(steps) == level
        value = int(steps[0].split()[0])
        assert str(value) in problem.question
        for step in steps:
            left, sign, right, result = re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (\d+) \w+\.", step).groups()
            assert int(left) == value
            assert re.search(rf"\b{right}\b", problem.question)
            value = int(result)
            exact = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
            assert value == exact[sign] if sign != "/" else value * int(right) == int(left)
            assert 0 <= value <= 999
        assert final == f"#### {value}" == f"#### {problem.result}"


def test_rows_have_the_familiar_schema_and_all_levels() -> None:
    row, *others = arithmetic_rows(seed=3, train=40, test=8)["train"]
    assert row["data_source"] == "corral/arithmetic"
    assert row["ability"] == "math"
    assert row["prompt"][0]["role"] == "user"
    assert row["extra_info"]["question"] in row["prompt"][0]["content"]
    assert "####" in row["prompt"][0]["content"]
    assert row["reward_model"] == {"style": "rule", "ground_truth": row["extra_info"]["answer"].split("#### ")[1]}
    assert row["extra_info"]["split"] == "train"
    assert [r["extra_info"]["index"] for r in [row, *others]] == list(range(40))
    assert {r["extra_info"]["level"] for r in [row, *others]} == {1, 2, 3, 4}


def test_no_question_occurs_twice_within_or_between_the_splits() -> None:
    splits = arithmetic_rows(seed=0, train=3000, test=500)
    questions = [row["extra_info"]["question"] for rows in splits.values() for row in rows]
    assert len(set(questions)) == 3500


def test_the_seed_decides_and_a_longer_train_split_begins_with_the_shorter() -> None:
    short = arithmetic_rows(seed=1, train=20, test=10)
    longer = arithmetic_rows(seed=1, train=50, test=10)
    other = arithmetic_rows(seed=2, train=20, test=10)
    assert longer["test"] == short["test"]
    assert longer["train"][:20] == short["train"]
    assert other["train"] != short["train"]


def test_files_are_written_whole_and_replaced(tmp_path) -> None:
    write_arithmetic(tmp_path / "a" / "b", seed=0, train=9, test=3)
    files = write_arithmetic(tmp_path / "a" / "b", seed=0, train=12, test=3)
    assert [pq.read_table(file).num_rows for file in files] == [12, 3]
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["test.parquet", "train.parquet"]


def test_bad_counts_and_places_are_one_line(tmp_path) -> None:
    with pytest.raises(DataError, match="--train is 0"):
        write_arithmetic(tmp_path / "out", seed=0, train=0, test=1)
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataError, match="is a file"):
        write_arithmetic(tmp_path / "file", seed=0, train=1, test=1)
    assert (tmp_path / "file").read_text() == "mine"
