"""For agents on nodes that do not see the service's disk: what they need before they start, and what they leave."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import FileResponse, Response

from corral import __version__
from corral.errors import ConfigError, InfraError
from corral.job.backends import folder as files
from corral.job.core.record import JobRecord
from corral.job.protocol.agent import PROTOCOL, Join, Joined, misfit
from corral.job.protocol.states import JobState
from corral.job.service import received
from corral.job.service.auth import AgentOf
from corral.job.service.body import described, pieces, read_model
from corral.job.service.context import Service, service_of
from corral.job.service.errors import Refusal, answers
from corral.job.service.routes_agent import present_job
from corral.job.service.threads import in_threads

router = APIRouter(prefix="/api/v1/agent/{job_id}", tags=["agent"])

MEDIA = "application/gzip"
MAX_JOIN = 4096
SECONDS = 600.0  # for records to arrive

Attempt = Annotated[int, Query(ge=1, le=10_000)]

log = logging.getLogger("corral.service.join")


@router.post("/join", response_model=Joined, responses=answers(404, 409, 410, 413, 503), openapi_extra=described(Join))
async def join(request: Request, job_id: AgentOf) -> Joined:
    """The secrets of the job, for the agent of its present attempt, until that one was heard for the first time."""
    service = service_of(request)
    asked = await read_model(request, Join, MAX_JOIN)
    job = await _running(service, job_id, asked.attempt)
    if asked.protocol != PROTOCOL:
        raise Refusal(409, misfit(asked.version, asked.protocol, __version__, PROTOCOL))
    if job.state is not JobState.PROVISIONING:
        raise Refusal(410, f"an agent of attempt {job.attempt} of {job_id} was heard before; there is no second one")
    folder = files.attempt_folder(service.settings.data_dir, job_id, job.attempt)
    spec = await asyncio.to_thread(files.read_spec, folder)
    if spec is None:
        raise Refusal(503, f"attempt {job.attempt} of {job_id} is not prepared yet")
    facts = {"job": job_id, "attempt": job.attempt, "secrets": sorted(spec.secrets), "version": asked.version}
    log.info("an agent joins", extra=facts)
    return Joined(secrets=spec.secrets)


@router.get("/bundle", response_class=Response, responses=answers(404, 410) | {200: {"content": {MEDIA: {}}}})
async def bundle(request: Request, job_id: AgentOf, attempt: Attempt) -> Response:
    """The source of the job, a gzip-compressed tar archive."""
    service = service_of(request)
    job = await _running(service, job_id, attempt)
    digest = job.request.bundle
    if digest is None or not await asyncio.to_thread(service.bundles.has, digest):
        raise Refusal(404, f"{job_id} has no source here")
    return FileResponse(service.bundles.path(digest), media_type=MEDIA)


@router.put(
    "/records",
    status_code=204,
    responses=answers(404, 408, 409, 410, 413, 503),
    openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {}}}}},
)
async def put_records(request: Request, job_id: AgentOf, attempt: Attempt) -> Response:
    """What the command left in its run folder, with the files about the attempt: an archive as `GET …/records` gives
    it. Kept whole or not at all; what is sent again replaces what was sent before."""
    service = service_of(request)
    job = await _running(service, job_id, attempt)
    if not service.runner.backend.remote:
        raise Refusal(409, "the agents of this backend write their records where the service reads them")
    folder = files.attempt_folder(service.settings.data_dir, job_id, job.attempt)
    limit = service.settings.limits.records
    await asyncio.to_thread(files.make, folder)
    try:
        async with asyncio.timeout(SECONDS), in_threads(received.upload(folder, limit)) as upload:
            async for piece in pieces(request, limit):
                await asyncio.to_thread(upload.write, piece)
            await asyncio.to_thread(upload.unpack, folder)
    except TimeoutError as error:
        raise Refusal(408, f"the records did not arrive within {SECONDS:.0f} s") from error
    except ConfigError as error:
        raise Refusal(422, str(error)) from error
    except OSError as error:
        raise InfraError(f"cannot keep the records of {job_id}: {error.strerror}") from error
    log.info("records are kept", extra={"job": job_id, "attempt": job.attempt})
    return Response(status_code=204)


async def _running(service: Service, job_id: str, attempt: int) -> JobRecord:
    """Raises Refusal: 404, 410 also for a job that is over."""
    job = await present_job(service, job_id, attempt)
    if job.terminal:
        raise Refusal(410, f"job {job_id} is over")
    return job
