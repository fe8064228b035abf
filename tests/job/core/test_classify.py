"""One record for every rule, and the line people read."""

from __future__ import annotations

import json

import pytest

from corral.job.backends.base import Fate, Observation, Presence
from corral.job.core.classify import RULES, cancelled, classify, lost, refused
from corral.job.protocol.states import FailureClass, Status
from corral.job.protocol.verdict import client_exit_code
from tests.job.core.cases import end

# rule, exit code, first error, class, cause, exit code of the client
RECORDS = [
    ("exit-0", 0, None, None, "exit_code", 0),
    ("exit-config", 78, "error: unknown key trainer.x", "config", "exit_code", 78),
    ("exit-config", 78, "OSError: No space left on device", "config", "exit_code", 78),
    ("exit-infra", 75, "error: worker node-1 rank 5 (pid 7) died: signal 9 (SIGKILL)", "infra", "exit_code", 75),
    ("exit-timeout", 124, "error: no word from the supervisor in 120 s", "timeout", "driver", 124),
    ("not-found", 127, "job.sh: line 3: tain: command not found", "config", "command_not_found", 78),
    ("not-executable", 126, "job.sh: line 3: ./x: Permission denied", "config", "not_executable", 78),
    ("worker-died", 1, "InfraError: worker node-1 rank 5 (pid 7) died: signal 11", "infra", "worker_died", 75),
    ("worker-died", 1, "error: node-1 (node-1, 10.0.0.1, Ray node ab) was lost during f", "infra", "worker_died", 75),
    ("disk-full", 1, "OSError: [Errno 28] No space left on device: 'x'", "infra", "disk_full", 75),
    ("disk-full", 2, "cp: error writing 'a': Disk quota exceeded", "infra", "disk_full", 75),
    (
        "gloo",
        1,
        "RuntimeError: [gloo/tcp/pair.cc:589] Read error [::1]:3: Connection reset by peer",
        "infra",
        "connection_lost",
        75,
    ),
    (
        "gloo",
        1,
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv",
        "infra",
        "connection_lost",
        75,
    ),
    ("gloo", 1, "ConnectionResetError: [Errno 104] Connection reset by peer", "infra", "connection_lost", 75),
    (
        "nccl",
        134,
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)",
        "infra",
        "collective_failed",
        75,
    ),
    (
        "nccl",
        1,
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or network error",
        "infra",
        "collective_failed",
        75,
    ),
    ("nccl", 1, "RuntimeError: ncclSystemError: System call failed", "infra", "collective_failed", 75),
    (
        "hccl",
        1,
        "RuntimeError: EI0006: [PID: 3] Getting socket times out. Reason: remote rank",
        "infra",
        "collective_failed",
        75,
    ),
    (
        "hccl",
        1,
        "RuntimeError: create:build/HcclComm: HCCL function error: hcclCommInitRootInfo, socket timeout",
        "infra",
        "collective_failed",
        75,
    ),
    ("rendezvous", 1, "torch.distributed.DistStoreError: wait timeout after 1800000ms", "infra", "rendezvous", 75),
    ("rendezvous", 1, "torch.distributed.DistNetworkError: The client socket has timed out", "infra", "rendezvous", 75),
    (
        "ray",
        1,
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        "infra",
        "ray",
        75,
    ),
    ("ray", 1, "ray.exceptions.RayTaskError(LocalRayletDiedError): the task's local raylet died", "infra", "ray", 75),
    (
        "ray",
        1,
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        "infra",
        "ray",
        75,
    ),
    ("ray", 1, "RuntimeError: Failed to connect to GCS at address 10.0.0.1:6379", "infra", "ray", 75),
    ("device-broken", 1, "RuntimeError: CUDA error: uncorrectable ECC error encountered", "infra", "device", 75),
    ("killed", 137, None, "infra", "killed", 75),
    ("killed", 137, "job.sh: line 3: 12 Killed  python x.py", "infra", "killed", 75),
    ("terminated", 143, None, "infra", "terminated", 75),
    ("terminated", 130, "KeyboardInterrupt", "infra", "terminated", 75),
    ("bus-error", 135, "job.sh: line 3: 12 Bus error  python x.py", "infra", "bus_error", 75),
    ("segfault", 139, "Fatal Python error: Segmentation fault", "user", "segfault", 139),
    ("aborted", 134, "terminate called after throwing an instance of 'std::bad_alloc'", "user", "aborted", 134),
    ("import-error", 1, "ModuleNotFoundError: No module named 'rewards'", "user", "import_error", 1),
    ("import-error", 1, "ImportError: cannot import name 'x' from 'y'", "user", "import_error", 1),
    (
        "out-of-memory",
        1,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "user",
        "out_of_memory",
        1,
    ),
    ("out-of-memory", 1, "RuntimeError: NPU out of memory. Tried to allocate 2 GiB", "user", "out_of_memory", 1),
    ("rest", 3, "ValueError: bad", "user", "exit_code", 3),
    ("rest", 1, None, "user", "exit_code", 1),
    ("rest", 255, None, "user", "exit_code", 1),
    ("rest", 1, "RuntimeError: Timed out waiting for the lock of the cache", "user", "exit_code", 1),
    ("rest", 1, "KeyError: 'connection'", "user", "exit_code", 1),
    ("rest", 1, "ValueError: EIGENVALUE is negative in node 3", "user", "exit_code", 1),
]


@pytest.mark.parametrize(("rule", "code", "first_error", "failure_class", "cause", "client"), RECORDS)
def test_a_record_has_one_class_and_cause(rule, code, first_error, failure_class, cause, client):
    verdict = classify(end(code, first_error))
    assert (verdict.rule, verdict.failure_class, verdict.cause) == (rule, failure_class, cause)
    assert client_exit_code(verdict) == client
    assert client_exit_code(verdict, compat=True) == (0 if code == 0 else 1)
    assert verdict.exit_code == code
    assert "\n" not in verdict.message


def test_every_rule_has_a_record():
    assert {rule.name for rule in RULES} | {"exit-0"} == {record[0] for record in RECORDS}
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_the_line_names_class_rank_error_and_code():
    verdict = classify(end(3, "ValueError: two\nlines", failing_rank=5, failing_node=1))
    assert verdict.message == "FAILED (user): rank 5 on node-1: ValueError: two lines; exit code 3"
    assert (verdict.failing_rank, verdict.failing_node, verdict.evidence) == (5, 1, "exit code 3")


def test_a_text_that_decided_is_the_evidence():
    verdict = classify(end(1, "OSError: [Errno 28] No space left on device"))
    assert verdict.message == "FAILED (infra): OSError: [Errno 28] No space left on device; exit code 1"
    assert verdict.evidence == "OSError: [Errno 28] No space left on device"


def test_a_kill_says_what_it_usually_is():
    said = classify(end(137)).message
    assert said == (
        "FAILED (infra): no error line in its output; killed: out of memory, or by hand; exit code 137 (SIGKILL)"
    )


@pytest.mark.parametrize(("kind", "failure_class"), [("config", "config"), ("infra", "infra"), (None, "infra")])
def test_a_command_that_never_started_has_the_class_of_its_preflight(kind, failure_class):
    verdict = classify(end(None, failure="train.sh is not in the bundle", kind=kind))
    assert verdict.failure_class == failure_class
    assert verdict.exit_code is None
    assert verdict.message == f"FAILED ({failure_class}): train.sh is not in the bundle; the command never started"


def test_a_lost_agent_is_infra_and_quotes_the_backend():
    verdict = lost(Observation(Presence.ENDED, "process 7 is gone", exit_code=137), 6.0)
    assert (verdict.failure_class, verdict.cause) == (FailureClass.INFRA, "agent_lost")
    assert "process 7 is gone; its exit code was 137 (SIGKILL)" in verdict.message
    assert client_exit_code(verdict) == 75
    assert "it is gone" in lost(None, 6.0).message


INFRA, USER = FailureClass.INFRA, FailureClass.USER
FATES = [
    (Fate(Status.NOT_FOUND, "not_found", INFRA), None, "NOT_FOUND (infra): ", "not_found", 75),
    (Fate(Status.FAILED, "config", FailureClass.CONFIG), None, "FAILED (config): ", "config", 78),
    (Fate(Status.TIMEOUT, "start", FailureClass.TIMEOUT), None, "TIMEOUT (start): ", "start", 124),
    (Fate(Status.CANCELLED, "stopped", FailureClass.CANCEL), None, "CANCELLED (cancel): ", "stopped", 130),
    (Fate(Status.SUCCEEDED, "exit_code"), 0, "SUCCEEDED (no end record): ", "exit_code", 0),
    (Fate(Status.FAILED, "exit_code", USER), 3, "FAILED (user): ", "exit_code", 3),
    (Fate(Status.FAILED, "exit_code", USER), 75, "FAILED (infra): ", "exit_code", 75),
    (Fate(Status.FAILED, "exit_code", USER), 137, "FAILED (infra): ", "killed", 75),
]


@pytest.mark.parametrize(("fate", "code", "begin", "cause", "client"), FATES)
def test_what_the_backend_knows_of_the_end_counts_when_the_agent_left_no_record(fate, code, begin, cause, client):
    verdict = lost(Observation(Presence.ENDED, "it ended\nso", exit_code=code, fate=fate), 6.0)
    assert verdict.message.startswith(begin + "it ended so; ")
    assert verdict.message.endswith("its agent left no end record")
    assert (verdict.status, verdict.cause, verdict.exit_code) == (fate.status, cause, code)
    assert client_exit_code(verdict) == client


def test_the_other_verdicts():
    verdict = refused("2 nodes cannot be started:\nno such resource")
    assert verdict.message == "FAILED (config): 2 nodes cannot be started: no such resource"
    verdict = cancelled("cancelled_by_user")
    assert (verdict.status, client_exit_code(verdict), client_exit_code(verdict, compat=True)) == (
        Status.CANCELLED,
        130,
        1,
    )
    assert verdict.message == "CANCELLED (cancelled_by_user): cancelled by user"


def test_a_very_long_error_makes_a_line_that_people_can_read():
    verdict = classify(end(1, "ValueError: " + "x" * 10_000))
    assert len(verdict.message) < 700
    assert json.loads(verdict.model_dump_json())["first_error"].startswith("ValueError")
