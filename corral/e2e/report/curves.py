"""The metrics of a run: a small curve each when there are steps enough, and the last step in numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from corral.e2e.report import text
from corral.e2e.report.html import Child, Element, el, folded, table
from corral.e2e.report.records import Steps

MOST_CURVES, MOST_POINTS, MOST_FIGURES = 120, 300, 400
_FIRST = (
    "critic/score/mean",
    "actor/pg_loss",
    "critic/vf_loss",
    "actor/entropy",
    "actor/grad_norm",
    "critic/grad_norm",
    "actor/ppo_kl",
    "response_length/mean",
    "perf/throughput",
    "timing_s/step",
)
_WIDTH, _HEIGHT = 300.0, 90.0
Points = Sequence[tuple[float, float]]


def curves(main: Steps, reference: Steps | None) -> list[Child]:
    """Those a reader looks for first, the others behind a fold; then all of the last step."""
    names = [name for name in main.names() if main.series(name)]
    first = [name for name in _FIRST if name in names]
    others = sorted(name for name in names if name not in first)
    parts: list[Child] = []
    if len(main.rows) > 1:
        if reference is not None:
            parts.append(
                el(
                    "ul",
                    el("li", el("span", class_="key line"), " this run"),
                    el("li", el("span", class_="key reference"), " reference run"),
                    class_="legend",
                )
            )
        parts.append(_cards(first or others[:10], main, reference))
        rest = others if first else others[10:]
        if rest:
            parts.append(folded(f"{len(rest)} further metrics", _cards(rest[:MOST_CURVES], main, reference)))
        if len(rest) > MOST_CURVES:
            parts.append(el("p", f"{len(rest) - MOST_CURVES} more are in metrics.jsonl only", class_="note"))
    if main.rows:
        parts += _last_step(first, others, main, reference)
    parts += [el("p", note, class_="note") for note in main.notes]
    return parts


def _cards(names: Sequence[str], main: Steps, reference: Steps | None) -> Element:
    cards = [_card(name, main.series(name), reference.series(name) if reference is not None else []) for name in names]
    return el("div", cards, class_="cards")


def _card(name: str, points: Points, reference: Points) -> Element:
    points, reference = _thinned(points), _thinned(reference)
    everything = [*points, *reference]
    low, high = min(y for _, y in everything), max(y for _, y in everything)
    left, right = min(x for x, _ in everything), max(x for x, _ in everything)
    ends = (f"{text.number(value)} at step {step:.0f}" for step, value in (points[0], points[-1]))
    said = f"{name}: {', '.join(ends)}"
    drawn = ((reference, "reference"), (points, "line"))
    lines = [_line(of, kind, (left, right), (low, high)) for of, kind in drawn if of]
    drawing = el(
        "svg",
        lines,
        viewBox=f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}",
        preserveAspectRatio="none",
        role="img",
        aria_label=text.line(said),
    )
    return el(
        "figure",
        el("figcaption", el("span", text.line(name, 80)), el("b", text.number(points[-1][1]))),
        el("div", el("span", f"{high:.4g}"), drawing, el("span", f"{low:.4g}"), class_="plot"),
        el("div", el("span", f"step {left:.0f}"), el("span", f"{right:.0f}"), class_="steps-axis"),
    )


def _thinned(points: Points) -> Points:
    """At most MOST_POINTS of them: of each stretch the lowest and the highest, so that no peak is lost."""
    if len(points) <= MOST_POINTS:
        return points
    width = math.ceil(2 * len(points) / MOST_POINTS)
    kept: list[tuple[float, float]] = []
    for at in range(0, len(points), width):
        stretch = points[at : at + width]
        kept += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return kept


def _line(points: Points, kind: str, across: tuple[float, float], up: tuple[float, float]) -> Element:
    def x(value: float) -> float:
        return _WIDTH * _share(value, *across)

    def y(value: float) -> float:
        return _HEIGHT - 4 - (_HEIGHT - 8) * _share(value, *up)

    drawn = [f"{x(a):.1f},{y(b):.1f}" for a, b in points]
    # One point is a line of no length, which round ends make a dot.
    return el("polyline", points=" ".join(drawn if len(drawn) > 1 else drawn * 2), class_=kind)


def _share(value: float, low: float, high: float) -> float:
    """Where the value lies between the two; halved first, so that no difference overflows."""
    return (value / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.5


def _last_step(first: list[str], others: list[str], main: Steps, reference: Steps | None) -> list[Child]:
    """All figures behind a fold; those a reader looks for first stand before it when there are no curves."""
    last = main.rows[-1]
    step = last.get("step", float(len(main.rows)))
    other = next((row for row in reversed(reference.rows) if row.get("step") == step), None) if reference else None
    heads = ["metric", "this run"] + (["reference run", "difference"] if other is not None else [])

    def figures(names: list[str]) -> Element:
        rows = (_figure(name, last[name], other) for name in names[:MOST_FIGURES] if name in last)
        return table(heads, rows, "numbers")

    everything = folded(f"Step {step:.0f} in numbers", figures([*first, *others]))
    return [figures(first), everything] if first and len(main.rows) == 1 else [everything]


def _figure(name: str, value: float, other: dict[str, float] | None) -> list[Child]:
    cells: list[Child] = [text.line(name, 120), f"{value:.10g}"]
    if other is not None:
        there = other.get(name)
        cells += ["–", "–"] if there is None else [f"{there:.10g}", f"{value - there:.2g}"]
    return cells
