"""`corral watch`, `logs`, `records`, `cancel`, `cleanup`: a job that is there already."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path

from corral.errors import ConfigError, CorralError, InfraError
from corral.job.client import github
from corral.job.client.api import Api, Patience
from corral.job.client.attend import Visit, attend, screen_for
from corral.job.client.endpoint import endpoint
from corral.job.client.interrupts import Interrupts
from corral.job.client.records import fetch
from corral.job.client.show import OUT, Writer
from corral.job.client.text import one_line, printable
from corral.job.client.watch import Wanted
from corral.job.protocol import names
from corral.job.protocol.views import Swept

Command = Callable[[Namespace, Api], Awaitable[int]]

_SHORT = Patience(first=3.0, reconnect=10.0)  # for commands that a person waits for


def watch(args: Namespace) -> int:
    """Show a job until its verdict; a signal only ends the visit."""
    try:
        return _with_api(args, _watch, Patience.of(args.reconnect_timeout))
    except CorralError as error:
        if not args.compat:
            raise
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return 1


def logs(args: Namespace) -> int:
    return _with_api(args, _logs)


def records(args: Namespace) -> int:
    """Raises ConfigError for a folder that holds something: records never mix."""
    return _with_api(args, _records)


def cancel(args: Namespace) -> int:
    return _with_api(args, _cancel)


def clean_up(args: Namespace) -> int:
    return _with_api(args, _clean_up)


def _with_api(args: Namespace, command: Command, patience: Patience = _SHORT) -> int:
    api = Api(endpoint(args.url, args.insecure), patience)

    async def run() -> int:
        async with api:
            return await command(args, api)

    return asyncio.run(run())


def job_name(text: str) -> str:
    """Raises ConfigError for what is no job's name, before it becomes part of a URL."""
    if not names.JOB_ID.fullmatch(text):
        raise ConfigError(f"{text[:80]!r} is not the name of a job, such as rj-0123456789ab; see `corral jobs`")
    return text


async def _watch(args: Namespace, api: Api) -> int:
    job_id = job_name(args.job)
    writer = Writer()
    ranks = tuple(args.rank) if args.rank else None
    visit = Visit(Wanted(args.types, ranks), args.after_seq, compat=args.compat, result=args.result)
    ci = github.current_run() is not None
    async with screen_for(writer, ci) as screen:
        with Interrupts() as interrupts:
            loop = asyncio.get_running_loop()
            writer.closed = lambda: loop.call_soon_threadsafe(interrupts.leave, signal.SIGPIPE)
            await api.job(job_id)  # a job that is not there is a mistake, not trouble on the way
            return await attend(api, job_id, visit, screen, interrupts)


async def _logs(args: Namespace, api: Api) -> int:
    params = {name: str(value) for name in ("rank", "attempt", "tail") if (value := getattr(args, name)) is not None}
    writer = Writer()
    rest = ""
    async with api.logs(job_name(args.job), params) as answer:
        async for text in answer.aiter_text():
            *lines, rest = (rest + text).split("\n")
            await writer.write([(OUT, "".join(f"{printable(line)}\n" for line in lines))])
    if rest:
        await writer.write([(OUT, f"{printable(rest)}\n")])
    return InfraError.exit_code if writer.failed else 0


async def _records(args: Namespace, api: Api) -> int:
    job, out = job_name(args.job), args.out or Path(args.job)
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} is there already and not an empty folder; name another with --out")
    await fetch(api, job, out, args.attempt)
    print(out)
    return 0


async def _cancel(args: Namespace, api: Api) -> int:
    """All of them, whatever happens with one; then the worst of what happened."""
    worst = 0
    for job in [job_name(text) for text in args.jobs]:
        try:
            view = await api.cancel(job)
            over = f": {view.verdict.status}" if view.verdict else ""
            print(f"{job} {view.state}{over}")
        except CorralError as error:
            print(f"error: {job}: {one_line(str(error))}", file=sys.stderr)
            worst = max(worst, error.exit_code)
    return worst


async def _clean_up(args: Namespace, api: Api) -> int:
    """Ask until nothing is pending. Raises InfraError when something is after `--timeout` seconds."""
    loop = asyncio.get_running_loop()
    until = loop.time() + args.timeout
    told: dict[str, str] = {}
    for pause in api.patience.pauses():
        sweep = await api.clean_up(args.workflow, args.attempt)
        for job in sweep.jobs:
            if told.get(job.job_id) != _said(job):
                told[job.job_id] = _said(job)
                print(f"{job.job_id} {_said(job)}", flush=True)
        if sweep.pending == 0:
            print(f"workflow {args.workflow}: {len(sweep.jobs)} jobs, all gone")
            return 0
        if loop.time() + pause > until:
            break
        await asyncio.sleep(pause)
    raise InfraError(
        f"workflow {args.workflow}: {sweep.pending} of {len(sweep.jobs)} jobs are not gone after {args.timeout:.0f} s; "
        "the service goes on with it; call cleanup again"
    )


def _said(job: Swept) -> str:
    return f"{job.action} ({job.state})"
