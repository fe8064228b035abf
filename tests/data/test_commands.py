"""`corral data` as its parsers run it."""

import argparse
import json

import pyarrow.parquet as pq
import pytest

from corral.data.commands import add_parsers


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers())
    args = parser.parse_args(["data", *words])
    return args.run(args)


def test_arithmetic(tmp_path, capsys) -> None:
    assert run("arithmetic", str(tmp_path), "--seed", "5", "--train", "6", "--test", "2") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/train.parquet: 6 rows",
        f"{tmp_path}/test.parquet: 2 rows",
    ]
    assert pq.read_table(tmp_path / "train.parquet").num_rows == 6


def test_gsm8k(tmp_path, capsys) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"question": "1?", "answer": "#### 1"}) + "\n")
    assert run("gsm8k", str(tmp_path), str(tmp_path / "out")) == 0
    assert "train.parquet: 1 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [(), ("arithmetic",), ("gsm8k", "only-source"), ("arithmetic", "out", "--train", "x")]
)
def test_wrong_arguments_end_in_usage(words) -> None:
    with pytest.raises(SystemExit):
        run(*words)
