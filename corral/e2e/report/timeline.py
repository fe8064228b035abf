"""When each rank was in which phase: a lane a rank, drawn to scale, and the seconds behind it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from corral.e2e.report import text
from corral.e2e.report.html import Child, Element, el, folded, table
from corral.e2e.report.records import Lane, Span, Trace

MOST_LANES, MOST_BARS = 65, 8_000
_COLOURS = 12
# Phases of driver and ranks that are the same have one colour.
_KNOWN = {
    "start_workers": 0,
    "build": 0,
    "start_rollout": 9,
    "gen": 1,
    "generate": 1,
    "reward": 2,
    "old_log_prob": 3,
    "ref": 4,
    "ref_log_prob": 4,
    "values": 5,
    "adv": 6,
    "update_critic": 7,
    "update_actor": 8,
    "update_weights": 10,
    "save_checkpoint": 11,
}


@dataclass(frozen=True)
class Window:
    """The part of the time that is drawn, in seconds."""

    start: float
    end: float

    def percent(self, at: float) -> str:
        share = (at - self.start) / (self.end - self.start) if self.end > self.start else 0.0
        return f"{100 * min(max(share, 0.0), 1.0):.3f}%"


def timeline(trace: Trace) -> list[Child]:
    """The whole run, its last step when that is short beside it, and a table of phases."""
    drawn = [lane for lane in trace.lanes if any(span.name != "step" for span in lane.spans)]
    if not drawn:
        return [el("p", note, class_="note") for note in trace.notes]
    lanes = drawn[:MOST_LANES]
    colours = _colours(lanes)
    steps = [span for lane in lanes for span in lane.spans if span.name == "step"]
    parts: list[Child] = [_legend(colours), _chart(lanes, Window(0.0, trace.seconds), colours, steps)]
    if steps and (last := steps[-1]).end - last.start < 0.8 * trace.seconds and last.end > last.start:
        title = "The last step" if len(steps) > 1 else "The step alone"
        parts += [el("h3", title), _chart(lanes, Window(last.start, last.end), colours, [])]
    notes = list(trace.notes)
    if len(drawn) > len(lanes):
        notes.append(f"{len(drawn) - len(lanes)} further lanes are in trace.json only")
    if sum(len(lane.spans) for lane in lanes) > MOST_BARS:
        notes.append(f"only the {MOST_BARS} longest phases are drawn")
    parts += [el("p", note, class_="note") for note in notes]
    parts.append(folded("Seconds by phase", _seconds(trace)))
    return parts


def _colours(lanes: list[Lane]) -> dict[str, int]:
    names = dict.fromkeys(span.name for lane in lanes for span in lane.spans if span.name != "step")
    free = [colour for colour in range(_COLOURS) if colour not in {_KNOWN.get(name) for name in names}]
    colours = {name: _KNOWN[name] for name in names if name in _KNOWN}
    for name in names:
        if name not in colours:
            colours[name] = free.pop(0) if free else _COLOURS
    return colours


def _legend(colours: dict[str, int]) -> Element:
    kinds: dict[int, list[str]] = {}
    for name, colour in colours.items():
        kinds.setdefault(colour, []).append(name)
    return el(
        "ul",
        (
            el("li", el("span", class_=f"key f{colour}"), " ", text.line(" / ".join(names), 120))
            for colour, names in list(kinds.items())
        ),
        class_="legend",
    )


def _chart(lanes: list[Lane], window: Window, colours: dict[str, int], steps: list[Span]) -> Element:
    shortest = _shortest(lanes)
    rows: list[Child] = [_row("", _axis(window), "axis")]
    if len(steps) > 1:
        rows.append(_row("step", _steps(steps, window), "steps"))
    for lane in lanes:
        spans = [
            span
            for span in lane.spans
            if span.name != "step"
            and span.end >= window.start
            and span.start <= window.end
            and span.end - span.start >= shortest
        ]
        bars = [_bar(lane, span, window, colours[span.name]) for span in spans]
        rows.append(_row(lane.name, el("svg", bars, class_="lane", role="img", aria_label=_said(lane, spans))))
    return el("div", rows, class_="timeline")


def _row(name: str, drawing: Element, kind: str = "") -> Element:
    return el("div", el("span", text.line(name, 24), class_="lane-name"), drawing, class_=f"row {kind}".strip())


def _shortest(lanes: list[Lane]) -> float:
    lengths = sorted((span.end - span.start for lane in lanes for span in lane.spans), reverse=True)
    return lengths[MOST_BARS - 1] if len(lengths) > MOST_BARS else 0.0


def _bar(lane: Lane, span: Span, window: Window, colour: int) -> Element:
    start, end = max(span.start, window.start), min(span.end, window.end)
    width = max((end - start) / (window.end - window.start) if window.end > window.start else 1.0, 0.001)
    said = f"{lane.name}: {span.name}, {text.seconds(span.end - span.start)}, from {text.seconds(span.start)} on"
    return el(
        "rect",
        el("title", said),
        class_=f"f{colour}",
        x=window.percent(start),
        width=f"{100 * width:.3f}%",
        y="1",
        height="16",
    )


def _said(lane: Lane, spans: Iterable[Span]) -> str:
    totals: dict[str, float] = {}
    for span in spans:
        totals[span.name] = totals.get(span.name, 0.0) + span.end - span.start
    parts = (f"{name} {text.seconds(total)}" for name, total in list(totals.items())[:20])
    return text.line(f"{lane.name}: {', '.join(parts)}")


def _steps(steps: list[Span], window: Window) -> Element:
    bands: list[Child] = []
    for number, span in enumerate(steps[:500], 1):
        share = (span.end - span.start) / (window.end - window.start) if window.end > window.start else 1.0
        bands.append(
            el("rect", class_="band", x=window.percent(span.start), width=f"{100 * share:.3f}%", y="2", height="14")
        )
        if share > 0.03:
            middle = window.percent((span.start + span.end) / 2)
            bands.append(el("text", str(number), x=middle, y="13", text_anchor="middle"))
    return el("svg", bands, class_="lane")


def _axis(window: Window) -> Element:
    length = window.end - window.start
    ticks: list[Child] = []
    if length > 0:
        step = _nice(length / 6)
        for at in range(int(length / step) + 1):
            last = at * step > 0.93 * length
            ticks.append(
                el(
                    "text",
                    f"{at * step:g} s",
                    x=window.percent(window.start + at * step),
                    y="12",
                    text_anchor="start" if at == 0 else "end" if last else "middle",
                )
            )
    return el("svg", ticks, class_="lane")


def _nice(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * 0.999)


def _seconds(trace: Trace) -> Element:
    """Each phase: the driver's seconds, and over the ranks the mean, the fastest and the slowest."""
    driver: dict[str, float] = {}
    ranks: dict[str, dict[str, float]] = {}
    for lane in trace.lanes:
        for span in lane.spans:
            of = driver if lane.rank is None else ranks.setdefault(span.name, {})
            key = span.name if lane.rank is None else lane.name
            of[key] = of.get(key, 0.0) + span.end - span.start
    names = sorted(
        driver.keys() | ranks.keys(), key=lambda name: -max([driver.get(name, 0.0), *ranks.get(name, {}).values()])
    )
    rows = []
    for name in names[:60]:
        of = ranks.get(name, {})
        slowest = max(of, key=lambda lane: of[lane], default="")
        rows.append(
            [
                name,
                f"{driver[name]:.2f}" if name in driver else "–",
                f"{sum(of.values()) / len(of):.2f}" if of else "–",
                f"{min(of.values()):.2f}" if of else "–",
                f"{of[slowest]:.2f} ({slowest})" if of else "–",
            ]
        )
    return table(["phase", "driver", "ranks, mean", "fastest rank", "slowest rank"], rows, "numbers")
