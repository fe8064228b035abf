"""`corral jobs`: a table of jobs, once or live."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence

from corral.errors import InfraError
from corral.job.client.api import Api, Patience
from corral.job.client.endpoint import endpoint
from corral.job.client.text import one_line
from corral.job.client.verdicts import verdict_line
from corral.job.protocol.states import TERMINAL
from corral.job.protocol.views import JobList, JobView

_HEAD = ("JOB", "STATE", "AGE", "NODES", "TRY", "NAME", "REPOSITORY", "RUN", "VERDICT")
_REFRESH = 1.0  # seconds
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"


def run(args: Namespace) -> int:
    api = Api(endpoint(args.url, args.insecure), Patience(first=3.0, reconnect=10.0))
    asked = {
        "state": args.state,
        "repository": args.repository,
        "run_id": args.run_id,
        "label": args.label,
        "limit": args.limit,
    }
    filters = {name: str(value) for name, value in asked.items() if value is not None}

    async def show() -> int:
        async with api:
            if args.watch:
                return await _live(api, filters)
            jobs = await api.jobs(filters)
            if args.json:
                print(JobList(jobs=jobs).model_dump_json(indent=2, exclude={"next"}))
            else:
                print("\n".join(table(jobs, time.time())))
            return 0

    return asyncio.run(show())


async def _live(api: Api, filters: dict[str, str]) -> int:
    """Redraw in place until Ctrl-C. Without a terminal it is one table a refresh, when it changed."""
    tty = sys.stdout.isatty()
    shown: list[str] = []
    if tty:
        print(f"{_HOME}{_CLEAR_REST}", end="")
    while True:
        try:
            lines = table(await api.jobs(filters), time.time())
        except InfraError as error:
            lines = [*shown[:1], one_line(f"error: {error}")]
        if tty:
            width, height = os.get_terminal_size()
            cut = [line[:width] for line in lines[: height - 1]]
            print(_HOME + "".join(f"{line}{_CLEAR_LINE}\n" for line in cut) + _CLEAR_REST, end="", flush=True)
        elif lines != shown:
            print("\n".join(lines), flush=True)
        shown = lines
        await asyncio.sleep(_REFRESH)


def table(jobs: Sequence[JobView], now: float) -> list[str]:
    """Aligned lines under a head. now: Unix seconds."""
    rows = [_HEAD, *(_row(job, now) for job in jobs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(job: JobView, now: float) -> tuple[str, ...]:
    run = "" if job.github_run_id == "local" else f"{job.github_run_id}.{job.github_run_attempt}"
    asked = job.resources
    verdict = ""
    if job.verdict is not None and job.state in TERMINAL:
        verdict = verdict_line(job.verdict, job.job_id).removesuffix(f"; job {job.job_id}")[:80]
    return (
        job.job_id,
        str(job.state),
        age(now - job.created),
        f"{asked.nodes}x{asked.accelerators_per_node}",
        str(job.attempt),
        one_line(job.name_suffix),
        one_line(job.repository),
        one_line(run),
        verdict,
    )


def age(seconds: float) -> str:
    """12s, 5m, 3h07m, 4d: two places at most."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d"
