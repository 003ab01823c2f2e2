"""GET /v1/candidates/{id}: all that is known of one candidate, as `cukiln reproduce` needs it."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from cukiln.types import CandidateFacts
from service.answers import json_response
from service.context import ServiceDep
from service.errors import refuse
from service.openapi import problems
from storage.candidate_facts import candidate_facts, candidates_of_prefix

router = APIRouter(
    prefix="/v1/candidates",
    tags=["candidates"],
    responses=problems("candidate-not-found", "ambiguous-prefix", "invalid-value", "database-unavailable"),
)
_PREFIX = re.compile(r"[0-9a-f]{8,64}")


@router.get("/{candidate}", response_model=CandidateFacts)
def get_candidate(
    candidate: str,
    service: ServiceDep,
    job: Annotated[str | None, Query(pattern=r"^[0-9a-f]{32}$")] = None,
) -> Response:
    """A candidate by its id, or by 8 or more digits that no other's begins with; `job`: as that job has it."""
    if not _PREFIX.fullmatch(candidate):
        detail = f"{candidate[:80]!r} is no candidate id: 64 lower-case hexadecimal digits, or the first 8 or more."
        raise refuse("candidate-not-found", detail, field="candidate")
    of_job = f" in job {job}" if job else ""
    with service.database.read() as session:
        found = candidates_of_prefix(session, candidate, job)
        facts = candidate_facts(session, found[0], job) if len(found) == 1 else None
    if len(found) > 1:
        detail = f"{len(found)} or more candidates{of_job} begin with {candidate!r}: give more digits."
        raise refuse("ambiguous-prefix", detail, field="candidate", allowed=found)
    if facts is None:
        raise refuse("candidate-not-found", f"There is no candidate {candidate!r}{of_job}.", field="candidate")
    return json_response(facts)
