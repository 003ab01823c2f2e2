"""POST /v1/lookups: up to 10,000 problems → winners and misses, from process memory over the database."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from cukiln.types import Lookups
from service.body import body_bytes, json_body
from service.context import ServiceDep
from service.openapi import BODY_PROBLEMS, body_of, problems
from service.requests import LookupRequest, read_request
from service.resolve import Resolved, resolve_lookups
from service.winner_cache import CachedWinner

router = APIRouter(prefix="/v1/lookups", tags=["kernels"])


@router.post(
    "",
    response_model=Lookups,
    responses=problems(*BODY_PROBLEMS, "database-unavailable"),
    openapi_extra=body_of("LookupRequest"),
)
def post_lookups(body: Annotated[bytes, Depends(body_bytes)], service: ServiceDep) -> Response:
    """The winner record of each problem, null where there is none. Nothing is queued."""
    settings = service.settings
    request = read_request(LookupRequest, json_body(body, settings.max_json_depth), settings.max_problems)
    resolved = resolve_lookups(request, service.known())
    found = service.winners.get(one.key for one in resolved)
    return Response(_answer(request, resolved, found), media_type="application/json")


def _answer(request: LookupRequest, resolved: list[Resolved], found: Mapping[str, CachedWinner]) -> bytes:
    """The JSON of `Lookups`, put together from records that are JSON already."""
    records = [_record(request, found.get(one.key)) for one in resolved]
    hits = sum(record is not None for record in records)
    results = [
        b'{"name":%b,"key":"%b","record":%b}' % (json.dumps(one.name).encode(), one.key.encode(), record or b"null")
        for one, record in zip(resolved, records, strict=True)
    ]
    return b'{"results":[%b],"hits":%d,"misses":%d}' % (b",".join(results), hits, len(records) - hits)


def _record(request: LookupRequest, winner: CachedWinner | None) -> bytes | None:
    if winner is None:
        return None
    front = winner.record.usable(request.workspace_limit_bytes, request.deterministic)
    if len(front) == len(winner.record.front):
        return winner.json
    return winner.record.model_copy(update={"front": front}).model_dump_json().encode() if front else None
