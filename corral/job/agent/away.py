"""What an agent does besides on nodes that do not see the service's disk: it says what cannot be delivered on its
standard output, keeps the other nodes' folders like its own, sends the records, and leaves nothing behind."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from corral.job.agent import records
from corral.job.agent.aside import Aside
from corral.job.agent.attempt import Attempt
from corral.job.agent.command import Command
from corral.job.agent.guard import Guard
from corral.job.agent.heart import Heart
from corral.job.agent.link import Backoff, Link, Unanswered
from corral.job.agent.mirroring import Mirroring
from corral.job.agent.reach import Reach
from corral.job.agent.ship import Shipper
from corral.job.agent.stdout import Stdout
from corral.job.core.redact import Redactor
from corral.job.protocol.agent import EndRecord

STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"  # seconds between Ray's SIGTERM and its SIGKILL, where it is not 3
NEEDED = 2.2  # seconds of them that the agent needs for itself
LEAST_GRACE, MOST_GRACE = 0.8, 60.0  # seconds that the command gets
STRANGER = 5.0  # seconds of trying to deliver to a service that has not answered once, which reads what was said aside
RECORDS_PATIENCE, HASTY_RECORDS = 60.0, 1.0  # seconds of trying to begin to send records

_REFUSED = frozenset({400, 401, 403, 404, 409, 410, 413, 422})

log = logging.getLogger(__name__)


class Away:
    """In the order of its calls: begin, prepare, guard, collect, end, finish."""

    def __init__(self, attempt: Attempt, redactor: Redactor, reach: Reach, heart: Heart, shipper: Shipper) -> None:
        self._attempt, self._redactor, self._reach = attempt, redactor, reach
        self._shipper = shipper
        self._guard: Guard | None = None
        self._out = Stdout()
        self._mirroring = Mirroring(attempt, os.environ, lambda line: self._out.put(f"corral: {redactor(line)}"))
        self._aside = Aside(attempt, redactor, reach, lambda: shipper.stored, heart.heartbeat, self._out)

    @property
    def signal_grace(self) -> float:
        """Seconds for the command when the agent is told to end."""
        try:
            wait = float(os.environ.get(STOP_WAIT, "3"))
        except ValueError:
            wait = 3.0
        return max(LEAST_GRACE, min(wait - NEEDED, wait / 2, MOST_GRACE))

    def begin(self) -> None:
        self._out.start()
        self._aside.start()

    def prepare(self, wanted: Callable[[], bool]) -> None:
        """The source is unpacked here: the other nodes get it too. wanted: whether the command still is.

        Raises InfraError."""
        self._mirroring.begin(wanted)

    def guard(self, command: Command) -> None:
        """The command runs, and ends with this process."""
        try:
            self._guard = Guard(command.pid)
        except OSError as error:
            log.warning("nothing ends the command when this process is killed: %s", error)

    def collect(self, hasty: bool) -> None:
        """The command is over: what it left on other nodes comes here."""
        if self._guard is not None:
            self._guard.dismiss()
        self._mirroring.last(hasty)

    def end(self, record: EndRecord, hasty: bool) -> None:
        """The end record is known."""
        self._aside.end(record, hasty)
        if not self._reach.ever:
            self._shipper.hurry(STRANGER)

    def finish(self, delivered: bool, hasty: bool) -> None:
        """The service has everything that was written, or nothing more can be done about it."""
        self._aside.finish(delivered)
        remove_private(self._attempt)  # first, as there may be no time for what follows
        all_of_it = delivered and self._send_records(HASTY_RECORDS if hasty else RECORDS_PATIENCE)
        self._mirroring.remove(all_of_it, hasty)
        if all_of_it:
            shutil.rmtree(self._attempt.folder, ignore_errors=True)

    def _send_records(self, patience: float) -> bool:
        link, backoff, began = Link(self._attempt), Backoff(threading.Event()), time.monotonic()
        path = f"records?attempt={self._attempt.spec.attempt}"
        while time.monotonic() - began < patience:
            try:
                status = link.upload(path, records.pack(self._attempt.folder, self._redactor))
            except Unanswered as problem:
                log.warning("records: %s", problem)
            else:
                log.info("records: status %d", status)
                if status in (200, 204):
                    return True
                if status in _REFUSED:
                    self._out.put(f"corral: the service does not take the records: status {status}")
                    self._out.flush(1.0)
                    return False
            backoff.wait()
        self._out.put(f"corral: the records could not be sent; they stay in {self._attempt.run}")
        self._out.flush(1.0)
        return False


def remove_private(attempt: Attempt) -> None:
    """What nobody needs when the command is over: the secrets and the source."""
    for name in ("spec.json", "bundle.tar.gz"):
        with suppress(OSError):
            (attempt.folder / name).unlink()
    shutil.rmtree(attempt.source, ignore_errors=True)
