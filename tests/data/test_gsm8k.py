"""GSM8K conversion, on hand-made rows and (when CORRAL_TEST_DATA is set) on the published files."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corral.data.gsm8k import final_answer, gsm8k_rows, write_gsm8k
from corral.errors import DataError


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


GOOD = {"question": "How many?", "answer": "Work.\n#### 1,234"}


def test_rows_from_jsonl(tmp_path) -> None:
    for split in ("train", "test"):
        write_jsonl(tmp_path / f"{split}.jsonl", [GOOD, {"question": "And?", "answer": "#### -$5"}])
    files = write_gsm8k(tmp_path, tmp_path / "out")
    first, second = pq.read_table(files[1]).to_pylist()
    assert first["data_source"] == "openai/gsm8k"
    assert first["ability"] == "math"
    assert first["reward_model"] == {"style": "rule", "ground_truth": "1234"}
    assert second["reward_model"]["ground_truth"] == "-5"
    assert first["extra_info"] == {"split": "test", "index": 0, "answer": GOOD["answer"], "question": "How many?"}
    assert first["prompt"][0]["content"].startswith("How many? ")


@pytest.mark.parametrize("folder", [".", "main"])
def test_rows_from_parquet_shards(tmp_path, folder) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    for shard in range(2):
        table = pa.Table.from_pylist([{**GOOD, "question": f"shard {shard}"}])
        pq.write_table(table, tmp_path / folder / f"train-0000{shard}-of-00002.parquet")
    assert [row["extra_info"]["question"] for row in gsm8k_rows(tmp_path, "train")] == ["shard 0", "shard 1"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "q", "answer": "no marker"}, "line 2: the answer has no final number"),
        ({"question": "q", "answer": "#### "}, "line 2: the answer has no final number"),
        ({"question": "q"}, "line 2: no text under 'answer'"),
        ({"question": None, "answer": "#### 1"}, "line 2: no text under 'question'"),
        ([1], "line 2: no text under 'question'"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, row, problem) -> None:
    write_jsonl(tmp_path / "train.jsonl", [GOOD, row])
    write_jsonl(tmp_path / "test.jsonl", [GOOD])
    with pytest.raises(DataError, match=problem) as caught:
        write_gsm8k(tmp_path, tmp_path / "out")
    assert "train.jsonl" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_torn_files_and_missing_splits_are_one_line(tmp_path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(GOOD) + '\n{"question": "tor')
    with pytest.raises(DataError, match="line 2: not JSON"):
        gsm8k_rows(tmp_path, "train")
    with pytest.raises(DataError, match=r"neither test\.jsonl"):
        gsm8k_rows(tmp_path, "test")
    (tmp_path / "test.parquet").write_text("not parquet")
    with pytest.raises(DataError, match="not a readable parquet file"):
        gsm8k_rows(tmp_path, "test")


def test_the_last_marker_counts() -> None:
    assert final_answer("#### 1\nno: #### 2,000", "here") == "2000"


@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_all_published_rows_convert(split, count) -> None:
    if "CORRAL_TEST_DATA" not in os.environ:
        pytest.skip("CORRAL_TEST_DATA is not set")
    rows = gsm8k_rows(Path(os.environ["CORRAL_TEST_DATA"]) / "gsm8k", split)
    assert len(rows) == count
    for row in rows:
        float(row["reward_model"]["ground_truth"])
