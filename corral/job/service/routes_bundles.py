"""Sources: uploaded once under their SHA-256, then named by it."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from corral.job.protocol import names
from corral.job.service.auth import Submitter
from corral.job.service.body import pieces
from corral.job.service.context import service_of
from corral.job.service.errors import Refusal, answers
from corral.job.service.threads import in_threads

router = APIRouter(prefix="/api/v1/bundles", tags=["bundles"])

SECONDS = 600.0  # for a bundle to arrive

Digest = Annotated[str, Path(pattern=f"^{names.DIGEST.pattern}$")]


@router.head("/{digest}", response_class=Response, responses=answers(404))
async def has(request: Request, caller: Submitter, digest: Digest) -> Response:
    """Whether a source is here."""
    there = await asyncio.to_thread(service_of(request).bundles.has, digest)
    return Response(status_code=200 if there else 404)


@router.put(
    "/{digest}",
    response_class=Response,
    responses=answers(408, 413, 503) | {200: {"description": "It was here"}, 201: {"description": "Stored"}},
    openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {}}}}},
)
async def put(request: Request, caller: Submitter, digest: Digest) -> Response:
    """Store a gzip-compressed tar archive under its hex SHA-256."""
    service = service_of(request)
    limit = service.settings.limits.bundle
    if await asyncio.to_thread(service.bundles.has, digest):
        async for _ in pieces(request, limit):
            pass
        return Response(status_code=200)
    try:
        async with asyncio.timeout(SECONDS), in_threads(service.bundles.receive(digest)) as upload:
            async for piece in pieces(request, limit):
                await asyncio.to_thread(upload.write, piece)
    except TimeoutError as error:
        raise Refusal(408, f"the bundle did not arrive within {SECONDS:.0f} s") from error
    return Response(status_code=201)
