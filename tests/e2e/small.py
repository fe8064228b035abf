"""Small cases whose jobs are small real programs that leave the records a trainer would leave, and `corral e2e run` of
them as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

NOISE = ("GITHUB_", "CORRAL_", "SUBMITTER", "RUNNER_")

# Definitions before every program. `mark` makes a file that a test waits for.
PRELUDE = """
import json, os, pathlib, sys, time
run = pathlib.Path(os.environ["CORRAL_RUN_DIR"])
def plan(world=1):
    (run / "plan.json").write_text(json.dumps({"topology": {"world": world}}))
def metrics(**changes):
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.5} | changes) + "\\n")
def mark(name):
    (pathlib.Path(os.environ["MARKS"]) / name).write_text(str(os.getpid()))
"""

DOCUMENT: dict[str, Any] = {
    "summary": "a small program",
    "command": ["python3", "work.py"],
    "deadlines": {"prepare": 60, "queue": 60, "start": 120, "run": 120},
    "expect": {"steps": 1, "plan": {"topology.world": 1}, "metrics": {"finite": ["loss"]}},
}


class Project:
    """A git work tree with cases in e2e/ that run programs beside them."""

    def __init__(self, root: Path) -> None:
        self.root, self.runs = root, root.parent / "runs"
        (root / "e2e").mkdir(parents=True)
        subprocess.run(["git", "init", "-q", root], check=True)
        (root.parent / "marks").mkdir()

    def case(self, name: str, program: str = "plan(); metrics()", **changes: Any) -> Path:
        """A case of this name that runs the program (Python, after PRELUDE)."""
        file = name.replace("-", "_") + ".py"
        (self.root / file).write_text(PRELUDE + program + "\n")
        document = {**DOCUMENT, "name": name, "command": ["python3", file], **changes}
        if "script" in changes:
            del document["command"]
        path = self.root / f"e2e/{name}.yaml"
        path.write_text(yaml.safe_dump(document, sort_keys=False))
        return path

    def start(self, *arguments: object, command: str = "run", **env: str) -> subprocess.Popen[str]:
        base = {name: value for name, value in os.environ.items() if not name.startswith(NOISE)}
        base |= {"CORRAL_CACHE": str(self.root.parent / "cache"), "MARKS": str(self.marks)}
        words = [sys.executable, "-m", "corral", "e2e", command, *map(str, arguments)]
        if command != "prepare" and "--runs" not in words:
            words += ["--runs", str(self.runs)]
        return subprocess.Popen(
            words, cwd=self.root, env=base | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *arguments: object, command: str = "run", **env: str) -> Done:
        return Done(self.start(*arguments, command=command, **env))

    @property
    def marks(self) -> Path:
        return self.root.parent / "marks"

    def marked(self, name: str) -> int:
        """Wait until a program has made its mark; its pid."""
        until(lambda: (self.marks / name).exists() and (self.marks / name).read_text(), f"mark {name}")
        return int((self.marks / name).read_text())

    def folder(self, case: str) -> Path:
        """Of the only run of a case."""
        (folder,) = (self.runs / case).iterdir()
        return folder

    def result(self, case: str) -> dict[str, Any]:
        return read(self.folder(case))


class Done:
    """A command that has ended."""

    def __init__(self, process: subprocess.Popen[str], seconds: float = 240) -> None:
        self.out, self.err = process.communicate(timeout=seconds)
        self.code = process.returncode
        assert "Traceback" not in self.err, self.err

    @property
    def last(self) -> str:
        return self.out.splitlines()[-1]


def read(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def failed(result: dict[str, Any]) -> list[str]:
    return [check["name"] for check in result["checks"] if not check["ok"]]


def until(condition: Any, what: str, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def using(folder: Path) -> list[str]:
    """Processes that name something below the folder: services, agents, jobs."""
    found = []
    for process in psutil.process_iter():
        try:
            words, environment = process.cmdline(), process.environ()
        except psutil.Error:
            continue
        texts = [*words, *(environment.get(name, "") for name in ("CORRAL_RUN_DIR", "PWD"))]
        if process.pid != os.getpid() and any(str(folder) in text for text in texts):
            found.append(f"{process.pid} {' '.join(words)}"[:200])
    return found


@contextmanager
def serving(data: Path) -> Iterator[str]:
    """The URL of a service that runs meanwhile."""
    words = ["serve", "--port", "0", "--data-dir", str(data), "--devices", "2", "--log-level", "WARNING"]
    process = subprocess.Popen([sys.executable, "-m", "corral", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
