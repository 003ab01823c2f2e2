"""DELETE /v1/builds/{build} and /v1/kernels/{key}: stored results are deleted, so that work is tried again."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from cukiln.types import Forgotten
from service.auth import needs
from service.context import ServiceDep
from service.http.answers import json_response
from service.http.errors import refuse
from service.openapi import problems
from service.routes.prefixes import require_one
from storage.maintenance.forget import forget_builds, forget_winner

router = APIRouter(prefix="/v1", tags=["forget"])


@router.delete(
    "/builds/{build}",
    response_model=Forgotten,
    responses=problems("build-not-found", "build-in-use", "ambiguous-prefix", "database-unavailable"),
)
@needs("admin")
def delete_build(build: str, service: ServiceDep) -> Response:
    """Forget how a build compiled, the verdicts of its kernel source and code, and its code's times. By its id, or by a
    unique prefix of 8 or more digits."""
    with service.database.write() as session:
        id = require_one(session, "build", build)
        forgotten = forget_builds(session, [id])
    if forgotten.in_use:
        detail = f"A job that has not ended needs the build {id}: wait for its end, or cancel it first."
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
    a job needs that has not ended. By its key, or by a unique prefix of 8 or more digits."""
    with service.database.write() as session:
        forgotten = forget_winner(session, require_one(session, "kernel", key))
    assert forgotten is not None, "a record that answers was there in the same transaction"
    return json_response(forgotten)
