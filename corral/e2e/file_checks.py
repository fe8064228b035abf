"""Expectations on what a run left as files, and on the lines of its logs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from corral.e2e.case import Case
from corral.e2e.result import Check

_MOST_SHOWN = 5  # lines of a forbidden pattern in the detail of its check
_LONGEST_LINE = 1 << 16  # bytes of a line that are looked at


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

    def look(self, place: str, text: str) -> None:
        if self.pattern.search(text):
            self.count += 1
            if len(self.shown) < _MOST_SHOWN:
                self.shown.append(f"{place}: {text[:300].strip()}")


def _forbidden(patterns: list[str], records: Path) -> Iterator[Check]:
    files = log_files(records)
    hits = [_Hits(re.compile(pattern)) for pattern in patterns]
    lines = 0
    for file in files:
        name = file.relative_to(records).as_posix()
        with file.open("rb") as log:
            for number, line in enumerate(log, start=1):
                lines += 1
                text = line[:_LONGEST_LINE].decode("utf-8", "replace").rstrip("\r\n")
                for hit in hits:
                    hit.look(f"{name}:{number}", text)
    for hit in hits:
        if not files:
            found = "no log to look at"
        elif hit.count:
            found = hit.shown[0] + (f" (and {hit.count - 1} more)" if hit.count > 1 else "")
        else:
            found = f"none in {lines} lines of {len(files)} logs"
        yield Check(
            group="logs",
            name=f"no line matches {hit.pattern.pattern}",
            expected="none",
            found=found,
            ok=bool(files) and hit.count == 0,
            detail="\n".join(hit.shown[1:]),
        )


def _rank_logs(case: Case, records: Path) -> Check:
    """A log of every rank, under the node it belongs to."""
    each = case.topology.devices_per_node
    names = [f"logs/node-{rank // each}/rank-{rank}.log" for rank in range(case.topology.world)]
    missing = [name for name in names if not (records / name).is_file()]
    found = f"{len(names) - len(missing)}" + (f" (no {missing[0]})" if missing else "")
    return Check(group="logs", name="rank logs", expected=f"{len(names)}", found=found, ok=not missing)
