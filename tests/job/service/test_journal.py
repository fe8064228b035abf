"""Writes in order, followers that miss nothing, readings that are shared and never too old."""

from __future__ import annotations

import asyncio
import threading

import pytest

from corral.job.core.clock import Clock
from corral.job.protocol.events import ALL_TYPES
from corral.job.protocol.submit import SubmitRequest
from corral.job.service.journal import Journal
from corral.job.store.store import Store

JOB = "rj-000000000000"


@pytest.fixture
def store(tmp_path):
    store = Store(None, tmp_path, Clock())
    store.create(SubmitRequest(script="/a/b.sh"), key="k", owner="o", job_id=JOB)
    return store


def test_a_write_wakes_the_followers_of_its_job_only(store):
    async def main():
        journal = Journal(store)
        with journal.following(JOB) as mine, journal.following("rj-111111111111") as other:
            await journal.write(store.append, JOB, "warning", {"message": "m"}, 1)
            await asyncio.wait_for(mine.wait(), 10)
            assert not other.is_set()
        await journal.close()

    asyncio.run(main())


def test_a_cancelled_writer_loses_neither_the_change_nor_the_wake_up(store):
    async def main():
        journal = Journal(store)
        hold, entered = threading.Event(), threading.Event()

        def slow(job_id):
            entered.set()
            hold.wait(10)
            return store.append(job_id, "warning", {"message": "m"}, 1)

        with journal.following(JOB) as news:
            writing = asyncio.create_task(journal.write(slow, JOB))
            await asyncio.to_thread(entered.wait, 10)
            writing.cancel()
            hold.set()
            with pytest.raises(asyncio.CancelledError):
                await writing
            await asyncio.wait_for(news.wait(), 10)
        assert (await journal.page(JOB, 2, ALL_TYPES)).next_seq == 3
        await journal.close()

    asyncio.run(main())


def test_readings_are_shared_until_a_write(store, monkeypatch):
    async def main():
        journal = Journal(store)
        count, read = 0, store.read
        hold = threading.Event()

        def counted(*args, **kwargs):
            nonlocal count
            count += 1
            page = read(*args, **kwargs)
            hold.wait(10)
            return page

        monkeypatch.setattr(store, "read", counted)
        old = [asyncio.create_task(journal.page(JOB, 2, ALL_TYPES)) for _ in range(20)]
        await asyncio.sleep(0)
        await journal.write(store.append, JOB, "warning", {"message": "m"}, 1)
        new = [asyncio.create_task(journal.page(JOB, 2, ALL_TYPES)) for _ in range(20)]
        await asyncio.sleep(0)
        old[0].cancel()
        hold.set()
        pages = await asyncio.gather(*new)
        assert {page.next_seq for page in pages} == {3}
        assert len({id(page.data) for page in pages}) == 1
        assert {page.next_seq for page in await asyncio.gather(*old[1:])} <= {2, 3}
        assert count == 2
        assert journal._reading == {}
        await journal.close()

    asyncio.run(main())


def test_nothing_is_missed_while_many_write(store):
    async def main():
        journal = Journal(store)

        async def follow():
            cursor = 2
            with journal.following(JOB) as news:
                while cursor < 202:
                    news.clear()
                    page = await journal.page(JOB, cursor, ALL_TYPES)
                    if page.next_seq == cursor:
                        await asyncio.wait_for(news.wait(), 10)
                    cursor = page.next_seq
            return cursor

        following = [asyncio.create_task(follow()) for _ in range(10)]
        for n in range(200):
            await journal.write(store.append, JOB, "warning", {"message": str(n)}, 1)
        assert await asyncio.gather(*following) == [202] * 10
        assert journal._waiting == {}
        await journal.close()

    asyncio.run(main())
