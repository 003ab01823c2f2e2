"""POST /v1/results: what was measured on a machine without a service becomes a job here."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import ValidationError
from starlette.responses import Response

from cukiln.types import Job
from service.accept_job import require_room
from service.answers import json_response
from service.body import json_body, large_body_bytes
from service.check_results import checked
from service.context import ServiceDep
from service.errors import Refused, refuse
from service.faults import faults_of
from service.jobs import POLL_SECONDS
from service.openapi import BODY_PROBLEMS, problems
from service.result_models import ResultsRequest
from storage.imports import import_results
from storage.jobs import unfinished_jobs
from storage.report_job import job_report
from workers import tickets
from workers.gpu.plan_version import gpu_plan_version

router = APIRouter(prefix="/v1/results", tags=["jobs"])


@router.post(
    "",
    status_code=202,
    response_model=Job,
    responses={
        **problems(*BODY_PROBLEMS, "duplicate-name", "too-many-jobs", "storage-full", "database-unavailable"),
        200: {"model": Job, "description": "These results were imported before"},
    },
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}},
)
def post_results(body: Annotated[bytes, Depends(large_body_bytes)], service: ServiceDep) -> Response:
    """Import the results.json of a stand-alone run. 202 once it is durable: winners are then built and published."""
    value = json_body(body, service.settings.max_json_depth)
    _require_no_nul(body)
    new = checked(_request(value), gpu_plan_version(), service.database.clock.now())
    most = service.settings.max_queued_jobs
    imported = import_results(service.database, new, lambda session: require_room(unfinished_jobs(session), most))
    if service.redis is not None:
        for target in imported.finish:
            tickets.add_tickets(service.redis, "finish", target)
    with service.database.read() as session:
        report = job_report(session, imported.job_id, service.settings.toolchain_live_seconds)
    assert report is not None, "a job that was just written is there"
    headers = {"Location": f"/v1/jobs/{report.job}"}
    if not imported.new:
        return json_response(report, headers=headers)
    return json_response(report, status=202, headers={**headers, "Retry-After": POLL_SECONDS})


def _request(value: Any) -> ResultsRequest:
    if not isinstance(value, dict):
        raise refuse("invalid-value", "The body is not a JSON object.", allowed={"type": "object"})
    try:
        return ResultsRequest.model_validate(value)
    except ValidationError as error:
        raise Refused(faults_of(error, ResultsRequest, value)) from None


def _require_no_nul(body: bytes) -> None:
    """PostgreSQL keeps no text with a NUL in it."""
    if b"\\u0000" in body:
        raise refuse("malformed-json", "A string holds a NUL character. Send text.", allowed="text without NUL")
