"""What an agent does besides on nodes that do not see the service's disk: it says what cannot be delivered on its
standard output, keeps the other nodes' folders like its own, sends the records, and leaves nothing behind."""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import suppress

from corral.job.agent.aside import Aside
from corral.job.agent.attempt import Attempt
from corral.job.agent.heart import Heart
from corral.job.agent.reach import Reach
from corral.job.agent.ship import Shipper
from corral.job.agent.stdout import Stdout
from corral.job.core.redact import Redactor
from corral.job.protocol.agent import EndRecord

STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"  # seconds between Ray's SIGTERM and its SIGKILL, where it is not 3
NEEDED = 2.2  # seconds of them that the agent needs for itself
LEAST_GRACE, MOST_GRACE = 0.8, 60.0  # seconds that the command gets

log = logging.getLogger(__name__)


class Away:
    """In the order of its calls: begin, prepare, collect, end, finish."""

    def __init__(self, attempt: Attempt, redactor: Redactor, reach: Reach, heart: Heart, shipper: Shipper) -> None:
        self._attempt, self._redactor, self._reach = attempt, redactor, reach
        self._out = Stdout()
        self._aside = Aside(attempt, redactor, reach, lambda: shipper.stored, heart.heartbeat, self._out)

    @property
    def signal_grace(self) -> float:
        """Seconds for the command when the agent is told to end."""
        try:
            wait = float(os.environ.get(STOP_WAIT, "3"))
        except ValueError:
            wait = 3.0
        return max(LEAST_GRACE, min(wait - NEEDED, MOST_GRACE))

    def begin(self) -> None:
        self._out.start()
        self._aside.start()

    def prepare(self) -> None:
        """The source is unpacked here: the other nodes get it too."""

    def collect(self, hasty: bool) -> None:
        """The command is over: what it left on other nodes comes here."""

    def end(self, record: EndRecord, hasty: bool) -> None:
        """The end record is known."""
        self._aside.end(record, hasty)

    def finish(self, delivered: bool, hasty: bool) -> None:
        """The service has everything, or nothing more can be done about it."""
        self._aside.finish(delivered)
        if delivered and not hasty:
            self._remove_all()
        else:
            self.remove_private()

    def remove_private(self) -> None:
        """What nobody needs when the command is over: secrets and source."""
        remove_private(self._attempt)

    def _remove_all(self) -> None:
        shutil.rmtree(self._attempt.folder, ignore_errors=True)


def remove_private(attempt: Attempt) -> None:
    with suppress(OSError):
        (attempt.folder / "spec.json").unlink()
    shutil.rmtree(attempt.source, ignore_errors=True)
