"""SIGINT and SIGTERM as something a coroutine waits for, so that they never cut a line or a request in half."""

from __future__ import annotations

import asyncio
import os
import signal
from types import TracebackType
from typing import Any, Self

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Inside, the first signal sets `first` and wakes whoever waits; a second one ends the process at once.

    A signal that is ignored (a shell's background job ignores Ctrl-C) stays ignored.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._event = asyncio.Event()
        self._before: dict[signal.Signals, Any] = {}

    def leave(self, number: signal.Signals) -> None:
        """As if this signal had come, unless one has."""
        if self.first is None:
            self._arrived(number)

    async def wait(self) -> signal.Signals:
        await self._event.wait()
        assert self.first is not None
        return self.first

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            if handler != signal.SIG_IGN:
                self._before[number] = handler
                loop.add_signal_handler(number, self._arrived, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number, handler in self._before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)

    def _arrived(self, number: signal.Signals) -> None:
        if self.first is not None:
            os._exit(128 + number)
        self.first = number
        self._event.set()
