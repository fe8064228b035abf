"""GSM8K (Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems") as training rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from corral.data.files import read_records
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


def _records(source: Path, split: str) -> list[tuple[str, Any]]:
    """(place for messages, record) of every row."""
    for folder in (source, source / "main"):
        lines = folder / f"{split}.jsonl"
        files = [lines] if lines.is_file() else sorted(folder.glob(f"{split}*.parquet"))
        if files:
            return [record for file in files for record in read_records(file)]
    raise DataError(f"{source} has neither {split}.jsonl nor {split}*.parquet; name the folder with the GSM8K files")
