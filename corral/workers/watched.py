"""Work in a thread that may hang for ever, and the step it is in: a collective cannot be interrupted, only left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Watched:
    """Runs `work(self)` in a thread of its own, which says with `enter` what it does next. A step may take `bound`
    seconds unless it says otherwise."""

    def __init__(self, work: Callable[[Watched], None], bound: float) -> None:
        self.step, self.peer = "start", None  # type: str, int | None
        self.error: BaseException | None = None
        self._work, self._bound = work, bound
        self._changed = threading.Condition()
        self._ended = False
        self._until = time.monotonic() + bound
        threading.Thread(target=self._run, name="collective-check", daemon=True).start()

    def enter(self, step: str, peer: int | None = None, bound: float | None = None) -> None:
        """From the thread: the next step begins. peer: the one other rank it needs."""
        with self._changed:
            self.step, self.peer = step, peer
            self._until = time.monotonic() + (self._bound if bound is None else bound)
            self._changed.notify_all()

    def finished(self) -> bool:
        """Wait until the work has ended, True, or one of its steps has taken too long, False. Errors are in `error`."""
        with self._changed:
            while not self._ended and (left := self._until - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._ended

    def _run(self) -> None:
        try:
            self._work(self)
        except BaseException as error:
            self.error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()
