"""GET /v1/kernels/{key}: the winner record of a problem on a device class."""

from __future__ import annotations

import hashlib
import re

from fastapi import APIRouter, Request
from starlette.responses import Response

from cukiln.types import WinnerRecord
from service.conditional import none_match
from service.context import ServiceDep
from service.errors import refuse
from service.openapi import problems
from storage.winners import get_winners

PROBLEMS = problems("kernel-not-found", "database-unavailable")
router = APIRouter(prefix="/v1/kernels", tags=["kernels"], responses=PROBLEMS)
_KEY = re.compile(r"[0-9a-f]{64}")


@router.get("/{key}", response_model=WinnerRecord)
def get_kernel(key: str, request: Request, service: ServiceDep) -> Response:
    """The winner record; its ETag is its revision and its content."""
    record = None
    if _KEY.fullmatch(key):
        with service.database.read() as session:
            record = get_winners(session, [key]).get(key)
    if record is None:
        raise refuse("kernel-not-found", f"There is no winner record under {key[:80]!r}.", field="key")
    body = record.model_dump_json().encode()
    # Not the revision alone: another data folder behind the same address counts from 1 again.
    etag = f'"{record.revision}-{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {"ETag": etag, "Cache-Control": "no-cache"}  # may be kept, must be asked for again: revisions follow
    if none_match(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type="application/json")
