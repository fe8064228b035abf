"""Results and records as a run leaves them, with texts of a test's choice; and a reader of pages without trust."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from corral.e2e.result import Check, JobPart, ParityReport, ParityRow, Result
from corral.findings import Finding

EVIL = (
    "<script>alert(1)</script><img src=x onerror=alert(2)></pre></details></svg>]]> \"' `a` **b** [x](http://e.vil) "
    "| @you ::error::x ##[error]y \u202eevil\u2028\x00\x1b[31m\x85&amp;&#1;"
)
ERROR = "ZeroDivisionError: division by zero"
TRACEBACK = f"""Traceback (most recent call last):
  File "/jobs/rj-1/attempt-1/source/rewards/length_reward.py", line 41, in compute_score
    return 1.0 / len(answer)
{ERROR}
"""


def check(name: str = "steps", ok: bool = True, **more: Any) -> Check:
    return Check(**{"group": "run", "name": name, "expected": "3", "found": "3" if ok else "1", "ok": ok} | more)


def part(status: str = "SUCCEEDED", **more: Any) -> JobPart:
    fields: dict[str, Any] = {
        "job_id": "rj-1",
        "url": "http://127.0.0.1:1",
        "command": ["bash", "train.sh"],
        "nodes": 2,
        "devices_per_node": 4,
        "verdict": {"status": status},
        "states": [("QUEUED", 1000.0), ("RUNNING", 1002.5), (status, 1060.0)],
        "seconds": 60.0,
        "records": "job",
    }
    return JobPart(**fields | more)


def row(phase: str = "gradients", ok: bool = True, **more: Any) -> ParityRow:
    gap = 0.0 if ok else 0.5
    fields = {"step": 2, "phase": phase, "name": "actor/0/w", "reference": "1.0", "found": "1.5", "gap": gap, "ok": ok}
    return ParityRow(**fields | more)


def passed(**more: Any) -> Result:
    fields: dict[str, Any] = {
        "case": "two-node-ppo",
        "summary": "one iteration on two nodes",
        "status": "PASSED",
        "reason": "",
        "exit_code": 0,
        "started": 1.8e9,
        "seconds": 61.0,
        "where": "local",
        "corral": "0.1",
        "commit": "4bdc798",
        "checks": [check(), check("world", group="plan")],
        "job": part(),
        "parity": ParityReport(rows=[row(), row("weights")], compared={"gradients": 12, "weights": 30}),
        "again": "corral e2e replay run/result.json",
    }
    return Result(**fields | more)


def crashed(**more: Any) -> Result:
    """Rank 5 raised in step 2, in update_actor."""
    verdict = {"status": "FAILED", "failing_rank": 5, "failing_node": 1, "first_error": ERROR, "exit_code": 1}
    fields: dict[str, Any] = {
        "status": "FAILED",
        "reason": f"rank 5 on node-1: {ERROR}; exit code 1",
        "exit_code": 1,
        "failure_class": "user",
        "checks": [check(), check("exit code", ok=False, expected="0", detail=TRACEBACK)],
        "job": part("FAILED", verdict=verdict),
        "parity": None,
    }
    return passed(**fields | more)


def diverged(**more: Any) -> Result:
    first = row(ok=False, rank=5)
    rows = [row("rewards"), first, row("weights", ok=False)]
    report = ParityReport(rows=rows, first=first, compared={"rewards": 4}, hint="a denominator", dumped="divergence")
    bad = check("gradients", ok=False, group="parity")
    fields: dict[str, Any] = {"status": "FAILED", "reason": str(bad), "exit_code": 1, "checks": [check(), bad]}
    return passed(**fields | {"parity": report} | more)


def slow_pair() -> Result:
    found = [
        Finding(
            "pair", value > 100, "at least 100 MiB/s", f"{value} MiB/s", "look at the link", None, a, b, value, "MiB/s"
        )
        for a, b, value in ((0, 1, 900.0), (0, 2, 7.0), (1, 2, 800.0))
    ]
    fields = [finding.as_dict() for finding in found]
    return crashed(job=part("FAILED", preflight=fields), failure_class="infra", reason=found[1].line(), exit_code=75)


def records(folder: Path, name: str = "a phase", text: str = "a line") -> None:
    """job/ and reference/ of two steps on two ranks, with texts of a job in every place it writes."""
    for side in ("job", "reference"):
        at = folder / side
        (at / "logs/node-1").mkdir(parents=True)
        (at / "progress").mkdir()
        (at / "driver.log").write_text(f"{text}\n", errors="replace")
        (at / "logs/node-1/rank-5.log").write_text(f"before\n{TRACEBACK}{text}\n", errors="replace")
        (at / "progress/rank-5.json").write_text('{"method": "update_actor", "state": "failed", "calls": 7}')
        steps = [{"step": step, "timing_s/gen": 1.5, "actor/pg_loss": 0.5 / step, name: 1.0} for step in (1, 2)]
        (at / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
        (at / "plan.json").write_text(json.dumps({"topology": {"world": 8, "device": name}, "samples_per_step": 16}))
        spans = [
            {"ph": "M", "pid": 1, "tid": 6, "name": "thread_name", "args": {"name": "rank-5"}},
            {"ph": "X", "pid": 0, "tid": 0, "name": "step", "ts": 1e6, "dur": 9e6},
            {"ph": "X", "pid": 0, "tid": 0, "name": name, "ts": 1e6, "dur": 4e6},
            {"ph": "X", "pid": 1, "tid": 6, "name": "generate", "ts": 2e6, "dur": 3e6},
        ]
        (at / "trace.json").write_text(json.dumps({"traceEvents": spans}))


_VOID = {"meta", "input", "br", "hr", "link", "img"}
_KNOWN = """html head meta title style script body main header nav section footer h1 h2 h3 p a b em span code pre ul ol
li dl dt dd div table thead tbody tr th td details summary figure figcaption label input svg rect text polyline"""
_ATTRIBUTES = """class id href lang charset name content http-equiv hidden open tabindex role aria-label scope title
type autocomplete x y width height text-anchor viewbox preserveaspectratio points data-n"""


@dataclass
class Page(HTMLParser):
    """Fails when tags are not nested, or when there is an element, attribute or address that a report never has."""

    text: str = ""
    links: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    scripts: int = 0
    _open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _KNOWN.split(), tag
        for name, value in attrs:
            assert name in _ATTRIBUTES.split(), name
            if name == "href":
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")
        self.scripts += tag == "script"
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.text += data

    def place(self, *texts: str) -> list[int]:
        """Where each text stands first; fails for one that is not there."""
        for text in texts:
            assert text in self.text, text
        return [self.text.index(text) for text in texts]


def read_page(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    assert not page._open
    for link in page.links:
        assert link.startswith("#") or not (":" in link or link.startswith(("/", ".."))), link
        assert not link.startswith("#") or link[1:] in page.ids, link
    assert len(set(page.ids)) == len(page.ids)
    assert page.scripts <= 1
    return page
