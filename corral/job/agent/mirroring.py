"""The mirror of an attempt, seen from its agent: a process that may fail without the job failing with it."""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from corral.errors import InfraError
from corral.job.agent.attempt import Attempt
from corral.job.agent.command import polite_blocked

BEGIN = 240.0  # seconds for the cluster to answer and its nodes to get the source
LAST, HASTY_LAST = 15.0, 0.4  # seconds for the last copy; the second when the agent was told to end
REMOVE, HASTY_REMOVE = 8.0, 1.0
CLOSE = 3.0  # seconds for the process to end by itself
_NOT_ITS_BUSINESS = ("RAY_JOB_CONFIG_JSON_ENV_VAR", "CORRAL_TOKEN", "CORRAL_TOKEN_FILE", "SUBMITTER_TOKEN")

log = logging.getLogger(__name__)


class Mirroring:
    """say: gets lines for people."""

    def __init__(self, attempt: Attempt, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._attempt, self._say = attempt, say
        hidden = {*_NOT_ITS_BUSINESS, *attempt.spec.secrets}
        self._env = {name: value for name, value in environ.items() if name not in hidden}
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def begin(self, wanted: Callable[[], bool]) -> None:
        """Bring the source to all other nodes, if there are any, and follow them from now on. wanted: asked meanwhile,
        whether to go on. Raises InfraError when too few nodes have the source."""
        if not self._env.get("RAY_ADDRESS"):
            return
        said = os.open(self._attempt.folder / "mirror.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            with polite_blocked():
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "corral.job.agent.mirror", str(self._attempt.folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    env=self._env,
                    text=True,
                    start_new_session=True,
                )
        finally:
            os.close(said)
        threading.Thread(target=self._read, args=(self._process,), name="mirror", daemon=True).start()
        answer = self._order("begin", BEGIN, wanted)
        if answer is None:
            log.warning("no mirror: the cluster does not answer; see mirror.log")
            if wanted():
                self.close()
        elif answer["problem"] is not None:
            raise InfraError(f"the source is not on all nodes: {answer['problem']}")
        else:
            log.info("%d other nodes", answer["nodes"])
            if answer["nodes"] == 0 and self._attempt.spec.nodes == 1:
                self.close()

    def last(self, hasty: bool) -> None:
        """Bring what other nodes have written, as far as that takes not too long."""
        seconds = HASTY_LAST if hasty else LAST
        followed = self._process is not None
        answer = self._order(f"last {seconds}", seconds + (0.1 if hasty else 1.0))
        if followed and not (answer and answer["complete"]):
            line = "not all output of other nodes is here"
            log.warning(line)
            self._say(f"{line}; it stays there, in {self._attempt.run}")

    def remove(self, all_of_it: bool, hasty: bool) -> None:
        """The folders on other nodes, or their source alone; what did not come from a node stays there. Nothing is
        followed after that."""
        self._order("remove" if all_of_it else "private", HASTY_REMOVE if hasty else REMOVE)
        self.close()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        try:
            process.stdin.close()
            process.wait(CLOSE)
        except (OSError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()

    def _order(self, order: str, seconds: float, wanted: Callable[[], bool] = lambda: True) -> dict[str, Any] | None:
        """The answer; None when there is no mirror any more, or it takes too long."""
        if self._process is None:
            return None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{order}\n")
            self._process.stdin.flush()
        except OSError:
            return None
        deadline = time.monotonic() + seconds
        while wanted() and (left := deadline - time.monotonic()) > 0:
            try:
                return self._answers.get(timeout=min(left, 0.2))
            except queue.Empty:
                continue
        return None

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            if "said" in answer:
                log.warning("%s", answer["said"])
                self._say(answer["said"])
            else:
                self._answers.put(answer)
        self._answers.put(None)
