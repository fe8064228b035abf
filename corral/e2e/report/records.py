"""The records of a job as far as they can be read. The job wrote them, so each may be missing, broken, huge or hostile:
no reader here fails, follows a link, or reads more than its limit, and each says what it left out."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.e2e.reading import as_number
from corral.e2e.result import JobPart
from corral.findings import Finding
from corral.job.agent.output import read_regular

MIB = 1 << 20
MOST = 32 * MIB  # bytes of one record
MOST_STEPS = 20_000
MOST_NAMES = 2_000  # metrics
MOST_SPANS = 200_000
MOST_FINDINGS = 5_000
_RANK = re.compile(r"rank-([0-9]{1,6})")


def records_of(folder: Path, part: JobPart | None, default: str) -> Path:
    """Folder of a job's records inside the run's: where the result says, unless that is somewhere else."""
    named = Path(part.records) if part is not None and part.records else Path(default)
    return folder / (default if named.is_absolute() or ".." in named.parts else named)


def read_json(path: Path) -> Any:
    """The document, or None when it is missing, no JSON, or larger than MOST."""
    data = read_regular(path, 0, MOST + 1)
    if len(data) > MOST:
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True)
class Steps:
    """rows: the numbers of each line of metrics.jsonl; non-finite ones too. notes: what could not be read."""

    rows: list[dict[str, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row if name != "step"))[:MOST_NAMES]

    def series(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of the lines on which the metric is a finite number."""
        return [
            (row.get("step", at), row[name])
            for at, row in enumerate(self.rows, 1)
            if math.isfinite(row.get(name, math.nan)) and math.isfinite(row.get("step", at))
        ]


def read_steps(records: Path) -> Steps:
    """metrics.jsonl."""
    data = read_regular(records / "metrics.jsonl", 0, MOST + 1)
    notes = [f"only the first {MOST // MIB} MiB of metrics.jsonl were read"] if len(data) > MOST else []
    rows: list[dict[str, float]] = []
    broken = 0
    for text in data[:MOST].splitlines():
        if len(rows) == MOST_STEPS:
            notes.append(f"only the first {MOST_STEPS} lines of metrics.jsonl were read")
            break
        row = _numbers(text)
        if row is not None:
            rows.append(row)
        elif text.strip():
            broken += 1
    if broken:
        notes.append(f"{broken} of {broken + len(rows)} lines of metrics.jsonl are not JSON objects")
    return Steps(rows, notes)


def _numbers(text: bytes) -> dict[str, float] | None:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    return {name[:200]: value for name, given in row.items() if (value := as_number(given)) is not None}


@dataclass(frozen=True)
class Span:
    """One phase. start, end: seconds since the trace began."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Lane:
    """The phases of one rank, or of the driver (node and rank None), in order of their start."""

    name: str
    spans: list[Span]
    rank: int | None = None


@dataclass(frozen=True)
class Trace:
    """seconds: from the first start to the last end. notes: what could not be read."""

    lanes: list[Lane] = field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


def read_trace(records: Path) -> Trace:
    """trace.json (Trace Event Format): the driver, then the ranks in order."""
    path = records / "trace.json"
    document = read_json(path)
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        return Trace(notes=["trace.json is broken or too big"] if path.exists() else [])
    notes = [f"only {MOST_SPANS} of {len(events)} events of trace.json were read"] if len(events) > MOST_SPANS else []
    names: dict[tuple[int, int], str] = {}
    found: dict[tuple[int, int], list[Span]] = {}
    for event in events[:MOST_SPANS]:
        if not isinstance(event, dict):
            continue
        lane = (event.get("pid"), event.get("tid"))
        if not (type(lane[0]) is int and type(lane[1]) is int):
            continue
        key = (lane[0], lane[1])
        given = event.get("args")
        if event.get("name") == "thread_name" and isinstance(given, dict):
            names[key] = str(given.get("name"))[:80]
        elif event.get("ph") == "X" and (span := _span(event)):
            found.setdefault(key, []).append(span)
    if not found:
        return Trace(notes=[*notes, "trace.json holds no phase"])
    zero = min(span.start for spans in found.values() for span in spans)
    last = max(span.end for spans in found.values() for span in spans)
    lanes = [_lane(names.get(key, f"thread {key[1]}"), found[key], zero) for key in sorted(found)]
    return Trace(lanes, last - zero, notes)


def _span(event: dict[str, Any]) -> Span | None:
    start, duration = as_number(event.get("ts")), as_number(event.get("dur"))
    if start is None or duration is None or not 0 <= start < 1e18 or not 0 <= duration < 1e15:
        return None
    return Span(str(event.get("name"))[:80], start / 1e6, (start + duration) / 1e6)


def _lane(name: str, spans: list[Span], zero: float) -> Lane:
    shifted = [Span(span.name, span.start - zero, span.end - zero) for span in spans]
    shifted.sort(key=lambda span: (span.start, -span.end))
    match = _RANK.fullmatch(name)
    return Lane(name, shifted, int(match[1]) if match else None)


def read_findings(records: Path, part: JobPart | None) -> list[Finding]:
    """What was found before the run: in the result, and by the ranks themselves in collective.json; failures first."""
    given: list[object] = list(part.preflight) if part is not None else []
    collective = read_json(records / "collective.json")
    if isinstance(collective, dict):
        collective = collective.get("findings")
    if isinstance(collective, list):
        given += [finding for finding in collective if finding not in given]
    found = [finding for fields in given[:MOST_FINDINGS] if (finding := _finding(fields))]
    return sorted(found, key=lambda finding: finding.ok)


def _finding(fields: object) -> Finding | None:
    if not isinstance(fields, dict):
        return None
    try:
        finding = Finding.from_dict(fields)
    except TypeError:
        return None
    texts = (finding.check, finding.expected, finding.found, finding.fix, finding.unit)
    places = (finding.node, finding.rank, finding.peer)
    good = all(isinstance(text, str) for text in texts) and all(
        place is None or (type(place) is int and 0 <= place < 10**6) for place in places
    )
    value = as_number(finding.value)
    measured = finding.value is None or (value is not None and math.isfinite(value))
    return finding if good and measured and isinstance(finding.ok, bool) else None


def read_progress(records: Path, rank: int) -> dict[str, Any]:
    """What a rank said last of itself; empty when it said nothing."""
    said = read_json(records / "progress" / f"rank-{rank}.json")
    return said if isinstance(said, dict) else {}
