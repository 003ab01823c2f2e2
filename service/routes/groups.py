"""GET /v1/groups/{id}, its rendered .cu, its PTX and SASS, nvcc's messages."""

from __future__ import annotations

import gzip
import re

from fastapi import APIRouter, Request
from starlette.responses import Response

from cukiln.types import GroupReport
from service.context import Service, ServiceDep
from service.http.answers import json_response
from service.http.errors import refuse
from service.openapi import problems
from service.routes.blobs import verified_bytes
from storage.transitions.compile import group_report

router = APIRouter(prefix="/v1/groups", tags=["groups"], responses=problems("group-not-found", "database-unavailable"))
_ID = re.compile(r"[0-9a-f]{32}")
_GZIP = b"\x1f\x8b"  # how a gzip file begins (RFC 1952, 2.3.1), and no text
_REFUSED = re.compile(r"q\s*=\s*0(\.0*)?", re.IGNORECASE)

NOT_COMPILED = "The group has no {what} yet: it is not compiled."
NO_PTX = (
    "The group has no PTX: it is not compiled yet, none of its kernels compiled, or all of them stood before in groups "
    "of their own."
)
NO_SASS = (
    "No SASS is kept of a group. That of a winner is the blob that its record names as sass_sha256, where the worker "
    "found nvdisasm or cuobjdump; `nvdisasm` makes it from the group's cubin, the blob cubin_sha256."
)


@router.get("/{group}", response_model=GroupReport)
def get_group(group: str, service: ServiceDep) -> Response:
    """The kernels of one .cu file, with nvcc's phases, resources and states."""
    return json_response(_report(service, group))


@router.get("/{group}/source", responses=problems("group-file-not-found", "blob-corrupt"), response_class=Response)
def get_source(group: str, service: ServiceDep) -> Response:
    """The rendered .cu."""
    return _text(service, _report(service, group).source_sha256, NOT_COMPILED.format(what="source"))


@router.get("/{group}/ptx", responses=problems("group-file-not-found", "blob-corrupt"), response_class=Response)
def get_ptx(group: str, request: Request, service: ServiceDep) -> Response:
    """The input of ptxas. Sent compressed where the request accepts gzip."""
    return _text(service, _report(service, group).ptx_sha256, NO_PTX, request)


@router.get("/{group}/sass", responses=problems("group-file-not-found", "blob-corrupt"), response_class=Response)
def get_sass(group: str, request: Request, service: ServiceDep) -> Response:
    """The machine code as text, where it was kept; that of a winner is a blob, the `sass_sha256` of its record."""
    return _text(service, _report(service, group).sass_sha256, NO_SASS, request)


@router.get("/{group}/log", responses=problems("group-file-not-found", "blob-corrupt"), response_class=Response)
def get_log(group: str, service: ServiceDep) -> Response:
    """nvcc's messages."""
    return _text(service, _report(service, group).log_sha256, NOT_COMPILED.format(what="log"))


def _report(service: Service, group: str) -> GroupReport:
    report = None
    if _ID.fullmatch(group):
        with service.database.read() as session:
            report = group_report(session, group)
    if report is None:
        raise refuse("group-not-found", f"There is no group {group[:64]!r}.", field="group")
    return report


def _text(service: Service, digest: str | None, without: str, request: Request | None = None) -> Response:
    """The blob as text. A compressed one is sent as it is where the request accepts gzip."""
    if digest is None:
        raise refuse("group-file-not-found", without, field="group")
    data = verified_bytes(service, digest)
    # nosniff: the log quotes text of the request, which no browser may take for a page.
    headers = {"X-Content-Type-Options": "nosniff"}
    if data.startswith(_GZIP):
        headers["Vary"] = "Accept-Encoding"
        if request is not None and _accepts_gzip(request.headers.get("accept-encoding")):
            headers["Content-Encoding"] = "gzip"
        else:
            data = gzip.decompress(data)
    return Response(data, media_type="text/plain; charset=utf-8", headers=headers)


def _accepts_gzip(header: str | None) -> bool:
    """Whether Accept-Encoding names gzip and does not refuse it (RFC 9110, 12.5.3)."""
    for part in (header or "").split(","):
        name, _, weight = part.partition(";")
        if name.strip().lower() in ("gzip", "x-gzip"):
            return not _REFUSED.fullmatch(weight.strip())
    return False
