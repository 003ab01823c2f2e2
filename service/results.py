"""POST /v1/results: what was measured on a machine without a service becomes a job here."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from cukiln.types import Job
from service.accept_job import require_room
from service.answers import json_response
from service.auth import caller_of, needs
from service.body import Body, json_body
from service.check_results import checked
from service.context import ServiceDep
from service.errors import Refused, refuse
from service.faults import faults_of
from service.jobs import POLL_SECONDS
from service.openapi import BODY_PROBLEMS, body_of, problems
from service.result_models import ResultsRequest
from storage.database import Session
from storage.imports import Importer, import_results, imported_classes
from storage.jobs import unfinished_jobs
from storage.report_job import job_report
from workers import tickets
from workers.gpu.plan_version import gpu_plan_version

MOST_CLASSES = 64
"""Device classes that imports name. A lookup that names none tries a few of them."""

router = APIRouter(prefix="/v1/results", tags=["jobs"])


@router.post(
    "",
    status_code=202,
    response_model=Job,
    responses={
        **problems(
            *BODY_PROBLEMS,
            "duplicate-name",
            "import-withdrawn",
            "too-many-jobs",
            "too-many-device-classes",
            "storage-full",
            "database-unavailable",
        ),
        200: {"model": Job, "description": "These results were imported before"},
    },
    openapi_extra=body_of("ResultsRequest"),
)
@needs("import")
def post_results(body: Body, request: Request, service: ServiceDep) -> Response:
    """Import the results.json of a stand-alone run. 202 once it is durable: winners are then built and published.

    Records say of each kernel that was imported what sent it and where it was measured. Imports change nothing that
    this service measured itself, unless the key that sends them may overwrite."""
    value = json_body(body, service.settings.max_json_depth)
    _require_no_nul(body)
    new = checked(_request(value), gpu_plan_version(), service.database.clock)
    most = service.settings.max_queued_jobs

    def admit(session: Session) -> None:
        require_room(unfinished_jobs(session), most)
        _require_few_classes(imported_classes(session) | {new.device_class})

    sender = caller_of(request)
    assert sender is not None, "the gate lets no call in without one"
    imported = import_results(service.database, new, Importer(sender.name, sender.key, sender.overwrites), admit)
    for target in imported.finish:
        service.announce(partial(tickets.add_tickets, kind="finish", target=target))
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


def _require_few_classes(names: set[str]) -> None:
    if len(names) > MOST_CLASSES:
        detail = f"Imports name {MOST_CLASSES} device classes already. Withdraw those that are not needed."
        raise refuse("too-many-device-classes", detail, field="device.name", allowed={"device_classes": MOST_CLASSES})


def _require_no_nul(body: bytes) -> None:
    """PostgreSQL keeps no text with a NUL in it."""
    if b"\\u0000" in body:
        raise refuse("malformed-json", "A string holds a NUL character. Send text.", allowed="text without NUL")
