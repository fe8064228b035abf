"""Cases and commands for the tests: small real programs that leave the records a trainer would leave."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import yaml

METRICS = {"step": 1, "actor/pg_loss": -0.25, "timing_s/gen": 2.5, "timing_s/step": 4.0, "perf/throughput": 50.0}

DOCUMENT: dict[str, Any] = {
    "name": "small",
    "summary": "a small program",
    "command": [sys.executable, "program.py"],
    "deadlines": {"prepare": 30, "start": 30, "run": 60, "stop": 10},
    "expect": {
        "plan": {"topology.world": 8, "actor.sp": 2},
        "metrics": {"lines": 1, "finite": ["actor/pg_loss"], "within": {"actor/pg_loss": [-1, 1]}},
    },
}

WRITE_RECORDS = f"""
import json, os, pathlib, signal, subprocess, sys, time
run = pathlib.Path(os.environ["CORRAL_RUN_DIR"])
def plan():
    (run / "plan.json").write_text(json.dumps({{"topology": {{"world": 8}}, "actor": {{"sp": 2}}}}))
def metrics(**changes):
    (run / "metrics.jsonl").write_text(json.dumps({METRICS!r} | changes) + "\\n")
def records():
    plan()
    metrics()
"""


def write_case(folder: Path, program: str, **changes: Any) -> Path:
    """A case file in `folder` that runs `program` (Python source, after the definitions above)."""
    source = folder / "program.py"
    source.write_text(WRITE_RECORDS + program)
    document = copy.deepcopy(DOCUMENT)
    document["command"] = [sys.executable, str(source)]
    document.update(changes)
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def verdict_of(runs: Path) -> dict[str, Any]:
    """The verdict of the only run below `runs`."""
    (path,) = runs.glob("*/*/verdict.json")
    verdict: dict[str, Any] = json.loads(path.read_text())
    return verdict
