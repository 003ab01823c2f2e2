"""GET /v1/candidates/{id}: all that is known of one candidate, as `cukiln reproduce` needs it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from cukiln.types import CandidateFacts
from service.context import ServiceDep
from service.http.answers import json_response
from service.openapi import problems
from service.routes.prefixes import require_one
from storage.reports.candidates import candidate_facts

router = APIRouter(
    prefix="/v1/candidates",
    tags=["candidates"],
    responses=problems("candidate-not-found", "ambiguous-prefix", "invalid-value", "database-unavailable"),
)


@router.get("/{candidate}", response_model=CandidateFacts)
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
