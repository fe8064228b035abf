"""The life of an attempt: source, command, verdict, in this order, whatever becomes of the service meanwhile."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from corral.errors import ConfigError, CorralError, InfraError
from corral.job.agent import preflight, source
from corral.job.agent.attempt import Attempt
from corral.job.agent.away import Away
from corral.job.agent.command import Command
from corral.job.agent.heart import Heart
from corral.job.agent.link import Backoff, Link, Unanswered
from corral.job.agent.output import output_files
from corral.job.agent.reach import Reach
from corral.job.agent.scan import Scanner
from corral.job.agent.ship import Shipper
from corral.job.core.redact import Redactor
from corral.job.protocol.agent import EndRecord, Orders

TICK = 0.2  # seconds between looks at the command
SIGNAL_GRACE = 3.0  # seconds for the command when the agent itself is told to end; the backend kills after twice that
SCAN_BOUND = 5.0  # seconds for reading the rest of the output in search of the first error
HASTY_SCAN_BOUND = 0.5  # the same when the agent was told to end
PATIENCE = 60.0  # seconds without a service until what is left is left to it
IMPATIENCE = 2.0  # the same when the agent was told to end
_REFUSED = frozenset({401, 403, 404, 409, 410, 422})
_RUN_DIR = re.compile(r"(?<!\$)\{run_dir\}")  # ${run_dir} is the shell's
_UNSEEN = ("CORRAL_TOKEN", "CORRAL_TOKEN_FILE", "SUBMITTER_TOKEN")  # of whoever started the agent

log = logging.getLogger(__name__)


def run(folder: Path, away: bool = False) -> int:
    """Run the attempt in `folder`; the exit code is that of its command, 78, 126 or 127 when it could not start.

    away: on nodes that do not see the service's disk.
    Raises InfraError when there is no attempt, or another agent runs it.
    """
    attempt = Attempt.load(folder)
    redactor = Redactor([*attempt.spec.secrets.values(), attempt.spec.token])
    lock = _log_to(attempt.folder / "agent.log", redactor)
    try:
        return _Agent(attempt, redactor, away).run()
    finally:
        logging.shutdown()
        os.close(lock)


class _Agent:
    """States: preflight → running → collecting → over, or preflight → over. `end.json` is written when the command is
    over, or is not to run."""

    def __init__(self, attempt: Attempt, redactor: Redactor, away: bool) -> None:
        self._attempt, self._redactor = attempt, redactor
        reach = Reach()
        self._heart = Heart(attempt, redactor, self._obey, reach)
        self._shipper = Shipper(attempt, redactor, PATIENCE, reach)
        self._away = Away(attempt, redactor, reach, self._heart, self._shipper) if away else None
        self._signal_grace = self._away.signal_grace if self._away else SIGNAL_GRACE
        self._command: Command | None = None
        self._grace: float | None = None  # somebody wants the command to end
        self._told = False  # by a signal

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._signalled)
        record = self._attempt.read_end()  # of an earlier agent, which did not get to deliver it
        code = _exit_code(record) if record else 0
        self._heart.start()
        if self._away:
            self._away.begin()
        if record is None:
            record, code = self._work()
            if self._away:
                self._away.end(record, self._told)
            try:
                self._attempt.write_end(record)
            except OSError as error:
                log.error("cannot write end.json: %s", error)
            log.info("ended: %s", record.model_dump_json())
        elif self._away:
            self._away.end(record, self._told)
        if record.failure is None:  # of a command that never ran nobody is to hear that it is over
            self._heart.tell("collecting")
        delivered = self._deliver(record)
        if self._away:
            self._away.finish(delivered, self._told)
        self._heart.close()
        return code

    def _work(self) -> tuple[EndRecord, int]:
        started = time.time()
        try:
            command = self._start()
        except (ConfigError, InfraError, preflight.NotFit) as error:
            return self._failed(error, started), error.exit_code
        started = time.time()
        self._begun(command)
        if self._away:
            self._away.guard(command)
        self._heart.tell("running")
        self._shipper.start()
        scanner = Scanner(self._attempt, self._redactor)
        while (code := command.wait(TICK)) is None:
            scanner.step(TICK)
        log.info("the command ended with %d", code)
        trouble = command.sweep()
        if self._away:
            self._away.collect(self._told)
        found = scanner.finish(HASTY_SCAN_BOUND if self._told else SCAN_BOUND) if code else None
        record = self._record(started).model_copy(
            update={
                "exit_code": code,
                "failing_rank": found.rank if found else None,
                "failing_node": found.node if found else None,
                "first_error": (trouble or (found.text if found else None)) if code else None,
            }
        )
        return record.sealed(), code

    def _start(self) -> Command:
        if self._attempt.driver_log.exists():
            raise InfraError("the agent of this attempt was lost while its command ran")
        self._attempt.reserve()
        source.prepare(self._attempt)
        if self._away:
            self._away.prepare(lambda: self._grace is None)
        self._check_nodes()
        if self._grace is not None:
            raise InfraError("stopped before the command started")
        self._attempt.run.mkdir(mode=0o700, exist_ok=True)
        spec = self._attempt.spec
        env = environment(self._attempt, os.environ)
        command = Command(spec.command, self._attempt.folder / spec.cwd, env, self._attempt.driver_log)
        log.info("pid %d: %.2000s", command.pid, spec.command)
        return command

    def _check_nodes(self) -> None:
        spec = self._attempt.spec
        if spec.preflight is None or self._grace is not None:
            return
        env = environment(self._attempt, os.environ)
        try:
            preflight.check(
                self._attempt,
                spec.preflight,
                {name: value for name, value in env.items() if name not in spec.secrets},
                self._begun,
            )
        finally:
            self._command = None

    def _begun(self, command: Command) -> None:
        """What runs now is what a stop is for."""
        self._command = command
        if self._grace is not None:
            command.stop(self._grace)

    def _failed(self, error: CorralError, started: float) -> EndRecord:
        message = self._redactor(" ".join(str(error).split()))
        update: dict[str, Any] = {
            "failure": message,
            "kind": "config" if isinstance(error, ConfigError) else "infra",
        }
        if isinstance(error, preflight.NotFit):
            at = error.finding
            update |= {"kind": at.kind, "failing_node": at.node, "failing_rank": at.rank}
        return self._record(started).model_copy(update=update).sealed()

    def _record(self, started: float) -> EndRecord:
        spec = self._attempt.spec
        files = output_files(self._attempt.driver_log, self._attempt.run)
        return EndRecord(
            job_id=spec.job_id,
            attempt=spec.attempt,
            exit_code=None,
            bundle=spec.bundle,
            started=started,
            ended=time.time(),
            sources={file.source: size for file in files if (size := file.size())},
        )

    # Being told to end ----------------------------------------------------------------------------------------------

    def _obey(self, orders: Orders) -> None:
        self._stop(orders.grace)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._shipper.hurry(0.0 if self._told else IMPATIENCE)
        self._told = True
        self._stop(self._signal_grace)

    def _stop(self, grace: float) -> None:
        self._grace = grace if self._grace is None else min(grace, self._grace)
        if (command := self._command) is not None:
            command.stop(grace)

    # Delivery -------------------------------------------------------------------------------------------------------

    def _deliver(self, record: EndRecord) -> bool:
        """Whether the service has all of the output and the end record.

        Everything is on the disk by now: whatever fails here, the service finds it there, or what was said aside.

        A service that stopped answering while output was sent gets one more try with the end record.
        """
        if not self._shipper.ident:
            self._shipper.start()
        complete = self._shipper.finish()
        log.info("all output is stored" if complete else "the service has to read the rest of the output itself")
        link, backoff = Link(self._attempt), Backoff(threading.Event())
        began = time.monotonic()
        body = record.model_dump_json().encode()
        accepted = False
        while True:
            try:
                status, _ = link.call("POST", "end", body)
            except Unanswered as problem:
                log.warning("end record: %s", problem)
            else:
                log.info("end record: status %d", status)
                accepted = status in (200, 204)
                if accepted or status in _REFUSED:
                    break
            if not complete or time.monotonic() - began > (IMPATIENCE if self._told else PATIENCE):
                break
            backoff.wait()
        link.close()
        return complete and accepted


def environment(attempt: Attempt, environ: Mapping[str, str]) -> dict[str, str]:
    """The command's environment: the agent's own, what the job asks for, its secrets, and what Corral says.

    `{run_dir}` in what the job asks for stands for the folder of its records, which nobody knows at submission.
    """
    spec = attempt.spec
    return {
        **{name: value for name, value in environ.items() if name not in _UNSEEN},
        "PYTHONUNBUFFERED": "1",  # output is a pipe: Python would hold back 8 KiB of it
        **{name: _RUN_DIR.sub(lambda _: str(attempt.run), value) for name, value in spec.env.items()},
        **spec.secrets,
        "CORRAL_RUN_DIR": str(attempt.run),
        "CORRAL_JOB_ID": spec.job_id,
        "CORRAL_JOB_ATTEMPT": str(spec.attempt),
        "CORRAL_JOB_NODES": str(spec.nodes),
        "CORRAL_JOB_DEVICES": str(spec.devices_per_node),
        "CORRAL_RANK_OUTPUT": "files",  # the agent sends them from there
    }


def _exit_code(record: EndRecord) -> int:
    if record.exit_code is not None:
        return record.exit_code
    return ConfigError.exit_code if record.kind == "config" else InfraError.exit_code


class _Redacted(logging.Formatter):
    def __init__(self, redactor: Redactor) -> None:
        super().__init__("%(asctime)s %(levelname)s %(threadName)s %(message)s")
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        return self._redactor(super().format(record))


def _log_to(path: Path, redactor: Redactor) -> int:
    """Log into `path`, and hold a lock on it as long as the returned descriptor is open: one agent an attempt."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InfraError(f"another agent runs the attempt in {path.parent}") from None
    except OSError as error:
        raise InfraError(f"cannot write {path}: {error.strerror}") from None
    handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_Redacted(redactor))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    threading.excepthook = lambda crash: log.critical(
        "crashed", exc_info=(crash.exc_type, crash.exc_value or crash.exc_type(), crash.exc_traceback)
    )
    return file
