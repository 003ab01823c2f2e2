"""GET /v1/groups/{id}, its rendered .cu, nvcc's words."""

from __future__ import annotations

import re

from fastapi import APIRouter
from starlette.responses import Response

from cukiln.types import GroupReport
from service.answers import json_response
from service.blobs import verified_bytes
from service.context import Service, ServiceDep
from service.errors import refuse
from service.openapi import problems
from storage.groups import group_report

router = APIRouter(prefix="/v1/groups", tags=["groups"], responses=problems("group-not-found", "database-unavailable"))
_ID = re.compile(r"[0-9a-f]{32}")


@router.get("/{group}", response_model=GroupReport)
def get_group(group: str, service: ServiceDep) -> Response:
    """The kernels of one .cu file, with nvcc's phases, resources and states."""
    return json_response(_report(service, group))


@router.get("/{group}/source", responses=problems("group-file-not-found", "blob-corrupt"), response_class=Response)
def get_source(group: str, service: ServiceDep) -> Response:
    """The rendered .cu."""
    return _text(service, "source", _report(service, group).source_sha256)


@router.get("/{group}/log", responses=problems("group-file-not-found", "blob-corrupt"), response_class=Response)
def get_log(group: str, service: ServiceDep) -> Response:
    """nvcc's words."""
    return _text(service, "log", _report(service, group).log_sha256)


def _report(service: Service, group: str) -> GroupReport:
    report = None
    if _ID.fullmatch(group):
        with service.database.read() as session:
            report = group_report(session, group)
    if report is None:
        raise refuse("group-not-found", f"There is no group {group[:64]!r}.", field="group")
    return report


def _text(service: Service, what: str, digest: str | None) -> Response:
    if digest is None:
        raise refuse("group-file-not-found", f"The group has no {what} yet: it is not compiled.", field=what)
    data = verified_bytes(service, digest)
    # nosniff: the log quotes what the request made nvcc say, and no browser shall take it for a page.
    return Response(data, media_type="text/plain; charset=utf-8", headers={"X-Content-Type-Options": "nosniff"})
