"""/v1/imports: what was measured elsewhere and sent here; how it is taken back."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from cukiln.types import ImportPage, ImportReport
from service.auth import caller_of, needs
from service.context import ServiceDep
from service.http.answers import json_response
from service.http.errors import refuse
from service.openapi import problems
from service.routes.jobs import Cursor
from storage.transfer.withdrawals import clear_withdrawn, find_import, import_report, list_imports, withdraw_import
from storage.transitions.cancel_and_expire import cancel_job

router = APIRouter(prefix="/v1/imports", tags=["jobs"])


@router.get(
    "", response_model=ImportPage, responses=problems("invalid-cursor", "invalid-value", "database-unavailable")
)
def get_imports(
    service: ServiceDep, limit: Annotated[int, Query(ge=1, le=1000)] = 50, cursor: Cursor = None
) -> Response:
    """Imports, the newest first; with those that were withdrawn."""
    with service.database.read() as session:
        return json_response(list_imports(session, limit=limit, cursor=cursor))


@router.delete(
    "/{import_id}", response_model=ImportReport, responses=problems("import-not-found", "database-unavailable")
)
@needs("import")
def delete_import(import_id: str, request: Request, service: ServiceDep) -> Response:
    """Withdraw: records are what they would be without it, and its job is gone. Doing it twice is doing it once. A key
    withdraws its own imports, an admin's all."""
    caller = caller_of(request)
    with service.database.write() as session:
        row = find_import(session, import_id)
        if row is None:
            raise refuse("import-not-found", f"There is no import {import_id[:64]!r}.", field="import_id")
        if caller is not None and not caller.may("admin") and caller.key != row.key:
            detail = f"The import is of {row.by!r}; a key withdraws its own imports, an admin's all."
            raise refuse("forbidden", detail, field="Authorization", allowed=["admin"])
        cancel_job(session, import_id)
        withdraw_import(session, import_id)
    clear_withdrawn(service.database)
    with service.database.read() as session:
        report = import_report(session, import_id)
    assert report is not None, "the row of an import stays"
    return json_response(report)
