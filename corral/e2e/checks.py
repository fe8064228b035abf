"""Expectations against records: the verdict of the job, and the files it left. What a run printed counts only where a
case forbids a line of it.

Records that are missing or broken are findings, never errors: a run that failed has few.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corral.e2e.case import Case
from corral.e2e.result import Check, JobPart

_ABSENT = object()


def evaluate(case: Case, job: JobPart, records: Path) -> list[Check]:
    """Every expectation of the case, the most telling first: how the job ended, what it planned, did, measured and
    left. records: the folder with the records of the job's last attempt."""
    return [*_run_checks(case, job)]


def read_metrics(records: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. Raises OSError, or ValueError that names the first broken line."""
    rows = []
    for number, line in enumerate((records / "metrics.jsonl").read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} of metrics.jsonl is not a JSON object")
        rows.append(row)
    return rows


def _run_checks(case: Case, job: JobPart) -> Iterator[Check]:
    yield Check(
        group="run",
        name="status",
        expected=case.expect.status,
        found=str(job.verdict.get("status")),
        ok=job.verdict.get("status") == case.expect.status,
    )
