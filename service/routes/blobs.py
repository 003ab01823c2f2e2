"""GET and HEAD /v1/blobs/sha256/{digest}: bytes that never change, checked before they are sent."""

import logging
import re

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.context import Service, ServiceDep
from service.http.answers import Unsatisfiable, byte_range, none_match
from service.http.errors import Refused, refuse
from service.openapi import problems
from storage.database.database_errors import DATABASE_AWAY
from storage.errors import BlobCorrupt, BlobMissing
from storage.maintenance.damage import repair

log = logging.getLogger("cukiln.service")

PROBLEMS = problems(
    "invalid-digest",
    "blob-not-found",
    "range-not-satisfiable",
    "blob-corrupt",
    "blobs-unavailable",
    "database-unavailable",
)
router = APIRouter(prefix="/v1/blobs/sha256", tags=["blobs"], responses=PROBLEMS)
_DIGEST = re.compile(r"[0-9a-f]{64}")


@router.get("/{digest}", operation_id="get_blob", response_class=Response)
@router.head("/{digest}", response_class=Response, include_in_schema=False)
def get_blob(digest: str, request: Request, service: ServiceDep) -> Response:
    """The bytes under a digest. Immutable: strong ETag, 304 for If-None-Match, 206 for one Range."""
    if not _DIGEST.fullmatch(digest):
        detail = f"{digest[:80]!r} is not a SHA-256 digest."
        raise refuse("invalid-digest", detail, field="digest", allowed="64 digits of 0-9a-f")
    blob = service.blobs.head(digest)
    if blob is None:
        raise _missing(digest)
    etag = f'"{digest}"'
    headers = {
        "ETag": etag,
        "Cache-Control": "public, max-age=31536000, immutable",
        "Accept-Ranges": "bytes",
        "X-Content-Type-Options": "nosniff",
    }
    if none_match(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    asked = request.headers.get("range") if request.method == "GET" else None  # RFC 9110, 14.2: GET alone
    try:
        part = byte_range(asked, request.headers.get("if-range"), etag, blob.size)
    except Unsatisfiable:
        raise _outside(blob.size) from None
    data = verified_bytes(service, digest)
    if request.method == "HEAD":
        return Response(headers={**headers, "Content-Length": str(len(data))}, media_type=blob.media_type)
    if part is None:
        return Response(data, headers=headers, media_type=blob.media_type)
    headers["Content-Range"] = f"bytes {part.first}-{part.last}/{len(data)}"
    return Response(data[part.first : part.last + 1], status_code=206, headers=headers, media_type=blob.media_type)


def verified_bytes(service: Service, digest: str) -> bytes:
    """The whole blob, its digest checked: a range of damaged bytes must not be sent either. Raises Refused."""
    try:
        return service.blobs.get(digest)
    except BlobMissing:
        raise _missing(digest) from None
    except BlobCorrupt as error:
        log.error("%s", error)
        detail = (
            f"The bytes stored under {digest} are damaged and were not sent. They are set aside, and what answered "
            "with them is withdrawn: submit the problem again, which builds it anew."
        )
        _repair(service, digest)
        raise refuse("blob-corrupt", detail, field="digest") from None


def _repair(service: Service, digest: str) -> None:
    """Else the damaged bytes would count as cached for ever. Where it fails now, the next request tries again."""
    try:
        keys = repair(service.database, service.blobs, digest)
    except DATABASE_AWAY:
        log.exception("blob sha256:%s is damaged, and was not repaired", digest)
    else:
        log.warning("blob sha256:%s was damaged and is set aside; it was needed by: %s", digest, ", ".join(keys or []))


def _missing(digest: str) -> Refused:
    return refuse("blob-not-found", f"There is no blob {digest}.", field="digest")


def _outside(size: int) -> Refused:
    detail = f"The blob has {size} bytes, the first is 0."
    headers = {"Content-Range": f"bytes */{size}"}
    allowed = f"bytes=0-{max(size - 1, 0)}"
    return refuse("range-not-satisfiable", detail, field="Range", allowed=allowed, headers=headers)
