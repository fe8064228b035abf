"""The async face of the store: one thread writes, a few read, and each write wakes those who wait for its job.

Whoever follows a job reads from the store and waits when there is nothing new. So a slow reader costs its own page and
nothing else: there are no queues to fill.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import ParamSpec, TypeVar

from corral.job.store.store import Page, Store

READERS = 4

P = ParamSpec("P")
T = TypeVar("T")
_Key = tuple[int, frozenset[str], frozenset[int] | None]


class Journal:
    """Wraps one Store inside one event loop; made before the loop runs, closed inside it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._writer = ThreadPoolExecutor(1, "journal-write")
        self._readers = ThreadPoolExecutor(READERS, "journal-read")
        self._reading: defaultdict[str, dict[_Key, asyncio.Future[Page]]] = defaultdict(dict)
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    async def write(self, change: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `change` (a method of the store) after all earlier writes, then wake the followers of its job.

        The job is the first argument: an id, or a record. A caller that is cancelled meanwhile loses the result, never
        the change or the wake-up.
        """
        subject = args[0] if args else None
        job_id = subject if isinstance(subject, str) else getattr(subject, "job_id", None)
        loop = asyncio.get_running_loop()

        def run() -> T:
            try:
                return change(*args, **kwargs)
            finally:
                if job_id is not None:
                    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                        loop.call_soon_threadsafe(self.notify, job_id)

        return await asyncio.shield(loop.run_in_executor(self._writer, run))

    async def read(self, query: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `query` beside writes and other reads."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, partial(query, *args, **kwargs))

    async def page(
        self, job_id: str, after_seq: int, types: frozenset[str], ranks: frozenset[int] | None = None
    ) -> Page:
        """`Store.read`. Those who ask for the same page at the same time share one reading and its bytes."""
        key = (after_seq, types, ranks)
        reading = self._reading[job_id].get(key)
        if reading is None:
            read = self.read(self.store.read, job_id, after_seq, types=types, ranks=ranks)
            reading = self._reading[job_id][key] = asyncio.ensure_future(read)
            reading.add_done_callback(lambda done: self._forget(job_id, key, done))
        return await asyncio.shield(reading)

    @contextmanager
    def following(self, job_id: str) -> Iterator[asyncio.Event]:
        """An event that is set by every write to the job. Clear it, read, and wait for it if there was nothing."""
        news = asyncio.Event()
        self._waiting[job_id].add(news)
        try:
            yield news
        finally:
            followers = self._waiting[job_id]
            followers.discard(news)
            if not followers:
                del self._waiting[job_id]

    def notify(self, job_id: str) -> None:
        """Wake all followers of a job. What they ask for next is read anew: a reading under way may be too old."""
        self._reading.pop(job_id, None)
        for news in self._waiting.get(job_id, ()):
            news.set()

    def _forget(self, job_id: str, key: _Key, done: asyncio.Future[Page]) -> None:
        pages = self._reading.get(job_id, {})
        if pages.get(key) is done:
            del pages[key]
            if not pages:
                del self._reading[job_id]

    async def close(self) -> None:
        """Wait for the writes under way and close the store. Later calls raise RuntimeError."""
        loop = asyncio.get_running_loop()
        for pool in (self._readers, self._writer):
            await loop.run_in_executor(None, partial(pool.shutdown, wait=True, cancel_futures=pool is self._readers))
        self.store.close()
