"""Stay with a job until its verdict, renew its lease meanwhile, and do what a signal asks for."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from corral.atomic import write_text
from corral.errors import CorralError, InfraError
from corral.job.client.api import Api
from corral.job.client.cursor import Cursor
from corral.job.client.github import GithubScreen
from corral.job.client.interrupts import Interrupts
from corral.job.client.show import PlainScreen, Screen, Writer
from corral.job.client.verdicts import as_json, verdict_line
from corral.job.client.watch import Follower, Wanted
from corral.job.protocol.verdict import Verdict, client_exit_code

CANCEL_WAIT = 10.0  # seconds for the verdict after a cancel


@dataclass(frozen=True)
class Visit:
    """How to stay with a job. cancels: a signal cancels the job; else it only ends the visit. lease: seconds, renewed
    four times as often; None: no lease that we know of. result: file for the verdict as JSON."""

    wanted: Wanted
    after_seq: int = 0
    cancels: bool = False
    lease: float | None = None
    compat: bool = False
    result: Path | None = None


@asynccontextmanager
async def screen_for(writer: Writer, ci: bool, members: Set[str] = frozenset()) -> AsyncIterator[Screen]:
    """Where a job is shown; all is written when the block ends. members: files of the source, for annotations in CI."""
    screen: Screen = GithubScreen(writer, members) if ci else PlainScreen(writer, sys.stderr.isatty())
    try:
        yield screen
    finally:
        await screen.close()


async def attend(api: Api, job_id: str, visit: Visit, screen: Screen, interrupts: Interrupts) -> int:
    """Show a job until its verdict; the exit code. 0 only when a final event said SUCCEEDED."""
    cursor = Cursor(visit.after_seq, visit.wanted.gapless)
    follower = Follower(api, job_id, cursor, visit.wanted, screen.events, screen.note)
    verdict: Verdict | None = None
    failure: CorralError | None = None
    renewing = asyncio.create_task(_renew(api, job_id, visit.lease))
    watching = asyncio.create_task(follower.verdict())
    signalled = asyncio.create_task(interrupts.wait())
    try:
        await asyncio.wait({watching, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if interrupts.first is not None and not watching.done():
            await _interrupted(api, job_id, visit, screen, watching)
        if watching.done():
            verdict = watching.result()
        else:
            failure = InfraError("left before the verdict")
    except CorralError as error:
        failure = error
    finally:
        for task in (renewing, watching, signalled):
            task.cancel()
        await asyncio.gather(renewing, watching, signalled, return_exceptions=True)
    return await _finish(api, job_id, visit, screen, interrupts, cursor, verdict, failure)


async def _interrupted(api: Api, job_id: str, visit: Visit, screen: Screen, watching: asyncio.Task[Verdict]) -> None:
    """The cancel goes out before anything is said: CI gives a few seconds between its signal and its kill."""
    if not visit.cancels:
        screen.note(f"left; job {job_id} goes on: corral watch {job_id}, corral cancel {job_id}")
        return
    cancelling = asyncio.create_task(api.cancel(job_id))
    await asyncio.wait({cancelling, watching}, timeout=CANCEL_WAIT, return_when=asyncio.FIRST_COMPLETED)
    if cancelling.done() and cancelling.exception() is None:
        screen.note(f"cancel sent; waiting up to {CANCEL_WAIT:.0f} s for job {job_id} to end, again to leave at once")
        await asyncio.wait({watching}, timeout=CANCEL_WAIT)
    elif not watching.done():
        error = cancelling.exception() if cancelling.done() else "no answer"
        screen.note(f"the cancel did not reach the service ({error}); corral cancel {job_id}")
    cancelling.cancel()
    await asyncio.gather(cancelling, return_exceptions=True)


async def _finish(
    api: Api,
    job_id: str,
    visit: Visit,
    screen: Screen,
    interrupts: Interrupts,
    cursor: Cursor,
    verdict: Verdict | None,
    failure: CorralError | None,
) -> int:
    if verdict is not None:
        code, line = client_exit_code(verdict, visit.compat), verdict_line(verdict, job_id)
    else:
        assert failure is not None
        code, line = (1 if visit.compat else failure.exit_code), f"error: {failure}"
    if interrupts.first is not None:
        code = 128 + interrupts.first
    if verdict is not None or interrupts.first is None or visit.cancels:
        await screen.ended(verdict, line)
    if visit.result is not None:
        write_text(visit.result, as_json(verdict, job_id, api.job_url(job_id), code, cursor.seq))
    return code


async def _renew(api: Api, job_id: str, lease: float | None) -> None:
    """Tell the service that somebody is there. What goes wrong here shows in the watch, or is over by the next time.

    A watcher does not know the lease: it follows from the first answer, or there is none.
    """
    while True:
        with suppress(httpx.RequestError, CorralError):
            until = (await api.heartbeat(job_id)).lease_until
            if until is None:
                return
            lease = lease or until - time.time()
        await asyncio.sleep(min(60.0, max(0.2, lease / 4)) if lease else 5.0)
