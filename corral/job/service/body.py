"""Bodies of requests: counted while they arrive, parsed strictly, described in the OpenAPI document."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.requests import ClientDisconnect

from corral.job.protocol.agent import EndRecord, Heartbeat, Join, LogBatch
from corral.job.protocol.preflight import PreflightReport
from corral.job.protocol.submit import SubmitRequest
from corral.job.service.errors import Refusal, validation_line

MODELS: tuple[type[BaseModel], ...] = (SubmitRequest, LogBatch, Heartbeat, EndRecord, PreflightReport, Join)
SECONDS = 60.0  # for a JSON body to arrive
DRAINED = 8 << 20  # read and dropped after a refusal, so that the client gets to read the answer

M = TypeVar("M", bound=BaseModel)


async def read_model(request: Request, model: type[M], limit: int) -> M:
    """The JSON body as a model. Raises Refusal: 400 no JSON, 408 too slow, 413 over `limit` bytes, 422 does not fit."""
    try:
        async with asyncio.timeout(SECONDS):
            content = b"".join([piece async for piece in pieces(request, limit)])
    except TimeoutError as error:
        raise Refusal(408, f"the body did not arrive within {SECONDS:.0f} s") from error
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        broken = any(problem["type"] == "json_invalid" for problem in error.errors(include_url=False))
        raise Refusal(400 if broken else 422, validation_line(error)) from error


async def pieces(request: Request, limit: int) -> AsyncIterator[bytes]:
    """The body as it arrives. Raises Refusal 413 as soon as more than `limit` bytes are announced or have come, and 400
    when the client goes away in the middle."""
    announced = request.headers.get("content-length", "")
    size = int(announced) if announced.isascii() and announced.isdecimal() else 0
    stream = request.stream()
    try:
        if size <= limit:
            size = 0
            async for piece in stream:
                size += len(piece)
                if size > limit:
                    break
                yield piece
            else:
                return
        await _drain(stream)
    except ClientDisconnect as error:
        raise Refusal(400, "the body ended before its time") from error
    raise Refusal(413, f"the body is over the limit of {limit} bytes", {"Connection": "close"})


async def _drain(stream: AsyncIterator[bytes]) -> None:
    dropped = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(2.0):
            async for piece in stream:
                dropped += len(piece)
                if dropped > DRAINED:
                    return


def described(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads this model."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def components() -> dict[str, Any]:
    """Schemas of all models that `described` refers to."""
    wanted = [(model, "validation") for model in MODELS]
    _, definitions = models_json_schema(wanted, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    return dict(definitions["$defs"])
