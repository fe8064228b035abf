"""Rows of a math data set in the familiar parquet schema, and writing them to disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corral.errors import DataError, InfraError

INSTRUCTION = 'Think step by step and give the final answer after "####".'

Row = dict[str, Any]


def math_row(*, data_source: str, split: str, index: int, question: str, answer: str, final: str, **extra: Any) -> Row:
    """One row. answer: the worked solution; final: what the scorer compares with (`ground_truth`)."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question, **extra},
    }


def write_splits(out: Path, splits: Mapping[str, Sequence[Row]]) -> list[Path]:
    """Write `<split>.parquet` for every split into `out`, replacing files of these names only once all are written.

    Raises DataError when `out` is a file or a split has no rows, InfraError when the disk refuses.
    """
    import pyarrow
    import pyarrow.parquet

    for split, rows in splits.items():
        if not rows:
            raise DataError(f"the {split} split has no rows; nothing was written to {out}")
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file; name a folder for {', '.join(f'{split}.parquet' for split in splits)}")
    written = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=out) as scratch:
            for split, rows in splits.items():
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), Path(scratch) / f"{split}.parquet")
            for split in splits:
                written.append(out / f"{split}.parquet")
                os.replace(Path(scratch) / f"{split}.parquet", written[-1])
    except OSError as error:
        raise InfraError(f"cannot write to {out}: {error.strerror or error}; choose another folder") from error
    return written
