"""`corral submit`: send the source, start the job, stay until its verdict."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import secrets
import shlex
import sys
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from corral.errors import ConfigError, CorralError
from corral.job.client import github
from corral.job.client.api import Api, Patience
from corral.job.client.attend import Visit, attend, screen_for
from corral.job.client.bundle import Bundle, packed
from corral.job.client.endpoint import endpoint
from corral.job.client.files import Listing, git_head, list_files, source_root
from corral.job.client.interrupts import Interrupts
from corral.job.client.nodes import as_asked, check_output, nodes_of
from corral.job.client.show import Writer
from corral.job.client.text import one_line
from corral.job.client.watch import Wanted
from corral.job.protocol.submit import SubmitRequest, Submitted, Timeouts

_PACKED_LATER = "0" * 64  # stands for the digest while everything else of a request is checked
PREFLIGHT = 120.0  # seconds the checks of the nodes may take
_SCRIPTS = (".sh", ".bash", ".py")
_AFTER_SIGNAL = 2.0  # seconds that an answer to the submission may still take


def run(args: Namespace) -> int:
    """The exit code; with --compat 0 or 1 whatever happens, but for signals."""
    try:
        return _run(args)
    except CorralError as error:
        if not args.compat:
            raise
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return 1


def _run(args: Namespace) -> int:
    check_output(args)
    where = endpoint(args.url, args.insecure)
    workflow = github.current_run()
    source = None if args.no_source else list_files(source_root(args.source))
    entry = entry_of(args.words, source)
    request = request_of(args, workflow, source, entry)
    with ExitStack() as stack:
        bundle = None
        if source is not None:
            bundle = stack.enter_context(packed(source))
            request = request.model_copy(update={"bundle": bundle.digest})
        key = idempotency_key(request, workflow)
        patience = Patience.of(args.reconnect_timeout)
        return asyncio.run(_submit(args, Api(where, patience), request, key, bundle, source, workflow is not None))


@dataclass(frozen=True)
class Entry:
    """What runs: a script of the source (or under a root of the service), or a command in the root of the source."""

    script: str | None
    command: list[str] | None
    args: list[str]

    @property
    def name(self) -> str:
        """A name for the job: of its script, else "job"."""
        stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(self.script or "").stem)
        return stem[:63].strip("-_.") or "job"


def entry_of(words: list[str], source: Listing | None) -> Entry:
    """Raises ConfigError for a script that is missing, so that nothing is uploaded in vain."""
    if not words:
        raise ConfigError("nothing to run; name a script or command after --, as in `corral submit -- train.sh`")
    first, rest = words[0], words[1:]
    if source is None:
        return Entry(first, None, rest)
    full = Path(first).absolute()
    inside = full.resolve().is_relative_to(source.root)
    looks_like_one = "/" in first or first.endswith(_SCRIPTS)
    if full.is_file() and inside:
        path = (full.parent.resolve() / full.name).relative_to(source.root).as_posix()
        if path not in source.paths:
            why = "git ignores it" if source.in_git else "hidden files are left out"
            raise ConfigError(f"script {first} is not part of the source: {why}; `git add -f {path}`, or --source DIR")
        return Entry(path, None, rest)
    if first in source.paths:
        return Entry(first, None, rest)
    if full.is_file() and looks_like_one:
        raise ConfigError(f"script {first} lies outside the source {source.root}; give --source, or --no-source")
    if looks_like_one:
        raise ConfigError(
            f"script {first} does not exist, neither here nor in the source {source.root}{_near(first, source)}"
        )
    return Entry(None, words, [])


def _near(script: str, source: Listing) -> str:
    name = Path(script).name
    found = [path for path in source.paths if Path(path).name == name][:3]
    return f"; did you mean {', '.join(found)}?" if found else ""


def request_of(args: Namespace, workflow: github.Run | None, source: Listing | None, entry: Entry) -> SubmitRequest:
    """Only what was asked for is set, so that the service's defaults hold for the rest. Raises ConfigError."""
    fields: dict[str, Any] = {"name_suffix": args.name or entry.name, "args": entry.args}
    fields |= {"script": entry.script} if entry.script is not None else {"command": entry.command}
    if source is not None:
        fields["bundle"] = _PACKED_LATER
        if head := git_head(source.root):
            fields |= {"commit_sha": head[0], "branch": head[1]}
    if workflow is not None:
        fields |= {
            "repository": workflow.repository,
            "commit_sha": workflow.commit_sha,
            "branch": workflow.branch,
            "github_run_id": workflow.run_id,
            "github_run_attempt": workflow.run_attempt,
        }
        if not args.detach:
            fields["lease"] = github.LEASE
    fields |= nodes_of(args)
    limits = {kind: getattr(args, f"timeout_{kind}") for kind in Timeouts.model_fields}
    timeouts = {kind: None if limit == math.inf else limit for kind, limit in limits.items() if limit is not None}
    given = {
        "repository": args.repository,
        "image": args.image,
        "priority": args.priority,
        "lease": args.lease,
        "timeouts": timeouts,
        "retry": None if args.retry_infra is None else {"infra": args.retry_infra},
        "env": pairs(args.env, "--env"),
        "labels": pairs(args.label, "--label"),
        "secrets": args.secret,
        "preflight": _preflight(args),
    }
    fields |= {name: value for name, value in given.items() if value not in (None, {}, [])}
    try:
        return SubmitRequest.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(_problems(error)) from None


def _preflight(args: Namespace) -> dict[str, Any] | None:
    """Raises ConfigError for needs that nobody would look at."""
    if args.need and not args.preflight:
        raise ConfigError(f"--need {args.need[0]} is looked at by the checks of --preflight; give that too")
    if not args.preflight:
        return None
    return {"paths": args.need, "timeout": PREFLIGHT}


def pairs(texts: list[str], option: str) -> dict[str, str]:
    """NAME=VALUE options as a mapping. Raises ConfigError, which never repeats a value."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option} {name[:40]!r} has no value; write {option} NAME=VALUE")
        found[name] = value
    return found


def idempotency_key(request: SubmitRequest, workflow: github.Run | None) -> str:
    """Random for a person: each call is a job of its own. In CI a function of the run, its attempt, the workflow's job
    and the name, so that a step that is started again finds the job it started before."""
    if workflow is None:
        return secrets.token_hex(20)
    parts = (workflow.repository, workflow.run_id, str(workflow.run_attempt), workflow.job, request.name_suffix)
    return f"ci-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:40]}"


async def _submit(
    args: Namespace, api: Api, request: SubmitRequest, key: str, bundle: Bundle | None, source: Listing | None, ci: bool
) -> int:
    async with api, screen_for(Writer(), ci, bundle.members if bundle else frozenset()) as screen:
        for notice in source.notices if source else ():
            screen.note(notice)
        if bundle is not None and not await api.has_bundle(bundle.digest):
            screen.note(f"sending {len(bundle.members)} files, {bundle.size / (1 << 20):.1f} MiB")
            await api.put_bundle(bundle)
        if args.dry_run:
            answer = await api.dry_run(request, key)
            nodes, devices = answer.resources.nodes, answer.resources.accelerators_per_node
            for notice in answer.notices:
                screen.note(notice)
            screen.note(f"{answer.ahead} jobs ahead, {nodes} nodes with {devices} devices each; nothing was started")
            if args.output is not None:
                await screen.print(as_asked(answer.manifest, args.output))
            else:
                await screen.print(f"would run: {shlex.join(answer.command)}")
            return 0
        with Interrupts() as interrupts:
            job = await post(api, request, key, interrupts)
            if job is None:
                assert interrupts.first is not None
                screen.note("left before the service answered; the job may exist: see `corral jobs`")
                return 128 + interrupts.first
            for notice in job.notices:
                screen.note(notice)
            screen.submitted(job.job_id, api.job_url(job.job_id))
            if args.detach:
                await screen.print(job.job_id)
                return 0
            visit = Visit(
                Wanted(types=args.types), cancels=True, lease=request.lease, compat=args.compat, result=args.result
            )
            return await attend(api, job.job_id, visit, screen, interrupts)


async def post(api: Api, request: SubmitRequest, key: str, interrupts: Interrupts) -> Submitted | None:
    """Submit. None: a signal came, and no answer soon after it; with an answer the job can be cancelled by its name."""
    posting = asyncio.create_task(api.submit(request, key))
    signalled = asyncio.create_task(interrupts.wait())
    await asyncio.wait({posting, signalled}, return_when=asyncio.FIRST_COMPLETED)
    if not posting.done():
        await asyncio.wait({posting}, timeout=_AFTER_SIGNAL)
    signalled.cancel()
    if posting.done():
        return posting.result()
    posting.cancel()
    await asyncio.gather(posting, return_exceptions=True)
    return None


def _problems(error: ValidationError) -> str:
    """What does not fit, as `field: reason; ...`, without values: they may be secret."""
    found = []
    for problem in error.errors(include_url=False, include_input=False):
        place = ".".join(map(str, problem["loc"]))
        what = str(problem["msg"]).removeprefix("Value error, ")
        found.append(f"{place}: {what}" if place else what)
    return "; ".join(found)
