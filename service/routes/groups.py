"""GET /v1/groups/{id}, its rendered .cu, its PTX, nvcc's messages."""

import gzip
import re
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cukiln.types import GroupReport
from service.context import Service, ServiceDep
from service.http.answers import json_response
from service.http.compressed import accepts_gzip
from service.http.errors import refuse
from service.openapi import problems
from service.routes.blobs import verified_bytes
from storage.transitions.groups import group_report

router = APIRouter(prefix="/v1/groups", tags=["groups"], responses=problems("group-not-found", "database-unavailable"))
_ID = re.compile(r"[0-9a-f]{32}")
_GZIP = b"\x1f\x8b"  # how a gzip file begins (RFC 1952, 2.3.1), and no text

FILE: dict[str, Any] = {
    "responses": problems("group-file-not-found", "blob-corrupt", "blobs-unavailable"),
    "response_class": Response,
}
NOT_COMPILED = "The group has no {what} yet: it is not compiled."
NO_PTX = (
    "The group has no PTX: it is not compiled yet, none of its kernels compiled, or all of them stood before in groups "
    "of their own."
)


@router.get("/{group}", operation_id="get_group", response_model=GroupReport)
def get_group(group: str, service: ServiceDep) -> Response:
    """The kernels of one .cu file, with nvcc's phases, resources and states."""
    return json_response(_report(service, group))


@router.get("/{group}/source", operation_id="get_group_source", **FILE)
@router.get("/{group}/ptx", operation_id="get_group_ptx", **FILE)
@router.get("/{group}/log", operation_id="get_group_log", **FILE)
def get_file(group: str, request: Request, service: ServiceDep) -> Response:
    """The rendered .cu, the input of ptxas, nvcc's messages. Kept compressed, sent so where gzip is accepted."""
    file = request.url.path.rpartition("/")[2]
    digest: str | None = getattr(_report(service, group), f"{file}_sha256")
    if digest is None:
        raise refuse("group-file-not-found", NO_PTX if file == "ptx" else NOT_COMPILED.format(what=file), field="group")
    data = verified_bytes(service, digest)
    # nosniff: the log quotes text of the request, which no browser may take for a page.
    headers = {"X-Content-Type-Options": "nosniff"}
    if data.startswith(_GZIP):
        headers["Vary"] = "Accept-Encoding"
        if accepts_gzip(request.headers.get("accept-encoding")):
            headers["Content-Encoding"] = "gzip"
        else:
            data = gzip.decompress(data)
    return Response(data, media_type="text/plain; charset=utf-8", headers=headers)


def _report(service: Service, group: str) -> GroupReport:
    report = None
    if _ID.fullmatch(group):
        with service.database.read() as session:
            report = group_report(session, group)
    if report is None:
        raise refuse("group-not-found", f"There is no group {group[:64]!r}.", field="group")
    return report
