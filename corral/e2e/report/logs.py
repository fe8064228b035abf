"""Logs of a job for a report: of each its beginning, its end, and what stands around its first error."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from corral.job.agent.lines import LineReader
from corral.job.agent.output import OutputFile, output_files, read_regular
from corral.job.core.first_error import FirstError

MIB = 1 << 20
HEAD, TAIL, AROUND = 60, 200, 80  # lines
MOST_LOGS = 130
SCANNED = 8 * MIB  # bytes of one log that are searched; of a longer one the end is shown unsearched
ALL_SCANNED = 64 * MIB
_CHUNK = 256 << 10
_NUMBER = 1e-9  # line n is fed as written at n nanoseconds: that tells the line again, and outlives nothing


@dataclass(frozen=True)
class Line:
    """number: from 1; None where what lies before was not read."""

    number: int | None
    text: str


@dataclass(frozen=True)
class Log:
    """source: `driver` or `node-1/rank-5`. file: relative to the records. parts: runs of lines with gaps between them.
    error: number of the first error's line. note: what was left out."""

    source: str
    node: int | None
    rank: int | None
    file: str
    size: int
    parts: list[list[Line]]
    error: int | None = None
    error_text: str = ""
    note: str = ""

    def tail(self, lines: int) -> list[Line]:
        """The last lines; those up to shortly after the first error, when there is one."""
        shown = [line for part in self.parts for line in part]
        if self.error is not None:
            ends = [at for at, line in enumerate(shown) if line.number is not None and line.number <= self.error + 5]
            shown = shown[: ends[-1] + 1] if ends else shown
        return shown[-lines:]


def read_logs(records: Path) -> tuple[list[Log], str]:
    """The driver's log and those of the ranks that hold anything; and a note about those left out, or ""."""
    files = [file for file in output_files(records / "driver.log", records) if file.size()]
    logs, left = [], ALL_SCANNED
    for file in files[:MOST_LOGS]:
        scanned = min(SCANNED, max(left, MIB))
        logs.append(_read(file, records, scanned))
        left -= min(scanned, file.size())
    left_out = len(files) - len(logs)
    return logs, f"{left_out} further logs are in the records only" if left_out > 0 else ""


def _read(file: OutputFile, records: Path, scanned: int) -> Log:
    errors, head, tail, total = FirstError(), list[Line](), deque[Line](maxlen=TAIL), 0
    for total, text in enumerate(_lines(file.path, 0, scanned), 1):
        errors.feed(file.source, file.node, file.rank, text, total * _NUMBER)
        if total <= HEAD:
            head.append(Line(total, text))
        else:
            tail.append(Line(total, text))
    found = errors.found
    error = round(found.time / _NUMBER) if found else None
    around = list[Line]()
    if error is not None and HEAD < error < total - TAIL + AROUND:
        numbered = enumerate(_lines(file.path, 0, scanned), 1)
        around = [Line(number, text) for number, text in numbered if abs(number - error) <= AROUND]
    end = list[Line]()
    if (size := file.size()) > scanned:
        at = max(scanned, size - _CHUNK)
        end = [Line(None, text) for text in _lines(file.path, at, size - at)][-TAIL:]
        tail.clear()
    parts = _joined(head, around, list(tail))
    return Log(
        file.source,
        file.node,
        file.rank,
        file.path.relative_to(records).as_posix(),
        size,
        [*parts, end] if end else parts,
        error,
        found.text if found else "",
        f"searched for errors up to {scanned // MIB} MiB" if end else "",
    )


def _lines(path: Path, start: int, most: int) -> Iterator[str]:
    reader, at = LineReader(start), start
    while data := read_regular(path, at, min(_CHUNK, start + most - at)):
        at += len(data)
        yield from reader.feed(data)[0]
    yield from reader.flush()[0]


def _joined(*parts: list[Line]) -> list[list[Line]]:
    """Numbered runs in order, those that touch as one."""
    numbers = {line.number: line for part in parts for line in part if line.number is not None}
    joined: list[list[Line]] = []
    for number in sorted(numbers):
        if joined and joined[-1][-1].number == number - 1:
            joined[-1].append(numbers[number])
        else:
            joined.append([numbers[number]])
    return joined
