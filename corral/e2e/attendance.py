"""One job of a run: submitted, shown until its verdict, its records fetched."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path

from corral.e2e.console import Console
from corral.e2e.result import Check, JobPart
from corral.e2e.submission import UNKNOWN
from corral.errors import CorralError, InfraError
from corral.job.client.api import AbsentError, Api, Patience
from corral.job.client.attend import Visit, attend
from corral.job.client.bundle import Bundle
from corral.job.client.cursor import Event
from corral.job.client.endpoint import Endpoint
from corral.job.client.interrupts import Interrupts
from corral.job.client.records import fetch
from corral.job.client.show import Screen
from corral.job.client.submit import post
from corral.job.client.traceback import Place, Tracebacks
from corral.job.client.watch import Wanted
from corral.job.protocol.submit import SubmitRequest
from corral.job.protocol.verdict import Verdict

_AFTER_SIGNAL = 3.0  # seconds for the records of a job that a signal cancelled


@dataclass
class Attended:
    """What became of a job. job_id: "" when the service did not say. line: the verdict in words, or why there is none.
    interrupted: by this signal. place: in the source, where it failed. lost: why there are no records."""

    request: SubmitRequest
    job_id: str = ""
    url: str = ""
    verdict: Verdict | None = None
    line: str = ""
    exit_code: int = 0
    interrupted: signal.Signals | None = None
    states: list[tuple[str, float]] = field(default_factory=list)
    place: Place | None = None
    lost: CorralError | None = None

    def part(self, records: str, preflight: list[dict[str, object]]) -> JobPart:
        """For the result. records: folder, relative to the run's."""
        request, resources = self.request, self.request.resources
        assert resources is not None
        command = [request.script] if request.script is not None else [*(request.command or [])]
        return JobPart(
            job_id=self.job_id,
            url=self.url,
            command=[*command, *request.args],
            nodes=resources.nodes,
            devices_per_node=resources.accelerators_per_node,
            verdict={} if self.verdict is None else self.verdict.model_dump(mode="json"),
            states=self.states,
            seconds=self.states[-1][1] - self.states[0][1] if self.states else 0.0,
            records=records,
            preflight=preflight,
        )

    def pointed(self, check: Check) -> Check:
        """A failed check of how the job ended, with the place in the source its output points to."""
        if check.ok or check.group != "run" or self.place is None:
            return check
        return check.model_copy(update={"file": self.place.file, "line": self.place.line})


class _Noting:
    """A screen that also notes what a result needs. The verdict of a job is a remark: the case has the last word."""

    def __init__(self, screen: Screen, members: Set[str], job: Attended) -> None:
        self._screen, self._job = screen, job
        self._tracebacks = Tracebacks(members)

    async def events(self, events: list[Event]) -> None:
        for event in events:
            if event["type"] == "log":
                self._tracebacks.feed(event)
            elif event["type"] == "status":
                self._job.states.append((str(event.get("status")), float(event.get("ts") or 0.0)))
        await self._screen.events(events)

    def note(self, line: str) -> None:
        self._screen.note(line)

    async def print(self, line: str) -> None:
        await self._screen.print(line)

    def submitted(self, job_id: str, url: str) -> None:
        self._job.job_id, self._job.url = job_id, url
        self._screen.submitted(job_id, url)

    async def ended(self, verdict: Verdict | None, line: str) -> None:
        self._job.verdict, self._job.line = verdict, line.removeprefix("error: ")
        if verdict is not None:
            self._job.place = self._tracebacks.place(verdict.failing_rank)  # its line was shown as the last state
        else:
            self._screen.note(line)

    async def close(self) -> None:
        await self._screen.close()


def probe(where: Endpoint, patience: Patience) -> None:
    """Raises CorralError when there is no service, or it does not let us in; before anything is prepared for it."""

    async def ask() -> None:
        async with Api(where, patience) as api:
            await api.has_bundle(UNKNOWN)

    asyncio.run(ask())


def attend_to(
    where: Endpoint, patience: Patience, request: SubmitRequest, bundle: Bundle, to: Path, console: Console
) -> Attended:
    """Run a job to its end and put its records into `to`. SIGINT and SIGTERM cancel it; a second one leaves at once.

    Raises CorralError for a job that was never submitted.
    """
    return asyncio.run(_attend_to(where, patience, request, bundle, to, console))


async def _attend_to(
    where: Endpoint, patience: Patience, request: SubmitRequest, bundle: Bundle, to: Path, console: Console
) -> Attended:
    job = Attended(request)
    screen = _Noting(console.screen(bundle.members), bundle.members, job)
    async with Api(where, patience) as api:
        try:
            if not await api.has_bundle(bundle.digest):
                await api.put_bundle(bundle)
            with Interrupts() as interrupts:
                await _run(api, request, to, screen, job, interrupts)
        finally:
            await screen.close()
    return job


async def _run(
    api: Api, request: SubmitRequest, to: Path, screen: _Noting, job: Attended, interrupts: Interrupts
) -> None:
    submitted = await post(api, request, secrets.token_hex(20), interrupts)
    if submitted is None:
        job.interrupted, job.line = interrupts.first, "left before the service answered; the job may exist"
        return
    for notice in submitted.notices:
        screen.note(notice)
    screen.submitted(submitted.job_id, api.job_url(submitted.job_id))
    visit = Visit(Wanted(), cancels=True, lease=request.lease)
    job.exit_code = await attend(api, submitted.job_id, visit, screen, interrupts)
    if job.verdict is not None:
        await _fetch(api, submitted.job_id, to, job, interrupts)
    job.interrupted = interrupts.first


async def _fetch(api: Api, job_id: str, to: Path, job: Attended, interrupts: Interrupts) -> None:
    """After a signal there is not much time: CI kills what does not end soon."""
    fetching = asyncio.create_task(fetch(api, job_id, to))
    signalled = asyncio.create_task(interrupts.wait())
    await asyncio.wait({fetching, signalled}, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait({fetching}, timeout=_AFTER_SIGNAL)
    for task in (fetching, signalled):
        task.cancel()
    found = (await asyncio.gather(fetching, signalled, return_exceptions=True))[0]
    if isinstance(found, asyncio.CancelledError):
        job.lost = InfraError(f"the records of {job_id} were not fetched before the run was left")
    elif isinstance(found, CorralError):
        # A job that never got its devices has none.
        job.lost = None if isinstance(found, AbsentError) and not _ran(job) else found
    elif isinstance(found, BaseException):
        raise found


def _ran(job: Attended) -> bool:
    return any(state == "RUNNING" for state, _ in job.states)


def preflight_of(records: Path) -> list[dict[str, object]]:
    """The findings in preflight.json of a job's records; none when there is no such file, or no such findings."""
    try:
        said = json.loads((records / "preflight.json").read_bytes())
        return [dict(finding) for finding in said["findings"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
