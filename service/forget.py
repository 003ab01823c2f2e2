"""DELETE /v1/builds/{build} and /v1/kernels/{key}: what is remembered is forgotten, so that it is tried again."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.responses import Response

from cukiln.types import Forgotten
from service.answers import json_response
from service.auth import needs
from service.context import ServiceDep
from service.errors import refuse
from service.openapi import problems
from storage.forget import MOST_NAMED, builds_from, forget_builds, forget_winner
from storage.winners import keys_from

router = APIRouter(prefix="/v1", tags=["forget"])
_PREFIX = re.compile(r"[0-9a-f]{8,64}")


@router.delete(
    "/builds/{build}",
    response_model=Forgotten,
    responses=problems("build-not-found", "build-in-use", "ambiguous-prefix", "database-unavailable"),
)
@needs("admin")
def delete_build(build: str, service: ServiceDep) -> Response:
    """Forget how a build compiled, what its slice and code were proved to be, and its code's times. By its id, or by 8
    or more digits that no other's begins with."""
    _require_prefix(build, "build")
    with service.database.write() as session:
        ids = builds_from(session, build)
        forgotten = forget_builds(session, ids) if len(ids) == 1 else None
    _require_one(ids, build, "build")
    if forgotten is None or forgotten.in_use:
        detail = f"A job that has not ended needs the build {ids[0]}: wait for its end, or cancel it first."
        raise refuse("build-in-use", detail, field="build")
    return json_response(forgotten)


@router.delete(
    "/kernels/{key}",
    response_model=Forgotten,
    responses=problems("kernel-not-found", "ambiguous-prefix", "database-unavailable"),
)
@needs("admin")
def delete_kernel(key: str, service: ServiceDep) -> Response:
    """Forget a winner record with the libraries, builds, verdicts and times of the kernels that answered, but for what
    a job needs that has not ended. By its key, or by 8 or more digits that no other's begins with."""
    _require_prefix(key, "kernel")
    with service.database.write() as session:
        keys = keys_from(session, key, MOST_NAMED)
        forgotten = forget_winner(session, keys[0]) if len(keys) == 1 else None
    _require_one(keys, key, "kernel")
    assert forgotten is not None, "a record that answers was there in the same transaction"
    return json_response(forgotten)


def _require_prefix(prefix: str, kind: str) -> None:
    if not _PREFIX.fullmatch(prefix):
        detail = f"{prefix[:80]!r} names no {kind}: give 64 lower-case hexadecimal digits, or the first 8 or more."
        raise refuse(f"{kind}-not-found", detail, field="key" if kind == "kernel" else kind)


def _require_one(found: Sequence[str], prefix: str, kind: str) -> None:
    field = "key" if kind == "kernel" else kind
    if len(found) > 1:
        detail = f"{len(found)} or more {kind}s begin with {prefix!r}: give more digits."
        raise refuse("ambiguous-prefix", detail, field=field, allowed=list(found))
    if not found:
        raise refuse(f"{kind}-not-found", f"There is no {kind} {prefix!r}.", field=field)
