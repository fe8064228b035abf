"""The service itself: is it there, can it work, which one is it, what does it count."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from corral import __version__
from corral.job.protocol.views import Health, Version
from corral.job.service.auth import Anyone, Reader
from corral.job.service.context import service_of
from corral.job.service.errors import ErrorBody, Refusal, answers
from corral.job.service.metrics import MEDIA_TYPE
from corral.job.service.readiness import unready

router = APIRouter(tags=["service"])


@router.get("/healthz", response_model=Health)
async def healthz() -> Health:
    """The process answers."""
    return Health(status="ok")


@router.get("/readyz", response_model=Health, responses={503: {"model": ErrorBody}})
async def readyz(request: Request) -> Health:
    """Jobs can be stored and started."""
    if (why := await unready(service_of(request))) is not None:
        raise Refusal(503, why, {"Retry-After": "2"})
    return Health(status="ready")


@router.get("/version", response_model=Version, responses=answers())
async def version(request: Request, caller: Anyone) -> Version:
    """What runs here."""
    return Version(version=__version__, backend=service_of(request).runner.backend.name)


@router.get("/metrics", response_class=Response, responses=answers() | {200: {"content": {"text/plain": {}}}})
async def metrics(request: Request, caller: Reader) -> Response:
    """Counts for Prometheus."""
    service = service_of(request)
    active = await service.journal.read(service.journal.store.active)
    return Response(service.metrics.render(active, service.watchers.count), media_type=MEDIA_TYPE)
