"""Reading data files (parquet, json, jsonl) into rows, and checking that a row has what training needs.

Everything that can be known without a tokenizer is checked for every row at the start of a run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.errors import DataError


@dataclass(frozen=True)
class DataRow:
    """One row, checked. row: index over the concatenated files; where: file and row or line within it, for messages."""

    row: int
    where: str
    chat: list[dict[str, Any]]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


def read_rows(files: Sequence[str], *, prompt_key: str, max_samples: int = -1) -> list[DataRow]:
    """The first `max_samples` rows of the files taken together (-1: all), in order.

    Raises DataError naming file, row and fix when a file is missing, unreadable or empty, or a row is incomplete.
    """
    rows: list[DataRow] = []
    for file in files:
        if 0 <= max_samples <= len(rows):
            break
        records = read_records(Path(file))
        if not records:
            raise DataError(f"{file} has no rows; make the data again (for instance with `corral data arithmetic`)")
        if max_samples >= 0:
            records = records[: max_samples - len(rows)]
        rows += [
            _checked(record, row=len(rows) + at, where=where, prompt_key=prompt_key)
            for at, (where, record) in enumerate(records)
        ]
    if not rows:
        raise DataError(f"no rows to use: {len(files)} data files, at most {max_samples} samples; -1 means all")
    return rows


def read_records(file: Path) -> list[tuple[str, Any]]:
    """(its place, for messages; the record) of every row of a parquet, JSON or JSON lines file, unchecked.

    Raises DataError naming file and line when it is missing or cannot be read.
    """
    if not file.is_file():
        what = "a folder; name the files in it" if file.is_dir() else "missing; check the path or make the data"
        raise DataError(f"data file {file} is {what}")
    if file.suffix == ".parquet":
        return _numbered(file, _read_parquet(file))
    if file.suffix in (".json", ".jsonl"):
        return _read_json(file)
    raise DataError(f"{file}: cannot read a {file.suffix or 'nameless'} file; data files are .parquet, .json or .jsonl")


def _numbered(file: Path, records: list[Any]) -> list[tuple[str, Any]]:
    return [(f"{file}, row {number}", record) for number, record in enumerate(records)]


def _read_parquet(file: Path) -> list[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows: list[Any] = pyarrow.parquet.read_table(file).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{file} is not a readable parquet file ({reason}); write it again") from error
    return rows


def _read_json(file: Path) -> list[tuple[str, Any]]:
    """A JSON array of rows, or one row a line."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {file} as UTF-8 text ({error})") from error
    if text.lstrip().startswith("["):
        try:
            return _numbered(file, json.loads(text))
        except ValueError as error:
            raise DataError(f"{file} is not JSON ({error}); is the file complete?") from error
    rows = []
    # Not splitlines(): JSON allows other line separators inside its texts.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append((f"{file}, line {number}", json.loads(line)))
            except ValueError as error:
                raise DataError(f"{file}, line {number}: not JSON ({error}); is the file complete?") from error
    return rows


def _checked(record: Any, *, row: int, where: str, prompt_key: str) -> DataRow:
    if not isinstance(record, dict):
        raise DataError(f"{where}: a row has to be an object with named fields, this is {type(record).__name__}")
    for column in (prompt_key, "data_source", "reward_model"):
        if column not in record:
            hint = " (data.prompt_key names it)" if column == prompt_key else ""
            raise DataError(f"{where}: no column {column!r}{hint}; the columns are {', '.join(map(str, record))}")
    reward_model = record["reward_model"]
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    if truth is None:
        raise DataError(f"{where}: no ground truth under reward_model.ground_truth; add it or remove the row")
    if not isinstance(record["data_source"], str):
        raise DataError(f"{where}: data_source is {record['data_source']!r}; it has to name a scorer ('openai/gsm8k')")
    chat = record[prompt_key]
    if not _is_chat(chat):
        raise DataError(f"{where}: {prompt_key!r} has to be a non-empty list of messages with 'role' and 'content'")
    return DataRow(row, where, chat, record["data_source"], truth, record.get("extra_info") or {})


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and m.get("content") is not None for m in value)
    )
