"""GET /v1/blobs/sha256/{digest}: bytes that never change, checked before they are sent."""

import logging
import re

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.context import Service, ServiceDep
from service.http.answers import none_match
from service.http.errors import Refused, refuse
from service.openapi import problems
from storage.database.database_errors import DATABASE_AWAY
from storage.errors import BlobCorrupt, BlobMissing
from storage.maintenance.damage import repair

log = logging.getLogger("cukiln.service")

PROBLEMS = problems("invalid-digest", "blob-not-found", "blob-corrupt", "database-unavailable")
router = APIRouter(prefix="/v1/blobs/sha256", tags=["blobs"], responses=PROBLEMS)
_DIGEST = re.compile(r"[0-9a-f]{64}")


@router.get("/{digest}", response_class=Response)
def get_blob(digest: str, request: Request, service: ServiceDep) -> Response:
    """The bytes under a digest. Immutable: strong ETag, 304 for If-None-Match."""
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
        "X-Content-Type-Options": "nosniff",
    }
    if none_match(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    return Response(verified_bytes(service, digest), headers=headers, media_type=blob.media_type)


def verified_bytes(service: Service, digest: str) -> bytes:
    """The whole blob, its digest checked. Raises Refused."""
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
