"""What a person reads at the end of a case: a short table of the last step, the checks, and last the verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from corral import atomic
from corral.e2e.checks import Check, read_metrics


@dataclass(frozen=True)
class Verdict:
    """status PASSED, FAILED, TIMEOUT or INTERRUPTED; reason: empty when passed; seconds: of the whole case."""

    case: str
    status: str
    reason: str
    exit_code: int
    seconds: float
    checks: tuple[Check, ...] = ()
    child_exit_code: int | None = None
    leftovers: tuple[str, ...] = ()

    def line(self) -> str:
        """The last line of the output."""
        if self.status == "PASSED":
            return f"VERDICT: PASSED {self.case} in {self.seconds:.0f} s"
        return f"VERDICT: {self.status} {self.case}: {' '.join(self.reason.split())}"

    def write(self, run_dir: Path) -> None:
        """verdict.json, complete or not at all. Raises InfraError when it cannot be written."""
        atomic.write_text(run_dir / "verdict.json", json.dumps(asdict(self), indent=1) + "\n")


_FIGURES = (
    ("actor/pg_loss", "policy loss"),
    ("critic/vf_loss", "value loss"),
    ("actor/entropy", "entropy"),
    ("critic/score/mean", "reward, mean"),
    ("response_length/mean", "response tokens, mean"),
)


def table(run_dir: Path, checks: Sequence[Check]) -> list[str]:
    """The last step as far as it was recorded (seconds of each phase beside the figures), then every failed check."""
    lines = [f"  NOT as expected: {check}" for check in checks if not check.ok]
    if checks:
        lines.append(f"checks: {sum(check.ok for check in checks)} of {len(checks)} as expected")
    lines.append(f"records: {run_dir}")
    try:
        rows = read_metrics(run_dir)
    except (OSError, ValueError):
        rows = []
    if not rows:
        return lines
    metrics = rows[-1]
    left, right = _phases(metrics), _figures(metrics, run_dir)
    width = max(map(len, left))
    height = max(len(left), len(right))
    left += [""] * (height - len(left))
    right += [""] * (height - len(right))
    return [
        f"step {metrics.get('step', len(rows))}, rollouts {_source(metrics)}",
        *(f"  {a:{width}}    {b}".rstrip() for a, b in zip(left, right, strict=True)),
        *lines,
    ]


def _phases(metrics: Mapping[str, Any]) -> list[str]:
    """Slowest first, the whole step last."""
    seconds = {
        name.removeprefix("timing_s/"): value
        for name, value in metrics.items()
        if name.startswith("timing_s/") and isinstance(value, (int, float))
    }
    ordered = sorted(seconds, key=lambda name: (name == "step", -seconds[name]))
    width = max([len("phase"), *map(len, ordered)])
    return [f"{'phase':{width}}  seconds", *(f"{name:{width}}  {seconds[name]:7.2f}" for name in ordered)]


def _figures(metrics: Mapping[str, Any], run_dir: Path) -> list[str]:
    found = [(label, f"{metrics[name]:.6g}") for name, label in _FIGURES if _is_number(metrics.get(name))]
    if _is_number(metrics.get("perf/throughput")):
        rate = f"{metrics['perf/throughput']:.4g} per device"
        world = _world(run_dir)
        if world is not None:
            rate += f", {metrics['perf/throughput'] * world:.4g} in all"
        found.append(("tokens/s", rate))
    width = max([0, *(len(label) for label, _ in found)])
    return [f"{label:{width}}  {value}" for label, value in found]


def _source(metrics: Mapping[str, Any]) -> str:
    sources: dict[object, str] = {1.0: "replayed from the dump (no engine started)", 0.0: "generated in this run"}
    return sources.get(metrics.get("rollout/replayed"), "of unrecorded origin")


def _world(run_dir: Path) -> int | None:
    try:
        world = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))["topology"]["world"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return world if isinstance(world, int) else None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
