"""One case from start to verdict: prepare its caches, run its command on local nodes, check what was recorded."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

import corral
from corral.e2e.caches import Interrupted, cache_root, prepare
from corral.e2e.case import Case
from corral.e2e.checks import Facts, evaluate
from corral.e2e.process import Ended, Limit, Signals, run_to_the_end
from corral.e2e.report import Verdict, table
from corral.errors import ConfigError, CorralError, DeadlineError, InfraError


def run_case(case: Case, runs: Path) -> int:
    """Run the case in a new folder below `runs`, say what was found, return the exit status of the verdict: 0 passed;
    the command's own exit code when that is not the expected one; 1 when another expectation failed; 124, 130, 143."""
    started = time.monotonic()
    run_dir = _new_run_dir(runs, case.name)
    with Signals() as signals, _Output(run_dir / "console.log") as output:
        verdict = _judged(case, run_dir, output, signals)
        verdict = replace(verdict, seconds=time.monotonic() - started)
        verdict.write(run_dir)
        report = [*table(run_dir, verdict.checks), verdict.line()]
        output("".join(f"{line}\n" for line in report).encode())
    return verdict.exit_code


class _Output:
    """Bytes to the terminal as they come, and to a file. A reader that goes away does not end the run."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._terminal: BinaryIO | None = sys.stdout.buffer
        sys.stdout.flush()

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def __call__(self, data: bytes) -> None:
        self._file.write(data)
        if self._terminal is not None:
            try:
                self._terminal.write(data)
                self._terminal.flush()
            except BrokenPipeError:
                self._terminal = None
                # Python flushes stdout once more at exit; without this it would complain there.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _judged(case: Case, run_dir: Path, output: _Output, signals: Signals) -> Verdict:
    """The verdict without its seconds."""
    root = cache_root(os.environ)
    try:
        folders = prepare(case, root, os.environ, output, signals)
        ended = _run(case, run_dir, root, folders, output, signals)
    except CorralError as error:
        statuses = {Interrupted: "INTERRUPTED", DeadlineError: "TIMEOUT"}
        return Verdict(case.name, statuses.get(type(error), "FAILED"), str(error), error.exit_code, 0.0)
    checks = tuple(evaluate(case, Facts(ended.exit_code, run_dir, ended.leftovers)))
    judged = Verdict(case.name, "PASSED", "", 0, 0.0, checks, ended.exit_code, ended.leftovers)
    if ended.late:
        return replace(judged, status="TIMEOUT", reason=str(ended.cut), exit_code=DeadlineError.exit_code)
    if ended.cut is not None:
        # Half a run meets no expectations; saying which would only hide the reason.
        return replace(judged, status="INTERRUPTED", reason=ended.cut, exit_code=128 + signals.received[0], checks=())
    failed = [check for check in checks if not check.ok]
    if failed:
        own = ended.exit_code if ended.exit_code != case.expect.exit_code else 0
        return replace(judged, status="FAILED", reason=str(failed[0]), exit_code=own or 1)
    return judged


def _run(
    case: Case, run_dir: Path, root: Path, folders: Mapping[str, Path], output: _Output, signals: Signals
) -> Ended:
    places = {"cache": root / "e2e", **folders}
    env = {
        **os.environ,
        **{key: _filled(value, places) for key, value in case.env.items()},
        "CORRAL_RUN_DIR": str(run_dir),
        # `python3` in the command is the one that runs us.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONUNBUFFERED": "1",
    }
    env.pop("RAY_ADDRESS", None)  # the case brings its own nodes
    plan = run_dir / "plan.json"
    output(f"{case.name}: {case.summary}; run folder {run_dir}\n".encode())
    return run_to_the_end(
        _command(case, places),
        env=env,
        cwd=run_dir,
        output=output,
        limits=[
            Limit(case.deadlines.start, "no plan.json was written: the run did not start", plan.is_file),
            Limit(case.deadlines.run, "the run had not ended"),
        ],
        stop_seconds=case.deadlines.stop,
        signals=signals,
    )


def _command(case: Case, places: Mapping[str, Path]) -> list[str]:
    program, *arguments = (_filled(part, places) for part in case.command)
    command = [str(_program(program)), *arguments]
    if case.topology is None:
        return command
    nodes, devices = str(case.topology.nodes), str(case.topology.devices_per_node)
    return [sys.executable, "-m", "corral", "cluster", "local", "--nodes", nodes, "--devices", devices, "--", *command]


def _program(name: str) -> Path | str:
    """A name without a slash is looked up on PATH; a relative path in the working directory, then in the checkout this
    package belongs to, then where an installed package keeps its examples."""
    if "/" not in name:
        return name
    homes = [Path.cwd(), Path(corral.__file__).parent.parent, Path(sys.prefix) / "share" / "corral"]
    for home in homes:
        if (home / name).is_file():
            return (home / name).absolute()
    raise ConfigError(f"the case runs {name}, which is not in {', '.join(map(str, homes))}; run it from a checkout")


def _filled(text: str, places: Mapping[str, Path]) -> str:
    """{name} of a cache, or {cache} for the folder they lie in. Other braces are left alone."""
    for name, place in places.items():
        text = text.replace(f"{{{name}}}", str(place))
    return text


def _new_run_dir(runs: Path, name: str) -> Path:
    """A folder no other run has, named by the time. Raises InfraError."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    attempt = 0
    while True:
        attempt += 1
        run_dir = (runs / name / (stamp if attempt == 1 else f"{stamp}-{attempt}")).absolute()
        try:
            run_dir.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise InfraError(f"cannot make run folder {run_dir}: {error.strerror}") from error
        return run_dir
