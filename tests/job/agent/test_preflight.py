"""The checks of the nodes before the command, as the agent runs them: what they stop, and what stops them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from corral.findings import Finding, failures
from corral.job.protocol.preflight import Preflight, PreflightReport
from tests.job.agent.conftest import MakeSpec, Start, end_of
from tests.job.agent.service import RecordingService
from tests.job.agent.test_agent import until

ONE = {"nodes": 1, "devices_per_node": 1, "kind": "cpu"}
BROKEN = """
import os
with open(os.environ["SEEN"], "w") as file:
    file.write(repr(dict(os.environ)))
raise RuntimeError("psutil is broken here")
"""
HANGING = """
import os, time
open(os.environ["SEEN"], "w").close()
time.sleep(600)
"""


def shadowed(folder: Path, code: str) -> dict[str, str]:
    """Variables with which the checks import this in place of psutil."""
    (folder / "shadow").mkdir()
    (folder / "shadow" / "psutil.py").write_text(code)
    return {"PYTHONPATH": str(folder / "shadow"), "SEEN": str(folder / "seen")}


def left(folder: Path) -> list[Finding]:
    return [Finding.from_dict(each) for each in json.loads((folder / "preflight.json").read_text())["findings"]]


def test_the_command_starts_on_nodes_that_are_fit(make: MakeSpec, start: Start, service: RecordingService):
    folder = make("echo", "it ran", preflight=Preflight(paths=["spec.json"], disk_mib=1), **ONE)
    assert start(folder).wait(60) == 0
    assert service.lines("driver") == ["it ran"]
    assert service.phases() == ["preflight", "running", "collecting"]
    (report,) = service.reports
    assert (report["failed"], report["findings"]) == (0, [])
    assert report["checks"] == len(left(folder)) > 8
    assert not failures(left(folder))


def test_the_command_never_starts_on_nodes_that_are_not(make: MakeSpec, start: Start, service: RecordingService):
    asked = Preflight(paths=["absent", "spec.json"], shm_mib=1 << 29)
    folder = make("touch", "it-ran", preflight=asked, **ONE)
    assert start(folder).wait(60) == 78
    assert not (folder / "it-ran").exists()
    record = end_of(folder)
    assert (record.exit_code, record.kind, record.failing_node) == (None, "config", None)
    assert service.phases() == ["preflight"]
    assert record.failure == (
        f"paths: expected {folder}/absent there, found No such file or directory; name a path that every node has"
    )
    (report,) = service.reports
    assert [each["check"] for each in report["findings"]] == ["paths", "shm"]
    assert [finding.check for finding in failures(left(folder))] == ["paths", "shm"]


def test_a_node_that_is_not_fit_is_named_apart_from_the_text(make: MakeSpec, start: Start):
    folder = make("true", preflight=Preflight(shm_mib=1 << 29), **ONE)
    assert start(folder).wait(60) == 75
    record = end_of(folder)
    assert (record.kind, record.failing_node) == ("infra", 0)
    assert (record.failure or "").startswith("shm: expected 536870912 MiB free in /dev/shm, found ")


def test_checks_that_crash_are_infrastructure_and_see_no_secrets(make: MakeSpec, start: Start, service, tmp_path: Path):
    env = shadowed(tmp_path, BROKEN)
    folder = make("true", preflight=Preflight(), env=env, secrets={"PASSWORD": "hunter2-hunter2"}, **ONE)
    assert start(folder).wait(60) == 75
    record = end_of(folder)
    assert record.kind == "infra"
    said = "expected a report within 120 s, found exit code 1: RuntimeError: psutil is broken here"
    assert record.failure == f"doctor: {said}"
    assert "hunter2" not in (tmp_path / "seen").read_text()
    assert [finding.line() for finding in left(folder)] == [f"doctor: {said}"]
    assert [each["found"] for each in service.reports[0]["findings"]] == [left(folder)[0].found]


def test_checks_that_hang_end_in_time(make: MakeSpec, start: Start, tmp_path: Path):
    folder = make("true", preflight=Preflight(timeout=1.0), env=shadowed(tmp_path, HANGING), **ONE)
    assert start(folder).wait(60) == 75
    assert end_of(folder).failure == "doctor: expected a report within 1 s, found none after 1 s"


@pytest.mark.parametrize("by", ["service", "signal"])
def test_a_job_that_is_cancelled_while_it_is_checked(
    by: str, make: MakeSpec, start: Start, service: RecordingService, tmp_path: Path
):
    folder = make("touch", "it-ran", preflight=Preflight(), env=shadowed(tmp_path, HANGING), **ONE)
    agent = start(folder)
    until((tmp_path / "seen").exists, 60.0)
    below = psutil.Process(agent.pid).children(recursive=True)
    assert any("doctor" in process.cmdline() for process in below)
    if by == "service":
        service.orders = {"stop": True, "grace": 0.5}
    else:
        agent.send_signal(signal.SIGTERM)
    assert agent.wait(60) == 75
    assert end_of(folder).failure == "stopped before the command started"
    assert not (folder / "it-ran").exists()
    assert not [process for process in below if process.is_running()]


def test_an_answer_that_was_lost_is_asked_for_again(make: MakeSpec, start: Start, service: RecordingService):
    service.fault = lambda what: "lose" if what == "preflight" and not service.reports else None
    assert start(make("true", preflight=Preflight(), **ONE)).wait(60) == 0
    assert len(service.reports) == 2


def test_a_report_holds_the_worst_first_and_not_more_than_there_is_room_for():
    bad = [Finding("shm", False, "x", "y", node=number) for number in range(2000)]
    report = PreflightReport.of(1, 2.0, [Finding("dns", True, "x", "x"), *bad, Finding("a", False, "x", "y", node=7)])
    assert (report.checks, report.failed, len(report.findings)) == (2002, 2001, 20)
    assert report.findings[0].node == 7
    assert report.message() == "2001 of 2002 checks failed: shm on node-7: expected x, found y"
    assert PreflightReport.of(1, 2.04, [Finding("dns", True, "x", "x")]).message() == "1 checks passed in 2.0 s"
