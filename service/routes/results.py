"""POST /v1/results, /v1/imports: what was measured on a machine without a service becomes a job, or is taken back."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from cukiln.types import ImportPage, ImportReport, Job
from service.auth import admitted, needs
from service.context import ServiceDep
from service.http.answers import json_response
from service.http.errors import refuse
from service.http.strict_json import read_json
from service.openapi import BODY_PROBLEMS, body_of, problems
from service.requests.check_results import checked
from service.requests.models import ResultsRequest
from service.requests.resolve import read_body
from service.routes.accept_job import require_room
from service.routes.body import Body
from service.routes.jobs import POLL_SECONDS, Cursor
from storage.config.own_modules import gpu_plans
from storage.database.session import Session
from storage.entities.jobs import unfinished_jobs
from storage.errors import ImportWithdrawn
from storage.reports.job import job_report
from storage.transfer.imports import Importer, import_results, imported_classes
from storage.transfer.withdrawals import clear_withdrawn, find_import, import_report, list_imports, withdraw_import
from storage.transitions.end_jobs import cancel_job
from workers import wake_ups

MOST_CLASSES = 64
"""Device classes that imports name; a lookup without one tries a few of them."""

router = APIRouter(prefix="/v1", tags=["jobs"])


@router.post(
    "/results",
    operation_id="import_results",
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

    Records name the sender and the machine of each imported kernel. Imports change nothing that
    this service measured itself, unless the key that sends them may overwrite."""
    value = read_json(body, service.settings.max_json_depth)
    if b"\\u0000" in body:  # PostgreSQL keeps no text with a NUL in it
        raise refuse("malformed-json", "A string holds a NUL character. Send text.", allowed="text without NUL")
    new = checked(read_body(ResultsRequest, value), gpu_plans(), service.database.clock, service.settings.cuda)
    most = service.settings.max_queued_jobs

    def admit(session: Session) -> None:
        require_room(unfinished_jobs(session), most)
        if len(imported_classes(session) | {new.device_class}) > MOST_CLASSES:
            detail = f"Imports name {MOST_CLASSES} device classes already. Withdraw those that are not needed."
            allowed = {"device_classes": MOST_CLASSES}
            raise refuse("too-many-device-classes", detail, field="device.name", allowed=allowed)

    sender = admitted(request)
    imported = import_results(service.database, new, Importer(sender.name, sender.key, sender.overwrites), admit)
    for target in imported or ():
        service.announce(partial(wake_ups.add_wake_ups, kind="finish", target=target))
    with service.database.read() as session:
        report = job_report(session, new.job_id, service.settings.toolchain_live_seconds)
    if report is None:
        raise ImportWithdrawn(new.job_id)
    headers = {"Location": f"/v1/jobs/{report.job}"}
    if imported is None:
        return json_response(report, headers=headers)
    return json_response(report, status=202, headers={**headers, "Retry-After": POLL_SECONDS})


@router.get(
    "/imports",
    operation_id="list_imports",
    response_model=ImportPage,
    responses=problems("invalid-cursor", "invalid-value", "database-unavailable"),
)
def get_imports(
    service: ServiceDep, limit: Annotated[int, Query(ge=1, le=1000)] = 50, cursor: Cursor = None
) -> Response:
    """Imports, the newest first; with those that were withdrawn."""
    with service.database.read() as session:
        return json_response(list_imports(session, limit=limit, cursor=cursor))


@router.delete(
    "/imports/{import_id}",
    operation_id="withdraw_import",
    response_model=ImportReport,
    responses=problems("import-not-found", "database-unavailable"),
)
@needs("import")
def delete_import(import_id: str, request: Request, service: ServiceDep) -> Response:
    """Withdraw: records are what they would be without it, its job is gone. A key withdraws its own, an admin's all."""
    caller = admitted(request)
    with service.database.write() as session:
        row = find_import(session, import_id)
        if row is None:
            raise refuse("import-not-found", f"There is no import {import_id[:64]!r}.", field="import_id")
        if not caller.may("admin") and caller.key != row.key:
            detail = f"The import is of {row.by!r}; a key withdraws its own imports, an admin's all."
            raise refuse("forbidden", detail, field="Authorization", allowed=["admin"])
        cancel_job(session, import_id)
        withdraw_import(session, import_id)
    clear_withdrawn(service.database)
    with service.database.read() as session:
        report = import_report(session, import_id)
    assert report is not None, "the row of an import stays"
    return json_response(report)
