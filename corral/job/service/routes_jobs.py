"""Jobs: submit, list, show, cancel, renew, and clean up a workflow."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import AfterValidator

from corral.job.core import naming
from corral.job.core.admission import never_fits, resources_of
from corral.job.core.record import JobRecord
from corral.job.protocol import names
from corral.job.protocol.states import JobState
from corral.job.protocol.submit import SubmitRequest, Submitted
from corral.job.protocol.views import DryRun, JobList, JobView, LeaseView, QueueView, Sweep, Swept
from corral.job.service.auth import Caller, Canceller, Reader, Submitter, job_for
from corral.job.service.body import described, read_model
from corral.job.service.context import Service, service_of
from corral.job.service.errors import Refusal, answers
from corral.job.service.launch import placement_of
from corral.job.service.submission import check_script, check_secrets, node_profile, resolve_command, with_defaults
from corral.job.service.views import in_order, queue, view
from corral.job.store.errors import KeyConflict

router = APIRouter(prefix="/api/v1", tags=["jobs"])


def _shaped(pattern: re.Pattern[str]) -> AfterValidator:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"does not match {pattern.pattern}")
        return text

    return AfterValidator(check)


Repository = Annotated[Annotated[str, _shaped(names.REPOSITORY)] | None, Query(max_length=201)]
RunId = Annotated[Annotated[str, _shaped(names.RUN_ID)] | None, Query(max_length=64)]
Attempt = Annotated[int | None, Query(ge=1, le=10_000)]


@router.post(
    "/rayjobs",
    status_code=201,
    response_model=Submitted | DryRun,
    openapi_extra=described(SubmitRequest),
    responses=answers(409, 413, 429) | {200: {"model": Submitted | DryRun, "description": "It was there already"}},
)
async def submit(
    request: Request,
    response: Response,
    caller: Submitter,
    idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
) -> Submitted | DryRun:
    """Submit a job. The same idempotency key with the same content is the same job (200); with other content, 409."""
    service = service_of(request)
    asked = await read_model(request, SubmitRequest, service.settings.limits.body)
    if not caller.may_touch(asked.repository):
        raise Refusal(403, f"token {caller.name} may not submit for repository {asked.repository}")
    key = naming.idempotency_key(asked, idempotency_key)
    nodes = await asyncio.to_thread(node_profile, asked, service.settings)
    asked = with_defaults(asked, service.settings.profile, nodes)
    job_id = naming.job_id(caller.name, key)
    request.state.job_id = job_id
    known = await service.journal.read(service.journal.store.get, job_id)
    if known is None:
        answer = await _checked(service, asked, job_id)
    else:
        if known.digest != asked.digest():
            raise _conflict(job_id)
        answer = _known(known)
    if asked.dry_run:
        response.status_code = 200
        return answer
    try:
        create = service.journal.store.create
        job, created = await service.journal.write(create, asked, key=key, owner=caller.name, job_id=job_id)
    except KeyConflict as error:
        raise _conflict(job_id) from error
    service.runner.wake()
    response.status_code = 201 if created else 200
    return Submitted(job_id=job.job_id, state=job.state.value, created=created, notices=answer.notices)


async def _checked(service: Service, asked: SubmitRequest, job_id: str) -> DryRun:
    """What would become of a new job. Raises Refusal for what can be known to fail."""
    capacity, limits = service.runner.backend.capacity, service.settings.limits
    if problem := never_fits(asked, capacity, limits.active_devices_per_repository):
        raise Refusal(422, problem)
    backend, resources, placement = service.runner.backend, resources_of(asked), placement_of(asked)
    if problem := backend.refusal(resources, placement):
        raise Refusal(422, problem)
    check_secrets(asked.secrets, service.settings)
    resolved = resolve_command(asked, service.settings)
    files = None
    if asked.bundle is not None:
        digest = asked.bundle
        if not await asyncio.to_thread(service.bundles.has, digest):
            raise Refusal(422, f"bundle {digest} is not here; upload it first: PUT /api/v1/bundles/{digest}")
        files = await asyncio.to_thread(service.bundles.members, digest)
    notices = await asyncio.to_thread(check_script, resolved, files)
    active = await service.journal.read(service.journal.store.count_active)
    if active >= limits.queued:
        raise Refusal(429, f"{active} jobs are waiting or running, the limit of this service", {"Retry-After": "30"})
    assert asked.resources is not None
    return DryRun(
        job_id=job_id,
        state="NEW",
        created=True,
        command=resolved.command,
        cwd=resolved.cwd,
        resources=asked.resources,
        ahead=await _ahead(service, asked.priority) if asked.dry_run else 0,
        notices=list(notices),
        manifest=backend.manifest(f"{job_id}-a1", resources, placement) if asked.dry_run else None,
    )


async def _ahead(service: Service, priority: int) -> int:
    active = await service.journal.read(service.journal.store.active)
    return sum(job.request.priority >= priority for job in in_order(active))


def _known(job: JobRecord) -> DryRun:
    return DryRun(
        job_id=job.job_id,
        state=job.state.value,
        created=False,
        command=view(job).command,
        cwd="",
        resources=resources_of(job.request),
        ahead=0,
        notices=[],
    )


def _conflict(job_id: str) -> Refusal:
    fix = "give this one another --name, or key"
    return Refusal(409, f"the idempotency key belongs to job {job_id}, which was asked for with other content; {fix}")


@router.get("/rayjobs", response_model=JobList, responses=answers())
async def list_jobs(
    request: Request,
    caller: Reader,
    state: JobState | None = None,
    repository: Repository = None,
    run_id: RunId = None,
    run_attempt: Attempt = None,
    label: Annotated[str | None, Query(pattern=r"^[A-Za-z0-9._/-]{1,63}(=[ -~]{0,256})?$")] = None,
    after: Annotated[str | None, Query(pattern=f"^{names.JOB_ID.pattern}$")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> JobList:
    """Jobs, newest first. label: `name` or `name=value`. after: `next` of the page before."""
    journal = service_of(request).journal
    found: list[JobRecord] = []
    while True:
        page = await journal.read(
            journal.store.jobs,
            state=state,
            repository=repository,
            run_id=run_id,
            run_attempt=run_attempt,
            label=label,
            after=after,
            limit=limit,
        )
        visible = [job for job in page if caller.may_touch(job.request.repository)]
        found += visible[: limit - len(found)]
        if len(page) < limit or len(found) == limit:
            break
        after = page[-1].job_id
    more = found[-1].job_id if len(found) == limit else None
    return JobList(jobs=[view(job) for job in found], next=more)


@router.get("/rayjobs/{job_id}", response_model=JobView, responses=answers(404))
async def show(request: Request, caller: Reader, job_id: str) -> JobView:
    """One job."""
    return view(await job_for(caller, job_id, request))


@router.post("/rayjobs/{job_id}/cancel", response_model=JobView, responses=answers(404))
async def cancel(request: Request, caller: Canceller, job_id: str) -> JobView:
    """Ask for the end of a job. Asking again, or after its end, changes nothing."""
    service = service_of(request)
    job = await job_for(caller, job_id, request)
    job = await service.journal.write(service.journal.store.request_cancel, job.job_id, "cancelled_by_user")
    service.runner.wake()
    return view(job)


@router.post("/rayjobs/{job_id}/heartbeat", response_model=LeaseView, responses=answers(404))
async def heartbeat(request: Request, caller: Submitter, job_id: str) -> LeaseView:
    """A client still wants the job: its lease starts anew."""
    service = service_of(request)
    job = await job_for(caller, job_id, request)
    if not job.terminal and job.request.lease is not None:
        job = await service.journal.write(service.journal.store.renew_lease, job.job_id)
    return LeaseView(job_id=job.job_id, state=job.state, lease_until=job.lease_until)


@router.delete("/workflows/{run_id}", response_model=Sweep, responses=answers())
async def clean_up(
    request: Request, caller: Canceller, run_id: str, attempt: Attempt = None, repository: Repository = None
) -> Sweep:
    """Cancel the caller's jobs of a workflow run that are not over. Repeat it until nothing is pending."""
    service = service_of(request)
    if not names.RUN_ID.fullmatch(run_id):
        raise Refusal(422, f"run id {run_id[:80]!r} does not match {names.RUN_ID.pattern}")
    swept = [await _sweep(service, job) for job in await _workflow(service, caller, run_id, attempt, repository)]
    service.runner.wake()
    pending = sum(job.action == "cancelling" for job in swept)
    return Sweep(run_id=run_id, attempt=attempt, jobs=swept, pending=pending)


async def _workflow(
    service: Service, caller: Caller, run_id: str, attempt: int | None, repository: str | None
) -> list[JobRecord]:
    found: list[JobRecord] = []
    after = None
    while True:
        page = await service.journal.read(
            service.journal.store.jobs,
            repository=repository,
            run_id=run_id,
            run_attempt=attempt,
            after=after,
            limit=1000,
        )
        found += [job for job in page if caller.owns(job)]
        if len(page) < 1000:
            return found
        after = page[-1].job_id


async def _sweep(service: Service, job: JobRecord) -> Swept:
    if job.terminal:
        return Swept(job_id=job.job_id, state=job.state, action="already_over")
    job = await service.journal.write(service.journal.store.request_cancel, job.job_id, "cleaned_up")
    return Swept(job_id=job.job_id, state=job.state, action="already_over" if job.terminal else "cancelling")


@router.get("/queue", response_model=QueueView, responses=answers())
async def show_queue(request: Request, caller: Reader) -> QueueView:
    """What waits, in order, and how much is held."""
    service = service_of(request)
    active = await service.journal.read(service.journal.store.active)
    shown = queue(active, service.runner.backend.capacity, service.settings, service.clock.now())
    mine = [job for job in shown.waiting if caller.may_touch(job.repository)]
    return shown.model_copy(update={"waiting": mine})
