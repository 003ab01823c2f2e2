"""/docs: the OpenAPI document as one plain page, without scripts and without a CDN."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

from service.http.answers import PROBLEM_JSON
from service.http.errors import KINDS, TYPE_PREFIX

router = APIRouter(include_in_schema=False)

# Wide tables scroll by themselves: on a phone the page must not.
_STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8881;--link:light-dark(#0550ae,#79b8ff)}
body{font:16px/1.5 system-ui,sans-serif;max-width:58rem;margin:2rem auto;padding:0 1rem;overflow-wrap:break-word}
a{color:var(--link);text-decoration:none}a:hover{text-decoration:underline}
code,pre{font:.875em/1.5 ui-monospace,monospace}pre{background:var(--soft);padding:.8rem;overflow-x:auto}
h2{margin:3rem 0 .5rem;padding-top:.8rem;border-top:1px solid var(--line);font-size:1.1rem}
h3{margin:1rem 0 .2rem;font-size:.9rem}h2 code{font-size:1rem}p{margin:.4rem 0}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem}
td,th{padding:.2rem 1.2rem .2rem 0;text-align:left;vertical-align:top}th{font-weight:600}
tr+tr>td{border-top:1px solid var(--line)}
nav ul{list-style:none;padding:0;columns:20rem}summary{cursor:pointer;padding:.15rem 0}
"""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_KIND = re.compile(r"[a-z0-9-]+")


@router.get("/docs", response_class=HTMLResponse)
def get_docs(request: Request) -> HTMLResponse:
    """Every call with its parameters, body and answers, every problem type, every schema."""
    return HTMLResponse(page(request.app.openapi()), headers=_HEADERS)


def page(document: Mapping[str, Any]) -> str:
    """The HTML of an OpenAPI document."""
    title, description = escape(document["info"]["title"]), _prose(document["info"]["description"])
    calls = [
        (method, path, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    return "".join(
        [
            "<!doctype html><html lang='en'><meta charset='utf-8'>",
            "<meta name='viewport' content='width=device-width,initial-scale=1'>",
            f"<title>{title}: the HTTP API</title><style>{_STYLE}</style>",
            f"<h1>{title}</h1><p>{description}</p>",
            "<p>Times are Unix seconds, durations seconds unless the name says <code>_us</code>. The same page for ",
            "machines: <a href='/openapi.json'>/openapi.json</a>.</p>",
            _contents_of(calls),
            *(_call(method, path, operation) for method, path, operation in calls),
            "<h2 id='problems'>Problem types</h2>",
            _table(("type", "status", "meaning"), _kinds()),
            "<h2 id='schemas'>Schemas</h2>",
            *(_schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items())),
        ]
    )


def _contents_of(calls: Sequence[tuple[str, str, Mapping[str, Any]]]) -> str:
    links = [f"<li><a href='#{_anchor(method, path)}'>{_name(method, path)}</a>" for method, path, _ in calls]
    rest = "<li><a href='#problems'>Problem types</a><li><a href='#schemas'>Schemas</a>"
    return f"<nav><ul>{''.join(links)}{rest}</ul></nav>"


def _call(method: str, path: str, operation: Mapping[str, Any]) -> str:
    parts = [f"<h2 id='{_anchor(method, path)}'>{_name(method, path)}</h2>"]
    parts.append(f"<p>{_prose(operation.get('description', ''))}</p>")
    if parameters := operation.get("parameters", []):
        parts += ["<h3>Parameters</h3>", _table((), [_parameter(part) for part in parameters])]
    if "requestBody" in operation:
        content = operation["requestBody"]["content"]
        parts.append(f"<h3>Body</h3><p>{_contents(content)}</p>")
        examples = [part["example"] for part in content.values() if "example" in part]
        parts += [f"<pre>{escape(json.dumps(example, indent=1))}</pre>" for example in examples]
    parts += ["<h3>Answers</h3>", _answers(operation["responses"])]
    return "".join(parts)


def _parameter(part: Mapping[str, Any]) -> tuple[str, str, str, str]:
    default = part["schema"].get("default")
    shown = f"default {_code(str(default))}" if default is not None else ""
    where = f"in the {part['in']}" + (", required" if part.get("required") else "")
    return _code(part["name"]), _type(part["schema"]), shown, where


def _answers(responses: Mapping[str, Mapping[str, Any]]) -> str:
    """Good answers with their types, problems with their kinds: all of them have one type."""
    rows = []
    for status, answer in sorted(responses.items()):
        content = answer.get("content", {})
        if status == "default":
            continue  # "any other problem": says nothing here
        if PROBLEM_JSON in content:
            kinds = _KIND.findall(answer["description"].partition(": ")[2])
            rows.append((_code(status), ", ".join(f"<a href='#{kind}'>{kind}</a>" for kind in kinds)))
        else:
            said = answer["description"]
            words = "" if said == "Successful Response" else f": {_prose(said)}"
            rows.append((_code(status), (_contents(content) or "bytes or text") + words))
    return _table((), rows)


def _name(method: str, path: str) -> str:
    return _code(f"{method.upper()} {path}")


def _anchor(method: str, path: str) -> str:
    return escape(f"{method}{path}".replace("{", "").replace("}", "").replace("/", "-"))


def _prose(text: str) -> str:
    """Text of ours in which `backticks` mark code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))


def _contents(content: Mapping[str, Any]) -> str:
    types = [(kind, _type(value["schema"]) if value.get("schema") else "") for kind, value in content.items()]
    return ", ".join(type if kind == "application/json" else f"{escape(kind)} {type}".strip() for kind, type in types)


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", [])
    rows = [
        (_code(field), _type(part), "required" if field in required else "", _prose(part.get("description", "")))
        for field, part in schema.get("properties", {}).items()
    ]
    words = f"<p>{_prose(schema['description'])}</p>" if "description" in schema else ""
    body = _table((), rows) if rows else f"<p>{_type(schema)}</p>"
    return f"<details id='{escape(name)}'><summary>{_code(name)}</summary>{words}{body}</details>"


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    for alternatives in ("anyOf", "oneOf"):
        if alternatives in schema:
            return " | ".join(_type(member) for member in schema[alternatives])
    if "enum" in schema:
        return " | ".join(_code(json.dumps(value)) for value in schema["enum"])
    kind = escape(str(schema.get("type", "any")))
    bounds = [
        f"{word} {schema[name]}"
        for name, word in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("maxItems", "at most"))
        if name in schema
    ]
    items = f" of {_type(schema['items'])}" if "items" in schema else ""
    return f"{kind}{items} {escape(', '.join(bounds))}".strip()


def _kinds() -> list[tuple[str, str, str]]:
    return [
        (f"<code id='{name}'>{TYPE_PREFIX}{name}</code>", str(kind.status), escape(kind.title))
        for name, kind in KINDS.items()
    ]


def _table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of cells that are HTML already."""
    head = f"<tr>{''.join(f'<th>{escape(heading)}' for heading in heads)}" if heads else ""
    body = "".join("<tr>" + "".join(f"<td>{cell}" for cell in row) for row in rows)
    return f"<div class='scroll'><table>{head}{body}</table></div>"


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"
