"""Answers on the wire: JSON of a model, problem+json of an error."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel
from starlette.responses import Response

from service.errors import Refused, problem_detail

PROBLEM_JSON = "application/problem+json"


def json_response(answer: BaseModel, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """The model as JSON. Serialised here, not by FastAPI: answers are built by us and need no second validation."""
    body = answer.model_dump_json(by_alias=True).encode()
    return Response(body, status_code=status, headers=dict(headers or {}), media_type="application/json")


def problem_response(refused: Refused, instance: str | None = None) -> Response:
    """The problem as application/problem+json."""
    shown = instance.encode("utf-8", "replace").decode()[:200] if instance is not None else None
    body = problem_detail(refused, shown).model_dump_json(exclude_none=True).encode()
    headers = {"Cache-Control": "no-store", **refused.headers}
    return Response(body, status_code=refused.status, headers=headers, media_type=PROBLEM_JSON)
