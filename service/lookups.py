"""POST /v1/lookups: up to 10,000 problems → winners and misses, from process memory over the database."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from cukiln.types import Lookups
from service.body import body_bytes, json_body
from service.context import ServiceDep
from service.openapi import BODY_PROBLEMS, body_of, problems
from service.requests import LookupRequest, read_request
from service.resolve import Wanted, resolve_lookups
from service.winner_cache import CachedWinner

router = APIRouter(prefix="/v1/lookups", tags=["kernels"])


@router.post(
    "",
    response_model=Lookups,
    responses=problems(*BODY_PROBLEMS, "database-unavailable"),
    openapi_extra=body_of("LookupRequest"),
)
def post_lookups(body: Annotated[bytes, Depends(body_bytes)], service: ServiceDep) -> Response:
    """The winner record of each problem, null where there is none. Nothing is queued.

    Where no device class is named, the record is that of a class with a live GPU, else of any that was measured, else
    the predicted one; `device_class` says which."""
    settings = service.settings
    request = read_request(LookupRequest, json_body(body, settings.max_json_depth), settings.max_problems)
    wanted = resolve_lookups(request, service.known(), service.winners.device_classes())
    found = service.winners.get(key for one in wanted for key in one.keys)
    return Response(_answer(request, wanted, found), media_type="application/json")


def _answer(request: LookupRequest, wanted: Sequence[Wanted], found: Mapping[str, CachedWinner]) -> bytes:
    """The JSON of `Lookups`, put together from records that are JSON already."""
    answers = [(one, *_best(request, one, found)) for one in wanted]
    hits = sum(record is not None for _, _, record in answers)
    results = [
        b'{"name":%b,"key":"%b","record":%b}' % (json.dumps(one.name).encode(), key.encode(), record or b"null")
        for one, key, record in answers
    ]
    return b'{"results":[%b],"hits":%d,"misses":%d}' % (b",".join(results), hits, len(answers) - hits)


def _best(request: LookupRequest, one: Wanted, found: Mapping[str, CachedWinner]) -> tuple[str, bytes | None]:
    """The key and the record of the first class that has a kernel which the request allows."""
    for key in one.keys:
        record = _record(request, found.get(key))
        if record is not None:
            return key, record
    return one.key, None


def _record(request: LookupRequest, winner: CachedWinner | None) -> bytes | None:
    if winner is None:
        return None
    front = winner.record.usable(request.workspace_limit_bytes, request.deterministic)
    if len(front) == len(winner.record.front):
        return winner.json
    return winner.record.model_copy(update={"front": front}).model_dump_json().encode() if front else None
