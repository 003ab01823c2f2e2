"""GET /v1/kernels/{key}: the winner record of a problem on a device class.

On the event loop: a record that memory cannot answer is read by `service.threads`, in one query with those that are
asked for at the same time."""

from __future__ import annotations

import re

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.routing import Route

from cukiln.types import WinnerRecord
from service.auth import may_call
from service.context import service_of
from service.http.answers import none_match
from service.http.errors import refuse
from service.http.parameters import known_parameters
from service.openapi import problems

PROBLEMS = problems("kernel-not-found", "database-unavailable")
router = APIRouter(prefix="/v1/kernels", tags=["kernels"], responses=PROBLEMS)
_KEY = re.compile(r"[0-9a-f]{64}")


@router.get("/{key}", response_model=WinnerRecord)
async def get_kernel(key: str, request: Request) -> Response:
    """The winner record; its ETag is its revision and its content."""
    service = service_of(request)
    winner = None
    if _KEY.fullmatch(key):
        winner = service.winners.fresh(key) or await service.winner_reads.do(key)
    if winner is None:
        raise refuse("kernel-not-found", f"There is no winner record under {key[:80]!r}.", field="key")
    headers = {"ETag": winner.etag, "Cache-Control": "no-cache"}  # may be kept, must be asked for again
    if none_match(request.headers.get("if-none-match"), winner.etag):
        return Response(status_code=304, headers=headers)
    return Response(winner.json, headers=headers, media_type="application/json")


async def _get_kernel(request: Request) -> Response:
    request.scope["route"] = DIRECT  # which Starlette, unlike FastAPI, does not say
    await may_call(request)
    await known_parameters(request)
    return await get_kernel(request.path_params["key"], request)


DIRECT = Route("/v1/kernels/{key}", _get_kernel, methods=["GET"])
"""The same before FastAPI's routes, whose way to it takes more than twice the CPU time of all else."""
