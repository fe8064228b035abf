"""The checks of the nodes before the command: `corral doctor` as a process of its own, within a time limit."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from corral.atomic import write_text
from corral.errors import ConfigError, CorralError, InfraError
from corral.findings import Finding, worst
from corral.job.agent.attempt import Attempt
from corral.job.agent.command import Command
from corral.job.agent.link import Backoff, Link, Unanswered
from corral.job.agent.output import read_regular
from corral.job.protocol.preflight import Preflight, PreflightReport
from corral.manifest import manifest_digest

REPORT, OUTPUT = "preflight.json", "preflight.log"
GRACE = 3.0  # seconds between SIGTERM and SIGKILL for checks that take too long
TICK = 0.1  # seconds between looks at them
PATIENCE = 10.0  # seconds of trying to tell the service
LONGEST = 64 << 20  # bytes of a report
_FINAL = frozenset({200, 204, 401, 403, 404, 409, 410, 413, 422})
_FITS, _CONFIG, _INFRA = 0, ConfigError.exit_code, InfraError.exit_code

log = logging.getLogger(__name__)


class NotFit(CorralError):
    """Something about the nodes is not as the job needs it. finding: the failure to report."""

    def __init__(self, finding: Finding) -> None:
        # The verdict names the node by itself, but not a second place.
        told = finding if finding.peer is not None else replace(finding, node=None, rank=None)
        super().__init__(told.line())
        self.finding = finding
        self.exit_code = _CONFIG if finding.kind == "config" else _INFRA


def check(attempt: Attempt, asked: Preflight, env: Mapping[str, str], begun: Callable[[Command], None]) -> None:
    """Examine the nodes; returns when they are fit. begun: gets the process, to stop it when the job is not wanted.

    Leaves preflight.json in the attempt's folder, and tells the service what is in it. Raises NotFit, and InfraError
    when it was stopped or cannot be started.
    """
    began = time.monotonic()
    doctor = Command(_arguments(attempt, asked), attempt.folder, env, attempt.folder / OUTPUT)
    begun(doctor)
    late = False
    while (code := doctor.wait(TICK)) is None:
        if not late and not doctor.stopping and time.monotonic() - began > asked.timeout:
            late = True
            doctor.stop(GRACE)
    doctor.sweep()
    if doctor.stopping and not late:
        raise InfraError("stopped before the command started")
    seconds = time.monotonic() - began
    findings = None if late else _findings(attempt, code)
    if findings is None:
        found = f"none after {asked.timeout:g} s" if late else f"exit code {code}: {_last_line(attempt)}"
        kind = "config" if code == _CONFIG and not late else "infra"
        findings = [Finding("doctor", False, f"a report within {asked.timeout:g} s", found, kind=kind)]
        left = {"seconds": round(seconds, 3), "findings": [each.as_dict() for each in findings]}
        write_text(attempt.folder / REPORT, json.dumps(left, indent=1) + "\n")
    report = PreflightReport.of(attempt.spec.attempt, round(seconds, 3), findings)
    log.info("preflight: %s", report.message())
    _tell(attempt, report)
    if (finding := worst(findings)) is not None:
        raise NotFit(finding)


def _arguments(attempt: Attempt, asked: Preflight) -> list[str]:
    spec, start = attempt.spec, attempt.folder / attempt.spec.cwd
    options: list[object] = ["--nodes", spec.nodes, "--devices", spec.devices_per_node, "--kind", spec.kind]
    options += ["--run-dir", attempt.run, "--json", attempt.folder / REPORT, "--no-collective"]
    if spec.bundle is not None:
        options += ["--source", attempt.source, "--source-digest", manifest_digest(str(attempt.source))]
    if spec.script is not None:
        options += ["--script", start / spec.script]
    for path in asked.paths:
        options += ["--path", start / path]
    for port in asked.ports:
        options += ["--port", port]
    limits = {"--shm-mib": asked.shm_mib, "--disk-mib": asked.disk_mib, "--clock-skew": asked.clock_skew}
    for option, limit in limits.items():
        options += [] if limit is None else [option, limit]
    return [sys.executable, "-m", "corral", "doctor", *map(str, options)]


def _findings(attempt: Attempt, code: int) -> list[Finding] | None:
    """What the checks left, None when that does not say what their exit code says: they crashed."""
    try:
        left = json.loads(read_regular(attempt.folder / REPORT, 0, LONGEST))
        findings = [Finding.from_dict(each) for each in left["findings"]]
    except (ValueError, KeyError, TypeError):
        return None
    bad = worst(findings)
    expected = _FITS if bad is None else _CONFIG if bad.kind == "config" else _INFRA
    return findings if code == expected else None


def _last_line(attempt: Attempt) -> str:
    size = (attempt.folder / OUTPUT).stat().st_size
    said = read_regular(attempt.folder / OUTPUT, max(0, size - 8192), 8192).decode("utf-8", "replace")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ")[:500] if lines else "it said nothing"


def _tell(attempt: Attempt, report: PreflightReport) -> None:
    """The service keeps the first report of an attempt, so what it may have got already can be sent again."""
    link, backoff, began = Link(attempt), Backoff(threading.Event()), time.monotonic()
    body = report.model_dump_json().encode()
    while time.monotonic() - began < PATIENCE:
        try:
            status, _ = link.call("POST", "preflight", body)
        except Unanswered as problem:
            log.warning("preflight: %s", problem)
        else:
            if status in _FINAL:
                log.info("preflight: status %d", status)
                break
        backoff.wait()
    link.close()
