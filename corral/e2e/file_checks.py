"""Expectations on what a run left as files, and on the lines of its logs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from corral.e2e.case import Case
from corral.e2e.reading import Unreadable, read_json
from corral.e2e.result import Check

_MOST_SHOWN = 5  # lines of a forbidden pattern in the detail of its check
_PIECE = 1 << 16  # bytes of a line that are looked at together
_OVERLAP = 1 << 12  # of two pieces of a longer one: what matches may lie across their border


def file_checks(case: Case, records: Path) -> Iterator[Check]:
    for pattern in case.expect.files:
        found = sorted(path.relative_to(records).as_posix() for path in records.glob(pattern) if path.is_file())
        shown = "none" if not found else found[0] if len(found) == 1 else f"{len(found)}, such as {found[0]}"
        yield Check(group="files", name=f"file {pattern}", expected="there", found=shown, ok=bool(found))


def log_checks(case: Case, records: Path) -> Iterator[Check]:
    if case.expect.forbidden:
        yield from _forbidden(case.expect.forbidden, records)
    if case.expect.rank_logs:
        yield _rank_logs(case, records)


def log_files(records: Path) -> list[Path]:
    """What the command printed, then the logs of nodes and ranks."""
    driver = records / "driver.log"
    logs = [path for path in records.glob("logs/**/*.log") if path.is_file()]
    return [*([driver] if driver.is_file() else []), *sorted(logs, key=lambda path: (len(path.name), path))]


@dataclass
class _Hits:
    """Lines that match one pattern, as `file:line: text`."""

    pattern: re.Pattern[str]
    count: int = 0
    shown: list[str] = field(default_factory=list)

    def look(self, place: str, text: str, start: int) -> None:
        if match := self.pattern.search(text, start):
            self.count += 1
            if len(self.shown) < _MOST_SHOWN:
                seen = text[max(0, match.start() - 100) :] if match.start() > 200 else text
                self.shown.append(f"{place}: {seen[:300].strip()}")


def _forbidden(patterns: list[str], records: Path) -> Iterator[Check]:
    files = log_files(records)
    hits = [_Hits(re.compile(pattern, re.MULTILINE)) for pattern in patterns]
    lines, unseen = 0, _unseen(records)
    for file in files:
        name = file.relative_to(records).as_posix()
        with file.open("rb") as log:
            for number, text, start in _texts(log):
                lines += start == 0
                for hit in hits:
                    hit.look(f"{name}:{number}", text, start)
    for hit in hits:
        if not files:
            found = "no log to look at"
        elif hit.count:
            found = hit.shown[0] + (f" (and {hit.count - 1} more)" if hit.count > 1 else "")
        elif unseen:
            found = f"none in {lines} lines, but there is no {unseen} to look at"
        else:
            found = f"none in {lines} lines of {len(files)} logs"
        yield Check(
            group="logs",
            name=f"no line matches {hit.pattern.pattern}",
            expected="none",
            found=found,
            ok=bool(files) and not unseen and hit.count == 0,
            detail="\n".join(hit.shown[1:]),
        )


def _texts(log: IO[bytes]) -> Iterator[tuple[int, str, int]]:
    """(line, text, where what is new in the text starts): a long line comes in pieces, so that none is held whole. What
    a progress bar drew over is a line of its own for `^` and `$`."""
    number, before = 1, b""
    while piece := log.readline(_PIECE):
        text = (before + piece).decode("utf-8", "replace").rstrip("\r\n").replace("\r", "\n")
        yield number, text, 1 if before else 0
        whole = piece.endswith(b"\n")
        number, before = number + whole, b"" if whole else piece[-_OVERLAP:]


def _unseen(records: Path) -> str:
    """The first log that a run always leaves, and this one did not: that of the command, and of each rank of a plan of
    several; "" when all are there."""
    if not (records / "driver.log").is_file():
        return "driver.log"
    try:
        world = int(read_json(records, "plan.json")["topology"]["world"])
    except (Unreadable, KeyError, TypeError, ValueError, OverflowError):
        return ""  # it is no run of ranks, or failed before it knew them
    names = (f"rank-{rank}.log" for rank in range(world if world > 1 else 0))
    return next((name for name in names if not any(records.glob(f"logs/*/{name}"))), "")


def _rank_logs(case: Case, records: Path) -> Check:
    """A log of every rank, under the node it belongs to."""
    each = case.topology.devices_per_node
    names = [f"logs/node-{rank // each}/rank-{rank}.log" for rank in range(case.topology.world)]
    missing = [name for name in names if not (records / name).is_file()]
    found = f"{len(names) - len(missing)}" + (f" (no {missing[0]})" if missing else "")
    return Check(group="logs", name="rank logs", expected=f"{len(names)}", found=found, ok=not missing)
