"""A small GitHub runner: jobs of a workflow, their `run` steps as GitHub runs them, expressions evaluated, no actions.

Only what the workflows here use. Anything else is a KeyError or an assertion, never a silent success.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

TOOLS = ("bash", "curl", "jq", "git")
# What a step gets at a cancel, and seconds until the next. GitHub's first is 7.5 s; here the machine may be busy.
GRACE: tuple[tuple[signal.Signals, float], ...] = (
    (signal.SIGINT, 60.0), (signal.SIGTERM, 2.5), (signal.SIGKILL, 20.0),
)  # fmt: skip
WITH_CHILDREN = False  # the last signal is for everything below the step, too
_TOKEN = re.compile(r"\s*('(?:[^']|'')*'|[A-Za-z_][\w-]*|==|!=|&&|\|\||[!().,]|\d+)")


class Expression:
    """`a.b == 'c' && always() || !d`, evaluated on contexts."""

    def __init__(self, text: str, contexts: Mapping[str, Any], cancelled: bool = False, failed: bool = False) -> None:
        self._tokens = [token for token in _TOKEN.findall(text) if token]
        assert "".join(self._tokens) == re.sub(r"\s+(?=(?:[^']*'[^']*')*[^']*$)", "", text), text
        self._contexts = contexts
        self._calls: dict[str, Callable[..., Any]] = {
            "always": lambda: True,
            "success": lambda: not cancelled and not failed,
            "failure": lambda: failed and not cancelled,
            "cancelled": lambda: cancelled,
            "fromJSON": json.loads,
        }

    def value(self) -> Any:
        found = self._or()
        assert not self._tokens, self._tokens
        return found

    def _or(self) -> Any:
        found = self._and()
        while self._take("||"):
            other = self._and()
            found = found or other
        return found

    def _and(self) -> Any:
        found = self._equal()
        while self._take("&&"):
            other = self._equal()
            found = other if found else found
        return found

    def _equal(self) -> Any:
        found = self._one()
        if self._take("=="):
            return _text(found) == _text(self._one())
        if self._take("!="):
            return _text(found) != _text(self._one())
        return found

    def _one(self) -> Any:
        if self._take("!"):
            return not self._one()
        if self._take("("):
            found = self._or()
            assert self._take(")")
            return found
        token = self._tokens.pop(0)
        if token.startswith("'"):
            return token[1:-1].replace("''", "'")
        if token in self._calls:
            assert self._take("(")
            arguments = [] if self._tokens[0] == ")" else [self._or()]
            assert self._take(")")
            return self._calls[token](*arguments)
        if token in ("true", "false"):
            return token == "true"
        found = self._contexts[token]
        while self._take("."):
            found = (found or {}).get(self._tokens.pop(0))
        return "" if found is None else found

    def _take(self, token: str) -> bool:
        if self._tokens[:1] == [token]:
            self._tokens.pop(0)
            return True
        return False


def _text(value: Any) -> str:
    return {True: "true", False: "false", None: ""}.get(value, str(value)) if not isinstance(value, str) else value


@dataclass
class Step:
    name: str
    outcome: str  # success, failure, cancelled, skipped
    output: str = ""
    code: int | None = None
    seconds: float = 0.0


@dataclass
class Job:
    result: str
    steps: list[Step]
    outputs: dict[str, str]
    summary: str
    artifacts: list[str] = field(default_factory=list)

    def step(self, name: str) -> Step:
        return next(step for step in self.steps if step.name == name)

    @property
    def output(self) -> str:
        return "".join(step.output for step in self.steps)


class Runner:
    """cancel: called while a step runs with its name and process; True asks for the step to be cancelled, as a person
    does in the page of the run."""

    def __init__(
        self,
        root: Path,
        workspace: Path,
        github: Mapping[str, Any],
        *,
        secrets: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        inputs: Mapping[str, str] | None = None,
        cancel: Callable[[str, subprocess.Popen[bytes]], bool] | None = None,
        tools: Sequence[str] = (),
        **env: str,
    ) -> None:
        self._temp, self._workspace, self._cancel = root, workspace, cancel
        self._contexts: dict[str, Any] = {
            "github": {"workflow": "e2e", "run_id": "4711", "run_attempt": "1", "workspace": str(workspace), **github},
            "secrets": dict(secrets or {}),
            "vars": dict(variables or {}),
            "inputs": dict(inputs or {}),
            "env": {},
        }
        self._env = self._bare([*TOOLS, *tools]) | env

    def _bare(self, tools: Sequence[str]) -> dict[str, str]:
        """What a step finds: a PATH with a few tools and Python, a home, and who GitHub says we are."""
        path = self._temp / "tools"
        path.mkdir(parents=True)
        for tool in tools:
            found = shutil.which(tool)
            assert found is not None, tool
            (path / tool).symlink_to(found)
        for tool in ("python", "python3", "corral"):
            script = path / tool
            if (Path(sys.executable).parent / tool).exists():
                script.write_text(f'#!/bin/sh\nexec {Path(sys.executable).parent / tool} "$@"\n')
                script.chmod(0o755)
        home = self._temp / "home"
        home.mkdir()
        github = self._contexts["github"]
        return {
            "PATH": str(path),
            "HOME": str(home),
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            "GITHUB_WORKSPACE": str(self._workspace),
            "GITHUB_REPOSITORY": github.get("repository", "team/project"),
            "GITHUB_EVENT_NAME": github.get("event_name", "push"),
            "GITHUB_REF_NAME": "main",
            "GITHUB_SHA": "0123456789abcdef0123456789abcdef01234567",
            "GITHUB_RUN_ID": github["run_id"],
            "GITHUB_RUN_ATTEMPT": github["run_attempt"],
            "RUNNER_TEMP": str(self._temp),
            "OMP_NUM_THREADS": "1",
        }

    def wanted(self, job: Mapping[str, Any], needs: Mapping[str, Any] | None = None) -> bool:
        """Whether its `if` and its needs let it start."""
        failed = any(need["result"] != "success" for need in (needs or {}).values())
        return self._condition(str(job.get("if", "true")), needs or {}, cancelled=False, failed=failed)

    def run(self, name: str, job: Mapping[str, Any], needs: Mapping[str, Any] | None = None) -> Job:
        needs = needs or {}
        if not self.wanted(job, needs):
            return Job("skipped", [], {}, "")
        env = {key: self.filled(str(value), needs) for key, value in job.get("env", {}).items()}
        steps: list[Step] = []
        outputs: dict[str, dict[str, str]] = {}
        summary, artifacts = self._temp / f"{name}-summary.md", self._temp / f"{name}-artifacts"
        summary.touch()
        cancelled = False
        for number, step in enumerate(job["steps"]):
            failed = any(done.outcome == "failure" for done in steps)
            label = step["name"]
            if not self._condition(str(step.get("if", "true")), needs, cancelled, failed):
                steps.append(Step(label, "skipped"))
            elif "uses" in step:
                steps.append(self._action(step, artifacts))
            else:
                given = {key: self.filled(str(value), needs) for key, value in step.get("env", {}).items()}
                written = self._temp / f"{name}-{number}-output"
                written.touch()
                done = self._shell(label, step["run"], env | given, written, summary)
                outputs[step.get("id", "")] = _outputs(written.read_text())
                cancelled = cancelled or done.outcome == "cancelled"
                steps.append(done)
        outcomes = {step.outcome for step in steps}
        result = "cancelled" if cancelled else "failure" if "failure" in outcomes else "success"
        self._contexts["steps"] = {key: {"outputs": value} for key, value in outputs.items()}
        given = {key: self.filled(value, needs) for key, value in job.get("outputs", {}).items()}
        kept = sorted(path.relative_to(artifacts).as_posix() for path in artifacts.rglob("*") if path.is_file())
        return Job(result, steps, given, summary.read_text(), kept)

    def _condition(self, text: str, needs: Mapping[str, Any], cancelled: bool, failed: bool) -> bool:
        """Without one of these functions it holds only while nothing has failed."""
        text = text.strip().removeprefix("${{").removesuffix("}}").strip()
        if not re.search(r"\b(always|success|failure|cancelled)\(\)", text):
            text = f"success() && ({text})"
        return bool(Expression(text, self._contexts | {"needs": needs}, cancelled, failed).value())

    def filled(self, text: str, needs: Mapping[str, Any] | None = None) -> str:
        contexts = self._contexts | {"needs": needs or {}}
        return re.sub(r"\$\{\{(.*?)\}\}", lambda found: _text(Expression(found[1].strip(), contexts).value()), text)

    def _action(self, step: Mapping[str, Any], artifacts: Path) -> Step:
        action = step["uses"].partition("@")[0]
        if action == "actions/upload-artifact":
            path, *left_out = step["with"]["path"].splitlines()
            assert left_out == ["!runs/e2e/*/*/service/**"]
            if (self._workspace / path).exists():
                shutil.copytree(self._workspace / path, artifacts, ignore=shutil.ignore_patterns("service"))
            return Step(step["name"], "success")
        assert action in ("actions/checkout", "actions/setup-python"), action
        return Step(step["name"], "success")

    def _shell(self, label: str, script: str, env: Mapping[str, str], output: Path, summary: Path) -> Step:
        assert "${{" not in script, "an expression inside a shell script"
        file = self._temp / "step.sh"
        file.write_text(script)
        began = time.monotonic()
        shown = self._temp / "shown"
        with shown.open("wb") as stdout:
            process = subprocess.Popen(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(file)],
                cwd=self._workspace,
                env=self._env | env | {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(summary)},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            cancelled = self._wait(label, process)
        seconds = time.monotonic() - began
        outcome = "cancelled" if cancelled else "success" if process.returncode == 0 else "failure"
        return Step(label, outcome, shown.read_text(errors="replace"), process.returncode, seconds)

    def _wait(self, label: str, process: subprocess.Popen[bytes]) -> bool:
        """Signals reach the step's own process only, never its children, as with GitHub's runner."""
        if self._cancel is None or not self._cancel(label, process):
            process.wait(timeout=240)
            return False
        for number, seconds in GRACE:
            below = psutil.Process(process.pid).children(recursive=True) if WITH_CHILDREN else []
            os.kill(process.pid, number)
            for child in below:
                child.send_signal(number)
            try:
                process.wait(timeout=seconds)
                break
            except subprocess.TimeoutExpired:
                continue
        return True


def _outputs(text: str) -> dict[str, str]:
    """`name=value` lines, and `name<<end` blocks."""
    found: dict[str, str] = {}
    lines = iter(text.splitlines())
    for line in lines:
        name, separator, value = line.partition("=")
        if "<<" in name or not separator:
            name, _, end = line.partition("<<")
            value = "\n".join(iter(lambda: next(lines), end))
        found[name] = value
    return found


def jobs(file: Path) -> dict[str, Any]:
    """The jobs of a workflow file."""
    found: dict[str, Any] = yaml.load(file.read_text(), yaml.CSafeLoader)["jobs"]
    return found
