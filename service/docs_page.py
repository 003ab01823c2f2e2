"""/docs: the OpenAPI document as one plain page, without scripts and without a CDN."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

from service.errors import KINDS, TYPE_PREFIX

router = APIRouter(include_in_schema=False)

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ccc;padding:.2rem .6rem;text-align:left;"
    "vertical-align:top}code{font:13px ui-monospace,monospace}h2{margin-top:2.5rem}summary{cursor:pointer}"
)
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}


@router.get("/docs", response_class=HTMLResponse)
def get_docs(request: Request) -> HTMLResponse:
    """Every call with its parameters, body and answers, every problem type, every schema."""
    return HTMLResponse(page(request.app.openapi()), headers=_HEADERS)


def page(document: Mapping[str, Any]) -> str:
    """The HTML of an OpenAPI document."""
    info = document["info"]
    calls = [
        _call(method, path, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    schemas = document["components"]["schemas"]
    return "".join(
        [
            "<!doctype html><html lang='en'><meta charset='utf-8'>",
            "<meta name='viewport' content='width=device-width,initial-scale=1'>",
            f"<title>{escape(info['title'])}</title><style>{_STYLE}</style>",
            f"<h1>{escape(info['title'])}</h1><p>{escape(info['description'])}</p>",
            "<p>The same for machines: <a href='/openapi.json'>/openapi.json</a></p>",
            *calls,
            "<h2 id='problems'>Problem types</h2>",
            _table(("type", "status", "meaning"), _kinds()),
            "<h2>Schemas</h2>",
            *(_schema(name, schema) for name, schema in sorted(schemas.items())),
        ]
    )


def _call(method: str, path: str, operation: Mapping[str, Any]) -> str:
    title = f"<h2><code>{escape(method.upper())} {escape(path)}</code></h2>"
    parts = [title, f"<p>{escape(operation.get('description', ''))}</p>"]
    parameters = operation.get("parameters", [])
    if parameters:
        rows = [(_code(one["name"]), escape(one["in"]), _type(one["schema"])) for one in parameters]
        parts.append(_table(("parameter", "in", "type"), rows))
    if "requestBody" in operation:
        parts.append(f"<p>Body: {_contents(operation['requestBody']['content'])}</p>")
    answers = [
        (_code(status), _contents(answer.get("content", {})), escape(answer["description"]))
        for status, answer in operation["responses"].items()
    ]
    parts.append(_table(("status", "answer", "meaning"), answers))
    return "".join(parts)


def _contents(content: Mapping[str, Any]) -> str:
    return ", ".join(f"{escape(kind)} {_type(value.get('schema', {}))}" for kind, value in content.items())


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", [])
    rows = [
        (_code(field), _type(part), "required" if field in required else "", escape(part.get("description", "")))
        for field, part in schema.get("properties", {}).items()
    ]
    body = _table(("field", "type", "", "meaning"), rows) if rows else f"<p>{_type(schema)}</p>"
    return f"<details id='{escape(name)}'><summary><code>{escape(name)}</code></summary>{body}</details>"


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    for alternatives in ("anyOf", "oneOf"):
        if alternatives in schema:
            return " | ".join(_type(one) for one in schema[alternatives])
    if "enum" in schema:
        return " | ".join(_code(repr(value)) for value in schema["enum"])
    kind = escape(str(schema.get("type", "any")))
    bounds = [
        f"{word} {schema[name]}"
        for name, word in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("maxItems", "at most"))
        if name in schema
    ]
    items = f" of {_type(schema['items'])}" if "items" in schema else ""
    return f"{kind}{items} {escape(', '.join(bounds))}".strip()


def _kinds() -> list[tuple[str, str, str]]:
    return [(_code(TYPE_PREFIX + name), str(kind.status), escape(kind.title)) for name, kind in KINDS.items()]


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of cells that are HTML already."""
    head = "".join(f"<th>{escape(one)}" for one in heads)
    return f"<table><tr>{head}" + "".join("<tr>" + "".join(f"<td>{cell}" for cell in row) for row in rows) + "</table>"


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"
