"""/docs: the OpenAPI document as one plain page, without scripts and without a CDN."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

from service.http.answers import PROBLEM_JSON
from service.http.errors import KINDS, TYPE_PREFIX
from service.pages.pages import environment

router = APIRouter(include_in_schema=False)

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


@router.get("/docs", response_class=HTMLResponse)
def get_docs(request: Request) -> HTMLResponse:
    """Every call with its parameters, body and answers, every problem type, every schema."""
    text = (
        environment()
        .get_template("docs.html")
        .render(document=request.app.openapi(), kinds=KINDS, prefix=TYPE_PREFIX, problem_json=PROBLEM_JSON)
    )
    return HTMLResponse(text, headers=_HEADERS)
