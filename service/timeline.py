"""GET /v1/jobs/{id}/timeline: a job's work on a time axis."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from cukiln.types import Timeline
from service.answers import json_response
from service.context import ServiceDep
from service.jobs import KnownJob, job_not_found
from service.openapi import problems
from storage.timeline import timeline

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.get("/{job}/timeline", response_model=Timeline, responses=problems("job-not-found", "database-unavailable"))
def get_timeline(job: KnownJob, service: ServiceDep) -> Response:
    """When each group and each problem of the job waited, was compiled, verified, measured, finished."""
    with service.database.read() as session:
        found = timeline(session, job)
    if found is None:
        raise job_not_found(job)
    return json_response(found)
