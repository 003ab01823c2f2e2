"""The OpenAPI document: FastAPI's, with the bodies that we read ourselves and the problems of every call."""

import json
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from codegen.job_request import JobRequest, ProblemHead
from codegen.operators import operators
from cukiln.types import ProblemDetail
from service.http.answers import PROBLEM_JSON
from service.http.errors import KINDS
from service.requests.models import LookupRequest, ResultsRequest

Responses = dict[int | str, dict[str, Any]]

BODY_PROBLEMS = (
    "bad-request",
    "malformed-json",
    "not-utf-8",
    "duplicate-key",
    "nested-too-deep",
    "body-too-large",
    "too-many-values",
    "body-too-slow",
    "busy",
    "unsupported-media-type",
    "invalid-value",
    "missing-field",
    "unknown-field",
    "unknown-operator",
    "unknown-target",
    "extent-too-large",
)
EVERYWHERE = ("unknown-field", "unauthorized", "forbidden", "wrong-host", "too-many-wrong-keys", "internal")
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
    responses: Responses = {}
    for status, names in sorted(by_status.items()):
        responses[status] = {"description": f"{HTTPStatus(status).phrase}: {', '.join(names)}", "content": _CONTENT}
    responses["default"] = {"description": "Any other problem", "content": _CONTENT}  # also spares FastAPI's own 422
    return responses


def body_of(model: str, example: Any = None) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads its body itself."""
    content = {"schema": {"$ref": _REFERENCE.format(model=model)}} | ({"example": example} if example else {})
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def document(app: FastAPI) -> dict[str, Any]:
    """The document, made once."""
    if app.openapi_schema is None:
        made = FastAPI.openapi(app)
        components = made.setdefault("components", {})
        components.setdefault("schemas", {}).update(_schemas())
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"key": []}, {}]
        app.openapi_schema = _as_3_1(made)
    return app.openapi_schema


def _as_3_1(part: Any) -> Any:
    """FastAPI describes the items of an event stream with a keyword of OpenAPI 3.2, which validators of 3.1 refuse.
    Generators of clients refuse a default that is an object, as pydantic has it for a union: a description says it."""
    if isinstance(part, list):
        return [_as_3_1(element) for element in part]
    if not isinstance(part, dict):
        return part
    own = {name: _as_3_1(value) for name, value in part.items()}
    if "itemSchema" in own:
        own["schema"] = {**own.pop("itemSchema"), "description": "Each event of the stream."}
    if "oneOf" in own and isinstance(own.get("default"), dict):
        own["description"] = f"{own.get('description', '')} Default: {json.dumps(own.pop('default'))}.".strip()
    return own


def _schemas() -> dict[str, Any]:
    """Bodies and problem details. A problem is that of one operator, with what may stand beside its own fields."""
    registered = sorted(operators().items())
    models: list[type[BaseModel]] = [JobRequest, LookupRequest, ResultsRequest, ProblemHead]
    models += [operator.problem_type for _, operator in registered]
    validated: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "validation") for model in models]
    references, document = models_json_schema([*validated, (ProblemDetail, "serialization")], ref_template=_REFERENCE)
    schemas: dict[str, Any] = document["$defs"]
    mapping = {name: references[operator.problem_type, "validation"]["$ref"] for name, operator in registered}
    beside = schemas.pop(ProblemHead.__name__)["properties"]
    for reference in mapping.values():
        own = schemas[reference.rpartition("/")[2]]
        own["properties"] = beside | own["properties"]
        own["required"] = ["operator", *own["required"]]
    one_of = {
        "oneOf": [{"$ref": reference} for reference in mapping.values()],
        "discriminator": {"propertyName": "operator", "mapping": mapping},
    }
    for body in (JobRequest, LookupRequest):
        schemas[body.__name__]["properties"]["problems"]["items"] = one_of
    return schemas
