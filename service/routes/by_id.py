"""What is named by the first digits of its id: GET /v1/candidates/{id}, DELETE /v1/builds/{id}, /v1/kernels/{key}."""

import re
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from cukiln.types import CandidateFacts, Forgotten
from service.auth import needs
from service.context import ServiceDep
from service.http.answers import json_response
from service.http.errors import refuse
from service.openapi import problems
from storage.database.pages import Named, ids_beginning
from storage.database.session import Session
from storage.maintenance.forget import forget_builds, forget_winner
from storage.reports.candidates import candidate_facts

router = APIRouter(prefix="/v1")
_PREFIX = re.compile(r"[0-9a-f]{8,64}")


def require_one(session: Session, kind: Named, prefix: str, job: str | None = None) -> str:
    """The id that is meant; `job`: of a candidate of that job. Raises `Refused`."""
    field = "key" if kind == "kernel" else kind
    if not _PREFIX.fullmatch(prefix):
        detail = f"{prefix[:80]!r} names no {kind}: give 64 lower-case hexadecimal digits, or the first 8 or more."
        raise refuse(f"{kind}-not-found", detail, field=field)
    of_job = f" in job {job}" if job else ""
    row = only_one(session, kind, prefix, job)
    if row is None:
        raise refuse(f"{kind}-not-found", f"There is no {kind} {prefix!r}{of_job}.", field=field)
    return row


def only_one(session: Session, kind: Named, prefix: str, job: str | None = None) -> str | None:
    """The id that begins so; None where there is none. Raises Refused (409) where there are several."""
    ids = ids_beginning(session, kind, prefix, job)
    if len(ids) > 1:
        detail = f"{len(ids)} or more {kind}s{f' in job {job}' if job else ''} begin with {prefix!r}: give more digits."
        raise refuse("ambiguous-prefix", detail, field="key" if kind == "kernel" else kind, allowed=ids)
    return ids[0] if ids else None


@router.get(
    "/candidates/{candidate}",
    operation_id="get_candidate",
    tags=["candidates"],
    response_model=CandidateFacts,
    responses=problems("candidate-not-found", "ambiguous-prefix", "invalid-value", "database-unavailable"),
)
def get_candidate(
    candidate: str,
    service: ServiceDep,
    job: Annotated[str | None, Query(pattern=r"^[0-9a-f]{32}$")] = None,
) -> Response:
    """A candidate by its id, or by 8 or more digits that no other's begins with; `job`: as that job has it."""
    with service.database.read() as session:
        facts = candidate_facts(session, require_one(session, "candidate", candidate, job), job)
    assert facts is not None, "its id was there in the same transaction"
    return json_response(facts)


@router.delete(
    "/builds/{build}",
    operation_id="forget_build",
    tags=["forget"],
    response_model=Forgotten,
    responses=problems("build-not-found", "build-in-use", "ambiguous-prefix", "database-unavailable"),
)
@needs("admin")
def delete_build(build: str, service: ServiceDep) -> Response:
    """Forget how a build compiled, the verdicts of its kernel source and code, and its code's times."""
    with service.database.write() as session:
        id = require_one(session, "build", build)
        forgotten = forget_builds(session, [id])
    if forgotten.in_use:
        detail = f"A job that has not ended needs the build {id}: wait for its end, or cancel it first."
        raise refuse("build-in-use", detail, field="build")
    return json_response(forgotten)


@router.delete(
    "/kernels/{key}",
    operation_id="forget_winner",
    tags=["forget"],
    response_model=Forgotten,
    responses=problems("kernel-not-found", "ambiguous-prefix", "database-unavailable"),
)
@needs("admin")
def delete_kernel(key: str, service: ServiceDep) -> Response:
    """Forget a winner record with its kernels, and their results, but for what a job needs that has not ended."""
    with service.database.write() as session:
        forgotten = forget_winner(session, require_one(session, "kernel", key))
    assert forgotten is not None, "a record that answers was there in the same transaction"
    return json_response(forgotten)
