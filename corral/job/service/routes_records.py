"""What a job left: its run folder and the files about its attempt, as one archive."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from corral.job.agent import records
from corral.job.service.auth import Reader, agent_token, job_for
from corral.job.service.context import service_of
from corral.job.service.errors import Refusal, answers
from corral.job.service.launch import redactor_of

router = APIRouter(prefix="/api/v1/rayjobs/{job_id}", tags=["output"])

MEDIA = "application/gzip"
MIB = 1 << 20


@router.get("/records", response_class=Response, responses=answers(404, 413) | {200: {"content": {MEDIA: {}}}})
async def get_records(
    request: Request,
    caller: Reader,
    job_id: str,
    attempt: Annotated[int | None, Query(ge=1, le=10_000)] = None,
) -> Response:
    """The records of an attempt (the last one): tar.gz of its run folder, with driver.log, end.json and preflight.json.

    Regular files only. Secrets of the job are overwritten with `*`. While the job runs, what is there so far.
    """
    service = service_of(request)
    job = await job_for(caller, job_id, request)
    number = job.attempt if attempt is None else attempt
    folder = service.runner.backend.attempt_dir(replace(job, attempt=number).submission_id)
    size = None if folder is None else await asyncio.to_thread(records.size_of, folder)
    if folder is None or size is None or size.files == 0:
        raise Refusal(404, f"there are no records of attempt {number} of {job.job_id}; it is at attempt {job.attempt}")
    limit = service.settings.limits.records
    if size.bytes > limit or size.files > records.MOST_FILES:
        raise Refusal(
            413,
            f"the records of {job.job_id} are {size.files} files with {size.bytes // MIB} MiB, the limit is "
            f"{records.MOST_FILES} files with {limit // MIB} MiB; let the job leave less in CORRAL_RUN_DIR",
        )
    redactor = None
    if job.request.secrets:
        token = agent_token(service.agent_key, job.job_id)
        redactor = await asyncio.to_thread(redactor_of, job, folder, service.settings, token)
    return StreamingResponse(records.pack(folder, redactor), media_type=MEDIA, headers={"Cache-Control": "no-store"})
