"""From how a command ended to a verdict: rules as data, the first that fits decides.

Exit codes that Corral and sysexits give a meaning come first, as whoever chose them knew why. Then texts that speak
of the machines below (a connection, a node, a disk), whatever the code. Then what other codes and signals usually
mean. The rest is the user's.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from corral.job.backends.base import Fate, Observation
from corral.job.protocol.agent import EndRecord
from corral.job.protocol.states import FailureClass, Status
from corral.job.protocol.verdict import Verdict


@dataclass(frozen=True)
class Rule:
    """Fits when all that is given fits. codes: exit codes; not_codes: any but these. text: found in the first error.
    said: one clause that explains what the numbers do not, for the message."""

    name: str
    failure_class: FailureClass
    cause: str
    codes: frozenset[int] | None = None
    text: re.Pattern[str] | None = None
    said: str = ""
    status: Status = Status.FAILED

    def fits(self, code: int, first_error: str) -> bool:
        if self.codes is not None and code not in self.codes:
            return False
        return self.text is None or self.text.search(first_error) is not None


def _codes(*codes: int) -> frozenset[int]:
    return frozenset(codes)


_USER, _CONFIG, _INFRA = FailureClass.USER, FailureClass.CONFIG, FailureClass.INFRA

RULES: tuple[Rule, ...] = (
    Rule("exit-config", _CONFIG, "exit_code", _codes(78)),
    Rule("exit-infra", _INFRA, "exit_code", _codes(75)),
    Rule("exit-timeout", FailureClass.TIMEOUT, "driver", _codes(124), status=Status.TIMEOUT),
    Rule("not-found", _CONFIG, "command_not_found", _codes(127), said="a command was not found"),
    Rule("not-executable", _CONFIG, "not_executable", _codes(126), said="a command could not be executed"),
    Rule(
        "worker-died",
        _INFRA,
        "worker_died",
        text=re.compile(r"\bworker node-\d+ rank \d+ .*\bdied\b|\bnode-\d+ \(.*\) was lost\b"),
    ),
    Rule("disk-full", _INFRA, "disk_full", text=re.compile(r"No space left on device|Disk quota exceeded")),
    Rule(
        "gloo",
        _INFRA,
        "connection_lost",
        text=re.compile(
            r"(?i:gloo.*(?:timed? ?out|connect|broken pipe))|"
            r"[Cc]onnection (?:closed|reset) by (?:peer|remote)"
        ),
    ),
    Rule(
        "nccl",
        _INFRA,
        "collective_failed",
        text=re.compile(
            r"Watchdog caught collective operation timeout|nccl(?:System|Remote|Internal)Error|"
            r"NCCL .*(?:time(?:d )?out|unhandled system error|remote process|WARN Net)|Broken pipe.*NCCL"
        ),
    ),
    Rule(
        "hccl",
        _INFRA,
        "collective_failed",
        text=re.compile(r"\bE[IJ]\d{4}\b|(?i:\bhccl\w*\b.*(?:time ?out|timed out|socket|link|connect))"),
    ),
    Rule(
        "rendezvous",
        _INFRA,
        "rendezvous",
        text=re.compile(r"DistNetworkError|DistStoreError|Rendezvous\w*(?:Timeout|Connection)\w*Error|Socket Timeout"),
    ),
    Rule(
        "ray",
        _INFRA,
        "ray",
        text=re.compile(
            r"\b(?:NodeDied|ActorDied|RayActor|ActorUnavailable|WorkerCrashed|LocalRayletDied|ObjectLost|OwnerDied|"
            r"RaySystem|NodeUnavailable|ObjectStoreFull|OutOfDisk|RuntimeEnvSetup)Error\b|ray\.exceptions\.OutOfMemory|"
            r"\braylet\b.*\b(?:died|crashed|killed|terminated)\b|\bnode\b.*\b(?:died|marked dead)\b|"
            r"(?:[Ff]ailed|[Uu]nable) to connect to (?:the )?GCS"
        ),
    ),
    Rule(
        "device-broken",
        _INFRA,
        "device",
        text=re.compile(r"uncorrectable ECC|\bXid\b|GPU has fallen off the bus|device is lost"),
    ),
    Rule("killed", _INFRA, "killed", _codes(128 + signal.SIGKILL), said="killed: out of memory, or by hand"),
    Rule(
        "terminated",
        _INFRA,
        "terminated",
        _codes(128 + signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGHUP),
        said="ended by a signal that did not come from Corral",
    ),
    Rule(
        "bus-error",
        _INFRA,
        "bus_error",
        _codes(128 + signal.SIGBUS),
        said="bus error: usually /dev/shm or the disk is full",
    ),
    Rule("segfault", _USER, "segfault", _codes(128 + signal.SIGSEGV), said="segmentation fault"),
    Rule("aborted", _USER, "aborted", _codes(128 + signal.SIGABRT), said="aborted"),
    Rule("import-error", _USER, "import_error", text=re.compile(r"\b(?:ImportError|ModuleNotFoundError)\b")),
    Rule(
        "out-of-memory",
        _USER,
        "out_of_memory",
        text=re.compile(r"\bOutOfMemoryError\b|\bMemoryError\b|\w+ out of memory"),
    ),
    Rule("rest", _USER, "exit_code"),
)


def classify(end: EndRecord) -> Verdict:
    """The verdict of a whole end record that came before anything else decided."""
    if end.exit_code is None:
        return _not_started(end)
    if end.exit_code == 0:
        took = max(0.0, end.ended - end.started)
        return Verdict(
            status=Status.SUCCEEDED,
            cause="exit_code",
            message=f"SUCCEEDED: exit code 0 after {took:.1f} s",
            exit_code=0,
            rule="exit-0",
        )
    first_error = one_line(end.first_error or "")
    rule = next(rule for rule in RULES if rule.fits(end.exit_code, first_error))
    number = f"exit code {end.exit_code}{_signal_name(end.exit_code)}"
    what = first_error or "no error line in its output"
    return Verdict(
        status=rule.status,
        failure_class=rule.failure_class,
        cause=rule.cause,
        message=message(
            rule.status, rule.failure_class, place(end.failing_rank, end.failing_node), what, rule.said, number
        ),
        exit_code=end.exit_code,
        failing_rank=end.failing_rank,
        failing_node=end.failing_node,
        first_error=end.first_error,
        evidence=first_error if rule.text else number,
        rule=rule.name,
    )


def lost(observation: Observation | None, silent: float) -> Verdict:
    """The agent is gone and left no end record: what the backend knows of its end decides, else it is nobody's fault.

    silent: seconds since that was first seen.
    """
    if observation is not None and observation.fate is not None:
        return _told(observation, observation.fate)
    seen = (observation.message if observation else "") or "it is gone"
    code = observation.exit_code if observation else None
    evidence = seen if code is None else f"{seen}; its exit code was {code}{_signal_name(code)}"
    what = f"the agent of the job ended without an end record ({evidence}), seen {silent:.0f} s ago"
    return Verdict(
        status=Status.FAILED,
        failure_class=_INFRA,
        cause="agent_lost",
        message=message(Status.FAILED, _INFRA, "", what),
        evidence=one_line(evidence),
        rule="agent-lost",
    )


def _told(observation: Observation, fate: Fate) -> Verdict:
    """An exit code of the agent is that of its command, or one that Corral gives a meaning."""
    code, failure_class, cause, said = observation.exit_code, fate.failure_class, fate.cause, ""
    if failure_class is FailureClass.USER and code:
        rule = next(rule for rule in RULES if rule.fits(code, ""))
        failure_class, cause, said = rule.failure_class, rule.cause, rule.said
    seen = one_line(observation.message or "it is over")
    number = "" if code is None else f"exit code {code}{_signal_name(code)}"
    word = failure_class or "no end record"
    where = {"run": "run", "start": "start"}.get(cause, word) if fate.status is Status.TIMEOUT else word
    return Verdict(
        status=fate.status,
        failure_class=failure_class,
        cause=cause,
        message=message(fate.status, where, "", seen, said, number, "its agent left no end record"),
        exit_code=code,
        evidence=seen,
        rule=f"backend-{cause}",
    )


def refused(reason: str) -> Verdict:
    """The backend said that it can never start the job."""
    return Verdict(
        status=Status.FAILED,
        failure_class=_CONFIG,
        cause="refused",
        message=message(Status.FAILED, _CONFIG, "", reason),
        first_error=one_line(reason),
        evidence=one_line(reason),
        rule="refused",
    )


_CANCEL_WORDS = {"lease": "no client was heard while its lease ran"}


def cancelled(cause: str, detail: str = "") -> Verdict:
    """cause: as the one who cancelled gave it, or `lease`."""
    words = detail or _CANCEL_WORDS.get(cause) or cause.replace("_", " ")
    return Verdict(
        status=Status.CANCELLED,
        failure_class=FailureClass.CANCEL,
        cause=cause,
        message=f"CANCELLED ({cause}): {one_line(words)}",
        rule="cancel",
    )


def message(status: Status, failure_class: str, where: str, *clauses: str) -> str:
    """`FAILED (user): rank 5 on node-1: ValueError: ...; exit code 3`."""
    said = "; ".join(clause for clause in map(one_line, clauses) if clause)
    return f"{status} ({failure_class}): {where}{said}"


def place(rank: int | None, node: int | None) -> str:
    if rank is None:
        return "" if node is None else f"node-{node}: "
    return f"rank {rank}: " if node is None else f"rank {rank} on node-{node}: "


def one_line(text: str, longest: int = 600) -> str:
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _not_started(end: EndRecord) -> Verdict:
    failure_class = _CONFIG if end.kind == "config" else _INFRA
    reason = one_line(end.failure or end.first_error or "the agent ended without an exit code of the command")
    return Verdict(
        status=Status.FAILED,
        failure_class=failure_class,
        cause="preflight",
        message=message(
            Status.FAILED, failure_class, place(end.failing_rank, end.failing_node), reason, "the command never started"
        ),
        failing_rank=end.failing_rank,
        failing_node=end.failing_node,
        first_error=reason,
        evidence=reason,
        rule=f"preflight-{failure_class}",
    )


def _signal_name(code: int) -> str:
    try:
        return f" ({signal.Signals(code - 128).name})" if code > 128 else ""
    except ValueError:
        return ""
