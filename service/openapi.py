"""The OpenAPI document: FastAPI's, with the bodies that we read ourselves and the problems of every call."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from cukiln.types import ProblemDetail
from service.answers import PROBLEM_JSON
from service.errors import KINDS
from service.requests import JobRequest, LookupRequest

Responses = dict[int | str, dict[str, Any]]

BODY_PROBLEMS = (
    "bad-request",
    "malformed-json",
    "not-utf-8",
    "duplicate-key",
    "nested-too-deep",
    "body-too-large",
    "unsupported-media-type",
    "invalid-value",
    "missing-field",
    "unknown-field",
    "unknown-operator",
    "unknown-target",
    "extent-too-large",
)
EVERYWHERE = ("unknown-field", "unauthorized", "wrong-host", "internal")
EXAMPLE = {
    "target": "sm_80",
    "search": {"level": 1},
    "problems": [{"name": "ffn1", "operator": "matmul", "m": 512, "n": 3072, "k": 768, "layout": "nt"}],
}
_CONTENT = {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/ProblemDetail"}}}
_REFERENCE = "#/components/schemas/{model}"


def problems(*kinds: str) -> Responses:
    """The `responses` of a route that may answer these kinds, and those that every route may."""
    by_status: dict[int, list[str]] = {}
    for kind in dict.fromkeys((*kinds, *EVERYWHERE)):
        by_status.setdefault(KINDS[kind].status, []).append(kind)
    found: Responses = {}
    for status, names in sorted(by_status.items()):
        found[status] = {"description": f"{HTTPStatus(status).phrase}: {', '.join(names)}", "content": _CONTENT}
    found["default"] = {"description": "Any other problem", "content": _CONTENT}  # also spares FastAPI's own 422
    return found


def body_of(model: str) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads its body itself."""
    schema = {"$ref": _REFERENCE.format(model=model)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema, "example": EXAMPLE}}}}


def document(app: FastAPI) -> dict[str, Any]:
    """The document, made once."""
    if app.openapi_schema is None:
        found = FastAPI.openapi(app)
        _, ours = models_json_schema(
            [(JobRequest, "validation"), (LookupRequest, "validation"), (ProblemDetail, "serialization")],
            ref_template=_REFERENCE,
        )
        components = found.setdefault("components", {})
        components.setdefault("schemas", {}).update(ours["$defs"])
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}, {}]
        app.openapi_schema = found
    return app.openapi_schema
