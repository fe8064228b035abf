"""GSM8K (Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems") as training rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corral.data.rows import Row, math_row, write_splits
from corral.errors import DataError

DATA_SOURCE = "openai/gsm8k"
SPLITS = ("train", "test")
_MARKER = "####"


def write_gsm8k(source: Path, out: Path) -> list[Path]:
    """Write train.parquet and test.parquet to `out` from the published jsonl or parquet files in `source`.

    Raises DataError naming file and line when a file, a column or the final answer of a row is missing.
    """
    return write_splits(out, {split: gsm8k_rows(source, split) for split in SPLITS})


def gsm8k_rows(source: Path, split: str) -> list[Row]:
    """The rows of one split: `<split>.jsonl`, or else `<split>*.parquet`, in `source` or its folder `main`."""
    rows = []
    for index, (where, record) in enumerate(_records(source, split)):
        question, answer = (_text(record, key, where) for key in ("question", "answer"))
        rows.append(
            math_row(
                data_source=DATA_SOURCE,
                split=split,
                index=index,
                question=question,
                answer=answer,
                final=final_answer(answer, where),
            )
        )
    return rows


def final_answer(answer: str, where: str) -> str:
    """What follows the last `####`, without commas and dollar signs. `where` names the row in the error."""
    _, marker, final = answer.rpartition(_MARKER)
    final = final.replace(",", "").replace("$", "").strip()
    if not marker or not final:
        raise DataError(f"{where}: the answer has no final number after {_MARKER!r}; add it or remove the row")
    return final


def _text(record: Any, key: str, where: str) -> str:
    value = record.get(key) if isinstance(record, dict) else None
    if not isinstance(value, str):
        raise DataError(f"{where}: no text under {key!r}; GSM8K rows have the texts 'question' and 'answer'")
    return value


def _records(source: Path, split: str) -> Iterator[tuple[str, Any]]:
    """(place for messages, record) of every row."""
    for folder in (source, source / "main"):
        if (folder / f"{split}.jsonl").is_file():
            yield from _jsonl_records(folder / f"{split}.jsonl")
            return
        if parquet := sorted(folder.glob(f"{split}*.parquet")):
            for file in parquet:
                yield from _parquet_records(file)
            return
    raise DataError(f"{source} has neither {split}.jsonl nor {split}*.parquet; name the folder with the GSM8K files")


def _jsonl_records(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                yield where, json.loads(line)
            except ValueError as error:
                raise DataError(f"{where}: not JSON ({error}); is the file complete?") from error


def _parquet_records(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(file).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file} is not a parquet file ({error})") from error
    yield from ((f"{file}, row {number}", row) for number, row in enumerate(rows))
