"""The HTTP application: every route, behind the key check."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from fastapi import Depends, FastAPI

from cukiln.types import Job
from service import openapi
from service.auth import Gate, may_call
from service.context import Service
from service.http import handle_errors, request_ids
from service.http.compressed import CompressJson
from service.http.head import HeadAsGet
from service.http.parameters import known_parameters
from service.http.turns import Turns
from service.pages import pages
from service.routes import (
    blobs,
    bundles,
    by_id,
    catalogue,
    events,
    groups,
    health,
    jobs,
    results,
    traces,
    winners,
)
from service.routes.accept_job import Submission, accept_jobs
from service.threads import Together
from storage.config.settings import Settings

DESCRIPTION = (
    "Operator schedules in, verified and ranked CUDA kernels out. Errors are application/problem+json with a stable "
    "`type`, the field at fault and what is allowed."
)
MOST_SUBMISSIONS = 1000
ROUTERS = (
    *(jobs, events, traces, by_id, bundles, results),
    *(groups, winners, blobs, catalogue),
    *(health, pages),
)


def create_app(settings: Settings, open_service: Callable[[Settings], Service] = Service.open) -> FastAPI:
    """The application. It opens the database, the blobs and Redis when it starts and closes them when it stops."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = open_service(settings)
        accept = partial(accept_jobs, service)
        submissions = Together[Submission, Job]("submissions", accept, MOST_SUBMISSIONS)
        app.state.service, app.state.submissions, app.state.event_turns = service, submissions, Turns()
        app.state.reports = asyncio.Semaphore(jobs.REPORTS_AT_ONCE)
        try:
            yield
        finally:
            submissions.close()
            service.close()

    app = FastAPI(
        title="cukiln",
        version="1",
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from a CDN
        redoc_url=None,
        dependencies=[Depends(may_call), Depends(known_parameters)],
        redirect_slashes=False,  # a redirect would drop the body, and reveal which paths exist
    )
    for module in ROUTERS:
        app.include_router(module.router)
    app.router.routes.insert(0, winners.DIRECT)
    handle_errors.install(app, [route for module in ROUTERS for route in module.router.routes])
    app.add_middleware(HeadAsGet)
    app.add_middleware(CompressJson)
    app.add_middleware(Gate)
    request_ids.install(app)
    app.openapi = lambda: openapi.document(app)  # type: ignore[method-assign]
    return app
