"""What agents say. Their token opens the routes of their own job only."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from corral.job.core.record import JobRecord
from corral.job.protocol.agent import EndRecord, Heartbeat, LogBatch, Orders, Watermarks
from corral.job.protocol.preflight import PreflightReport
from corral.job.service.auth import AgentOf
from corral.job.service.body import described, read_model
from corral.job.service.context import Service, service_of
from corral.job.service.errors import Refusal, answers
from corral.job.service.ingest import MAX_BODY, MAX_REPORT, check_batch, keep_report
from corral.job.store.errors import Ended, Misfit

router = APIRouter(prefix="/api/v1/agent/{job_id}", tags=["agent"])

_MISFIT: dict[int | str, dict[str, Any]] = {
    409: {"model": Watermarks, "description": "A chunk does not begin where the stored bytes end"}
}


@router.post(
    "/logs",
    response_model=Watermarks,
    responses={**answers(404, 410, 413), **_MISFIT},
    openapi_extra=described(LogBatch),
)
async def store_lines(request: Request, job_id: AgentOf) -> Watermarks | Response:
    """Store lines: all of the batch or, when a chunk does not fit, none of it."""
    service = service_of(request)
    batch = await read_model(request, LogBatch, MAX_BODY)
    check_batch(batch)
    await present_job(service, job_id, batch.attempt)
    try:
        marks = await service.journal.write(service.journal.store.append_logs, job_id, batch)
    except Misfit as error:
        return JSONResponse({"watermarks": error.watermarks}, 409)
    except Ended as error:
        raise Refusal(410, f"job {job_id} is over; nothing more is stored of it") from error
    service.metrics.lines.inc(sum(len(chunk.lines) for chunk in batch.chunks))
    service.metrics.bytes.inc(sum(chunk.end - chunk.start for chunk in batch.chunks))
    return Watermarks(watermarks=marks)


@router.get("/watermarks", response_model=Watermarks, responses=answers(404))
async def watermarks(request: Request, job_id: AgentOf, attempt: Annotated[int, Query(ge=1, le=10_000)]) -> Watermarks:
    """How much of each source is stored."""
    service = service_of(request)
    await present_job(service, job_id, attempt)
    marks = await service.journal.read(service.journal.store.watermarks, job_id, attempt)
    return Watermarks(watermarks=marks)


@router.post("/heartbeat", response_model=Orders, responses=answers(404, 410, 413), openapi_extra=described(Heartbeat))
async def heartbeat(request: Request, job_id: AgentOf) -> Orders:
    """The agent is alive; the answer says whether it has to stop its command."""
    service = service_of(request)
    heard = await read_model(request, Heartbeat, MAX_BODY)
    await present_job(service, job_id, heard.attempt)
    return await service.runner.heartbeat(job_id, heard)


@router.post("/preflight", status_code=204, responses=answers(404, 410, 413), openapi_extra=described(PreflightReport))
async def preflight(request: Request, job_id: AgentOf) -> Response:
    """What the checks of the nodes found; the first report of an attempt is kept."""
    service = service_of(request)
    report = await read_model(request, PreflightReport, MAX_REPORT)
    await present_job(service, job_id, report.attempt)
    try:
        await service.journal.write(keep_report, job_id, report, service.journal.store)
    except Ended as error:
        raise Refusal(410, f"job {job_id} is over; nothing more is stored of it") from error
    return Response(status_code=204)


@router.post("/end", status_code=204, responses=answers(404, 410, 413, 503), openapi_extra=described(EndRecord))
async def end(request: Request, job_id: AgentOf) -> Response:
    """How the command ended."""
    service = service_of(request)
    record = await read_model(request, EndRecord, MAX_BODY)
    if record.job_id != job_id or not record.is_whole():
        raise Refusal(422, "the end record is of another job, or its digest does not fit its content")
    await present_job(service, job_id, record.attempt)
    await service.runner.end(job_id, record)
    return Response(status_code=204)


async def present_job(service: Service, job_id: str, attempt: int) -> JobRecord:
    """Raises Refusal: 404 for a job that is unknown, 410 for an attempt that is not its present one."""
    job = await service.journal.read(service.journal.store.get, job_id)
    if job is None:
        raise Refusal(404, f"no job {job_id}")
    if attempt != job.attempt:
        raise Refusal(410, f"attempt {attempt} of {job_id} is over; it is at attempt {job.attempt}")
    return job
