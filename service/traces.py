"""GET /v1/jobs/{id}/trace: where a job's time went, for Perfetto and chrome://tracing."""

from __future__ import annotations

import json

from fastapi import APIRouter
from starlette.responses import Response

from service.chrome_trace import chrome_trace
from service.context import ServiceDep
from service.jobs import KnownJob, job_not_found
from service.openapi import problems
from storage.report_trace import job_trace

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.get(
    "/{job}/trace",
    responses={
        **problems("job-not-found", "database-unavailable"),
        200: {
            "content": {"application/json": {"schema": {"type": "object"}}},
            "description": "Chrome's Trace Event Format, as a JSON object",
        },
    },
    response_class=Response,
)
def get_trace(job: KnownJob, service: ServiceDep) -> Response:
    """Who worked on the job, from when to when: a process per worker, its items as slices with a compile's phases
    inside, and what waited meanwhile. Open it in ui.perfetto.dev or chrome://tracing; of a running job it is what is
    known now."""
    with service.database.read() as session:
        trace = job_trace(session, job)
    if trace is None:
        raise job_not_found(job)
    body = json.dumps(chrome_trace(trace), separators=(",", ":"), allow_nan=False).encode()
    return Response(body, media_type="application/json")
