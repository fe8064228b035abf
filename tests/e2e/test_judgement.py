"""From checks to status, class and exit code."""

from __future__ import annotations

import pytest

from corral.e2e.attendance import Attended
from corral.e2e.judgement import Judged, judged
from corral.e2e.result import Check
from corral.errors import InfraError
from corral.job.protocol.states import FailureClass, Status
from corral.job.protocol.submit import SubmitRequest
from corral.job.protocol.verdict import Verdict, client_exit_code

REQUEST = SubmitRequest(script="run.sh", bundle="0" * 64)


def job(status: Status = Status.SUCCEEDED, kind: FailureClass | None = None, code: int | None = None) -> Attended:
    verdict = Verdict(status=status, cause="x", message="x", failure_class=kind, exit_code=code)
    return Attended(REQUEST, "rj-0", verdict=verdict, exit_code=client_exit_code(verdict))


def check(group: str, ok: bool, name: str = "it") -> Check:
    return Check(group=group, name=name, expected="one", found="one" if ok else "other", ok=ok)


GOOD, BAD_RUN, BAD_METRIC, BAD_PARITY = (
    check("run", True),
    check("run", False),
    check("metrics", False),
    check("parity", False),
)
SAID = "it: expected one, found other"
USER = job(Status.FAILED, FailureClass.USER, 9)


@pytest.mark.parametrize(
    ("checks", "main", "reference", "expected"),
    [
        ([GOOD], job(), None, Judged("PASSED", "", 0)),
        ([GOOD], USER, None, Judged("PASSED", "", 0)),  # a failure that is expected
        ([GOOD, BAD_METRIC], job(), job(), Judged("FAILED", SAID, 1)),
        ([GOOD, BAD_METRIC], USER, None, Judged("FAILED", SAID, 1)),  # failed as expected, and left something else
        ([BAD_RUN], job(), None, Judged("FAILED", SAID, 1)),  # it should have failed
        ([BAD_RUN, BAD_METRIC], USER, None, Judged("FAILED", SAID, 9, "user")),
        ([BAD_RUN], job(Status.FAILED, FailureClass.INFRA), None, Judged("FAILED", SAID, 75, "infra")),
        ([BAD_RUN], job(Status.FAILED, FailureClass.CONFIG, 78), None, Judged("FAILED", SAID, 78, "config")),
        ([BAD_RUN], job(Status.TIMEOUT, FailureClass.TIMEOUT), None, Judged("TIMEOUT", SAID, 124, "timeout")),
        ([BAD_RUN], job(Status.CANCELLED, FailureClass.CANCEL), None, Judged("FAILED", SAID, 130, "cancel")),
        ([GOOD, BAD_PARITY], job(), USER, Judged("FAILED", SAID, 9, "user")),
        ([GOOD, BAD_PARITY], job(), job(), Judged("FAILED", SAID, 1)),
    ],
)
def test_the_exit_code_is_that_of_what_did_not_end_as_it_should(checks, main, reference, expected):
    assert judged(checks, main, reference) == expected


@pytest.mark.parametrize("which", ["main", "reference"])
def test_records_that_were_not_fetched_prove_nothing(which):
    lost = job()
    lost.lost = InfraError("no answer")
    one, other = (lost, None) if which == "main" else (job(), lost)
    assert judged([GOOD, BAD_METRIC], one, other) == Judged("FAILED", "no answer", 75, "infra")
