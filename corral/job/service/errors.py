"""Refusals: every answer that is not a success is `{"error": "one line"}`."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from corral.errors import ConfigError, InfraError
from corral.job.store.errors import UnknownJob

LONGEST = 600  # characters of a line that an error becomes


class Refusal(Exception):
    """A request that is answered with this status and one line. Say what is wrong, where, the numbers, the fix."""

    def __init__(self, status: int, line: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(line)
        self.status = status
        self.line = line
        self.headers = dict(headers or {})

    def response(self) -> JSONResponse:
        return JSONResponse({"error": one_line(self.line)}, self.status, headers=self.headers)


class ErrorBody(BaseModel):
    """The body of every refusal."""

    error: str


def one_line(text: str) -> str:
    """Printable characters only, white space as single spaces, at most `LONGEST` characters."""
    clean = "".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in text)
    line = " ".join(clean.split())
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."


def validation_line(error: ValidationError | RequestValidationError) -> str:
    """What does not fit, as `field: reason; field: reason`, without the values of the input."""
    found: list[str] = []
    for problem in error.errors()[:5]:
        place = ".".join(str(part)[:80] for part in problem["loc"] if part not in {"query", "path", "header"})
        reason = str(problem["msg"]).removeprefix("Value error, ")
        found.append(f"{place}: {reason}" if place else reason)
    more = len(error.errors()) - len(found)
    return one_line("; ".join(found) + (f"; and {more} more" if more > 0 else ""))


def install(app: FastAPI) -> None:
    """Make the app answer in this form, also for unknown routes and parameters that do not fit."""

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return error.response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        line = f"{request.method} {request.url.path[:80]}: {error.detail}"
        return Refusal(error.status_code, line, error.headers).response()

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return Refusal(422, validation_line(error)).response()

    async def not_now(_: Request, error: Exception) -> Response:
        return Refusal(503, str(error), {"Retry-After": "2"}).response()

    async def cannot(_: Request, error: Exception) -> Response:
        return Refusal(422, str(error)).response()

    async def gone(_: Request, error: Exception) -> Response:
        return Refusal(404, str(error)).response()

    app.add_exception_handler(Refusal, refused)
    app.add_exception_handler(ConfigError, cannot)
    app.add_exception_handler(UnknownJob, gone)
    app.add_exception_handler(InfraError, not_now)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)


def answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI entries of the refusals a route can answer with."""
    return {status: {"model": ErrorBody} for status in sorted({400, 401, 403, 422, *statuses})}
