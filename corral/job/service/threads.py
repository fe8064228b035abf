"""Work that waits for the disk, out of the way of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


@asynccontextmanager
async def in_threads(blocking: AbstractContextManager[T]) -> AsyncIterator[T]:
    """A context manager that waits for the disk, entered and left in threads."""
    inside = await asyncio.to_thread(blocking.__enter__)
    try:
        yield inside
    except BaseException as error:
        if not await asyncio.to_thread(blocking.__exit__, type(error), error, error.__traceback__):
            raise
    else:
        await asyncio.to_thread(blocking.__exit__, None, None, None)
