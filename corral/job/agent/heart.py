"""Tells the service that the job lives, how far it is, and takes its orders."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Literal

from corral.job.agent.attempt import Attempt
from corral.job.agent.lines import Redactor
from corral.job.agent.link import Backoff, Link, Unanswered
from corral.job.agent.output import output_files
from corral.job.agent.progress import is_one_host, standing
from corral.job.agent.reach import Reach
from corral.job.protocol.agent import Heartbeat, Orders

INTERVAL = 2.0  # seconds
_GONE = 410

log = logging.getLogger(__name__)

Phase = Literal["preflight", "running", "collecting"]


class Heart(threading.Thread):
    """Beats every INTERVAL seconds and at once when the phase changes. `obey` gets the orders to stop, also again."""

    def __init__(
        self, attempt: Attempt, redactor: Redactor, obey: Callable[[Orders], None], reach: Reach | None = None
    ) -> None:
        super().__init__(name="heart", daemon=True)
        self._attempt, self._redactor, self._obey = attempt, redactor, obey
        self._reach = reach or Reach()
        self._link = Link(attempt)
        self._phase: Phase = "preflight"
        self._awake = threading.Event()
        self._ending = False
        self._silent = False

    def tell(self, phase: Phase) -> None:
        self._phase = phase
        self._awake.set()

    def close(self) -> None:
        """Stop beating; returns when a beat that is under way is over."""
        self._ending = True
        self._awake.set()
        self.join()

    def run(self) -> None:
        backoff = Backoff(self._awake)
        while not self._ending:
            self._awake.clear()
            try:
                self._beat()
            except Unanswered as problem:
                self._reach.failed("heart")
                if not self._silent:
                    log.warning("heartbeat: %s", problem)
                self._silent = True
                backoff.wait()
            else:
                self._reach.answered("heart")
                if self._silent:
                    log.info("heartbeat: the service answers again")
                self._silent = False
                backoff.reset()
                self._awake.wait(INTERVAL)
        self._link.close()

    def _beat(self) -> None:
        status, answer = self._link.call("POST", "heartbeat", self.heartbeat().model_dump_json().encode())
        if status == _GONE:  # the service is at another attempt: this command must not go on beside that one
            self._obey(Orders(stop=True))
        if status != 200:
            raise Unanswered(f"status {status}", status)
        try:
            orders = Orders.model_validate_json(answer)
        except ValueError:
            raise Unanswered("the answer holds no orders", status) from None
        if orders.stop:
            self._obey(orders)

    def heartbeat(self) -> Heartbeat:
        """What it would tell now."""
        ranks = standing(self._attempt.run, is_one_host(os.environ))
        return Heartbeat(
            attempt=self._attempt.spec.attempt,
            phase=self._phase,
            output_bytes=sum(file.size() for file in output_files(self._attempt.driver_log, self._attempt.run)),
            progress=ranks.total,
            ranks=ranks.ranks,
            suspects=[self._redactor(suspect) for suspect in ranks.suspects],
        )
