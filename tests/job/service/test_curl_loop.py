"""The first submit-and-wait helper's way of watching, word for word what it relies on: curl with retries, no cursor."""

from __future__ import annotations

import shutil
import subprocess
import threading

import pytest

from corral.job.protocol.states import JobState, Status
from corral.job.protocol.verdict import Verdict
from tests.job.service.running import failure, running, until

# Blank lines are skipped, logs printed, unknown types printed raw; success only after a SUCCEEDED final.
LOOP = r"""
set -o pipefail
status=""
while IFS= read -r line; do
  [ -n "$line" ] || continue
  type="$(jq -r '.type // empty' <<<"$line" 2>/dev/null)" || { printf '%s\n' "$line"; continue; }
  case "$type" in
    log) jq -r '.line' <<<"$line" ;;
    status) jq -r '"[" + .status + "] " + (.message // "")' <<<"$line" ;;
    error) jq -r '"ERROR: " + .message' <<<"$line" ;;
    final) status="$(jq -r '.status' <<<"$line")"; break ;;
    *) printf 'UNKNOWN %s\n' "$line" ;;
  esac
done < <(curl -sS -N --retry 5 --retry-all-errors --retry-delay 1 "$1/api/v1/rayjobs/$2/watch?format=ndjson")
echo "final: $status"
[ "$status" = SUCCEEDED ]
"""

needs_curl = pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="needs curl and jq")
pytestmark = needs_curl


def watch(url: str, job_id: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", LOOP, "loop", url, job_id], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("status", "fields", "code", "said"),
    [
        (Status.SUCCEEDED, {}, 0, "SUCCEEDED"),
        (Status.FAILED, failure(), 1, "FAILED"),
        (Status.TIMEOUT, {"cause": "run"}, 1, "TIMEOUT"),
        (Status.CANCELLED, {"cause": "cancelled_by_user"}, 1, "FAILED"),
    ],
)
def test_a_job_that_ends(service, status, fields, code, said):
    job_id = service.submit()
    service.write(service.store.append, job_id, "phase", {"phase": "new to it"}, 1)
    service.run(job_id)
    service.lines(job_id, ["hello from the driver"])
    service.end(job_id, status, **fields)
    done = watch(service.url, job_id)
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"final: {said}"
    assert done.stdout.count("hello from the driver") == 1
    assert "UNKNOWN" not in done.stdout
    assert "[RUNNING]" in done.stdout


def test_a_job_nobody_knows(service):
    done = watch(service.url, "rj-000000000000")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "final: NOT_FOUND"
    assert "ERROR: no job" in done.stdout


def test_a_job_that_is_still_waiting_and_then_times_out_in_the_queue(tmp_path):
    with running(tmp_path / "data", keep_alive=0.05) as service:
        job_id = service.submit()
        done: list[subprocess.CompletedProcess[str]] = []
        watching = threading.Thread(target=lambda: done.append(watch(service.url, job_id)))
        watching.start()
        until(lambda: service.service.watchers.count == 1, "curl watches")
        verdict = Verdict(status=Status.TIMEOUT, cause="queue", message="waited too long")
        service.move(job_id, JobState.TIMEOUT, verdict=verdict)
        watching.join(30)
    assert done[0].returncode == 1
    assert done[0].stdout.splitlines()[-1] == "final: TIMEOUT"


def test_a_service_that_restarts_makes_it_try_again(tmp_path):
    """A clean end before `final` would end the helper with 1; the cut makes curl ask the next service."""
    done: list[subprocess.CompletedProcess[str]] = []
    with running(tmp_path / "data") as service:
        port = service.service.settings.port
        job_id = service.submit()
        service.run(job_id)
        watching = threading.Thread(target=lambda: done.append(watch(service.url, job_id)))
        watching.start()
        until(lambda: service.service.watchers.count == 1, "curl watches")
    with running(tmp_path / "data", listen_on=port) as service:
        until(lambda: service.service.watchers.count == 1, "curl is back")
        service.end(job_id, Status.SUCCEEDED)
        watching.join(30)
    assert done[0].returncode == 0, done[0].stdout + done[0].stderr
    assert done[0].stdout.splitlines()[-1] == "final: SUCCEEDED"
