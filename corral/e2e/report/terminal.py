"""What a person reads in the terminal when a case has ended; the verdict line follows it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from corral.e2e.reading import as_number
from corral.e2e.report import text
from corral.e2e.report.records import read_json
from corral.e2e.report.story import Story, read_story
from corral.e2e.result import ParityReport, Result

MOST = 40  # failed checks
_FIGURES = (
    ("actor/pg_loss", "policy loss"),
    ("critic/vf_loss", "value loss"),
    ("actor/entropy", "entropy"),
    ("critic/score/mean", "reward, mean"),
    ("response_length/mean", "response tokens, mean"),
)


def lines(result: Result, folder: Path) -> list[str]:
    """What failed and where, the last step as far as it was recorded, every failed check, parity, and the records."""
    story = read_story(result, folder)
    shown = [*_facts(story), *last_step(story), *_checks(story)]
    if result.parity is not None:
        shown.append(text.line(parity_line(result.parity), 600))
    report = folder / "report.html"
    return [*shown, f"report: {report}" if report.exists() else f"records: {folder}"]


def _facts(story: Story) -> list[str]:
    width = max([0, *(len(fact.name) for fact in story.facts)])
    return [f"  {fact.name:{width}}  {text.line(fact.value, 600)}" for fact in story.facts]


def _checks(story: Story) -> list[str]:
    checks, failed = story.result.checks, story.failed
    shown = [f"  NOT as expected: {text.line(check, 300)}" for check in failed[:MOST]]
    if len(failed) > MOST:
        shown.append(f"  and {len(failed) - MOST} more that are not as expected")
    if checks:
        shown.append(f"checks: {len(checks) - len(failed)} of {len(checks)} as expected")
    return shown


def parity_line(parity: ParityReport) -> str:
    """`parity: 3,100,000 numbers are equal to those of the reference run`, or where they first are not."""
    if parity.first is None:
        return f"parity: {sum(parity.compared.values()):,} numbers are equal to those of the reference run"
    first = parity.first
    place = f" ({first.where()})" if first.where() else ""
    hint = f"; {parity.hint}" if parity.hint else ""
    return f"parity: first difference in {first.phase}{place}: {first.name} {first.found}, not {first.reference}{hint}"


def last_step(story: Story) -> list[str]:
    """Of the main job: seconds of each phase beside the figures; empty without a recorded step."""
    if story.main is None or not story.main.steps.rows:
        return []
    rows = story.main.steps.rows
    metrics = {name: value for name, value in rows[-1].items() if math.isfinite(value)}
    left, right = _phases(metrics), _figures(metrics, story.folder / story.main.folder)
    width = max(map(len, left), default=0)
    height, gap = max(len(left), len(right)), "    " if left else ""
    left += [""] * (height - len(left))
    right += [""] * (height - len(right))
    return [
        f"step {metrics.get('step', len(rows)):.0f}{_source(metrics)}",
        *(f"  {a:{width}}{gap}{b}".rstrip() for a, b in zip(left, right, strict=True)),
    ]


def _phases(metrics: Mapping[str, float]) -> list[str]:
    """Slowest first, the whole step last; nothing where no time was taken."""
    seconds = {
        text.line(name.removeprefix("timing_s/"), 40): value
        for name, value in metrics.items()
        if name.startswith("timing_s/")
    }
    ordered = sorted(seconds, key=lambda name: (name == "step", -seconds[name]))[:30]
    if not ordered:
        return []
    width = max([len("phase"), *map(len, ordered)])
    return [f"{'phase':{width}}  seconds", *(f"{name:{width}}  {seconds[name]:7.2f}" for name in ordered)]


def _figures(metrics: Mapping[str, float], records: Path) -> list[str]:
    found = [(label, f"{metrics[name]:.6g}") for name, label in _FIGURES if name in metrics]
    if (rate := metrics.get("perf/throughput")) is not None:
        world = _world(records)
        found.append(("tokens/s", f"{rate:.4g} per device" + (f", {rate * world:.4g} in all" if world else "")))
    width = max([0, *(len(label) for label, _ in found)])
    return [f"{label:{width}}  {value}" for label, value in found]


def _source(metrics: Mapping[str, float]) -> str:
    sources = {1.0: ", rollouts replayed from the dump (no engine started)", 0.0: ", rollouts generated in this run"}
    return sources.get(metrics.get("rollout/replayed", math.nan), "")


def _world(records: Path) -> float | None:
    plan = read_json(records / "plan.json")
    topology = plan.get("topology") if isinstance(plan, dict) else None
    return as_number(topology.get("world")) if isinstance(topology, dict) else None
