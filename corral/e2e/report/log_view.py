"""Logs on the page: a fold each, their first errors marked."""

from __future__ import annotations

from corral.e2e.report import text
from corral.e2e.report.html import Child, Element, el, link
from corral.e2e.report.logs import Line, Log
from corral.e2e.report.story import Side

LONGEST = 2_000  # characters of a line
ALL = 6_000_000  # characters of all logs of the page
BEFORE, AFTER = 14, 4  # lines of the excerpt


class Budget:
    """Characters that the page's logs may still take."""

    def __init__(self, left: int = ALL) -> None:
        self.left = left

    def take(self, amount: int) -> bool:
        self.left -= amount
        return self.left >= 0


def excerpt(side: Side) -> Element | None:
    """The lines around the first error of the log to read first."""
    log = side.failing_log()
    if log is None or log.error is None:
        return None
    near = [line for part in log.parts for line in part if line.number is not None]
    lines = [line for line in near if -BEFORE <= (line.number or 0) - log.error <= AFTER]
    shown = [_line(line, text.fit(line.text, 400), line.number == log.error) for line in lines]
    return el("pre", shown, class_="log excerpt", tabindex="0")


def logs(side: Side, name: str, budget: Budget) -> list[Child]:
    """name: of the job, for the anchors. The one to read first stands first, and those with errors take their room
    before the others."""
    first = side.failing_log() if any(log.error is not None for log in side.logs) else None
    ordered = sorted(side.logs, key=lambda log: (log is not first, log.error is None))
    views = {log.source: _log(side, log, name, budget) for log in ordered}
    parts: list[Child] = [views[first.source]] if first is not None else []
    parts += [views[log.source] for log in side.logs if log is not first]
    if side.logs_note:
        parts.append(el("p", side.logs_note, class_="note"))
    return parts


def _log(side: Side, log: Log, name: str, budget: Budget) -> Element:
    place = "driver" if log.rank is None else f"rank {log.rank} on node-{log.node}"
    title: list[Child] = [el("b", place), " ", el("span", text.size(log.size), class_="quiet")]
    if log.error is not None:
        title += [" ", el("span", f"line {log.error}: {text.line(log.error_text, 160)}", class_="error-text")]
    lines: list[Child] = []
    shown_to = 0
    for part in log.parts:
        if (gap := _gap(part, shown_to)) is not None:  # an element without children is false
            lines.append(gap)
        for line in part:
            cut = text.fit(line.text, LONGEST)
            if not budget.take(len(cut) + 40):
                lines.append(el("span", "… the page is full: the rest is in the file\n", class_="gap"))
                break
            lines.append(_line(line, cut, line.number is not None and line.number == log.error))
        shown_to = part[-1].number or shown_to
        if budget.left < 0:
            break
    below = el("p", link(f"{side.folder}/{log.file}", f"{side.folder}/{log.file}"), class_="note")
    if log.note:
        below.append(el("span", f" {log.note}"))
    identity = f"{name}-{log.source.replace('/', '-')}"
    return el(
        "details",
        el("summary", title),
        el("pre", lines, class_="log", tabindex="0"),
        below,
        class_="log-of",
        id=identity,
    )


def _gap(part: list[Line], shown_to: int) -> Element | None:
    first = part[0].number
    if first is None:
        return el("span", "… lines that were not read; the last ones:\n", class_="gap")
    if first > shown_to + 1:
        return el("span", f"… {text.count(first - shown_to - 1, 'line')} left out\n", class_="gap")
    return None


def _line(line: Line, shown: str, error: bool) -> Element:
    number = "" if line.number is None else str(line.number)
    return el("span", shown + "\n", class_="l e" if error else "l", data_n=number or None)
