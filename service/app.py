"""The HTTP application: every route, behind the gate."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI

from service import (
    blobs,
    bundles,
    candidates,
    catalogue,
    docs_page,
    events,
    groups,
    handle_errors,
    health,
    jobs,
    kernels,
    lookups,
    openapi,
    pages,
    results,
    static_files,
    timeline,
    traces,
)
from service.auth import Gate
from service.context import Service
from service.head import HeadAsGet
from service.parameters import known_parameters
from storage.settings import Settings

DESCRIPTION = (
    "Operator schedules in, verified and ranked CUDA kernels out. Errors are application/problem+json with a stable "
    "`type`, the field at fault and what is allowed."
)
ROUTERS = (
    *(jobs, events, timeline, traces, candidates, bundles, results, groups, lookups, kernels, blobs, catalogue),
    *(health, docs_page, pages, static_files),
)


def create_app(settings: Settings, open_service: Callable[[Settings], Service] = Service.open) -> FastAPI:
    """The application. It opens the database, the blobs and Redis when it starts and closes them when it stops."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = open_service(settings)
        app.state.service = service
        try:
            yield
        finally:
            service.close()

    app = FastAPI(
        title="cukiln",
        version="1",
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from a CDN
        redoc_url=None,
        dependencies=[Depends(known_parameters)],
        redirect_slashes=False,  # a redirect would drop the body, and tell a path from its neighbour
    )
    for module in ROUTERS:
        app.include_router(module.router)
    handle_errors.install(app, [route for module in ROUTERS for route in module.router.routes])
    key = settings.api_key.get_secret_value() if settings.api_key else None
    app.add_middleware(HeadAsGet)
    app.add_middleware(Gate, api_key=key)
    app.openapi = lambda: openapi.document(app)  # type: ignore[method-assign]
    return app
