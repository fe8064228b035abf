"""The HTTP app: routes around a `Service`, nothing that starts or stops by itself."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from corral.job.service import (
    errors,
    routes_about,
    routes_agent,
    routes_bundles,
    routes_jobs,
    routes_join,
    routes_records,
    routes_watch,
)
from corral.job.service.body import components
from corral.job.service.context import Service
from corral.job.service.gate import Gate, host_name

PROTOCOL = "1"
_ROUTERS = (routes_about, routes_jobs, routes_watch, routes_records, routes_bundles, routes_agent, routes_join)
_OPEN = ("/healthz", "/readyz")


def create_app(service: Service) -> FastAPI:
    """All routes. The caller starts what is in `service`, and ends it: `service.watchers.stop()` first."""
    app = _routes()
    app.state.service = service
    app.add_middleware(Gate, allowed_hosts=_allowed_hosts(service), observe=service.metrics.observe_request)
    return app


def openapi() -> dict[str, Any]:
    """The OpenAPI document, a function of the code alone (docs/openapi.json is its committed form)."""
    app = _routes()
    document = get_openapi(
        title="Corral job service",
        version=PROTOCOL,
        description="Submit a job, follow it, trust its verdict. Times are Unix seconds. Every refusal is "
        '`{"error": "one line"}`. Without a token file the service answers on loopback only and asks for no token.',
        routes=app.routes,
    )
    parts = document.setdefault("components", {})
    parts["schemas"] = dict(sorted((parts.get("schemas", {}) | components()).items()))
    parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["security"] = [] if path in _OPEN else [{"token": []}]
    return document


def _routes() -> FastAPI:
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    errors.install(app)
    for module in _ROUTERS:
        app.include_router(module.router)
    return app


def _allowed_hosts(service: Service) -> frozenset[str] | None:
    if service.tokens is not None:
        return None
    return frozenset({service.settings.host.lower(), host_name(service.settings.url.partition("://")[2])})
