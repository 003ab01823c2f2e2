"""Every exception that reaches the edge → application/problem+json."""

import asyncio
import functools
import logging
from collections.abc import Sequence
from http import HTTPStatus

from anyio import BrokenResourceError
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.answers import problem_response
from service.http.errors import Fault, Refused, refuse
from service.http.faults import message_of
from service.http.head import has_head
from service.http.parameters import allowed_in
from service.http.room import RETRY_SECONDS
from storage.database.database_errors import DATABASE_ERRORS, Failure, failure_of
from storage.errors import BadCursor, BlobsAway, ImportWithdrawn

log = logging.getLogger("cukiln.service")


def install(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Register the handlers. `routes`: all that the application has."""
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(RequestValidationError, _bad_parameter)
    app.add_exception_handler(HTTPException, functools.partial(_http, routes))
    app.add_exception_handler(BadCursor, _bad_cursor)
    app.add_exception_handler(ImportWithdrawn, _import_withdrawn)
    for kind in (*DATABASE_ERRORS, OSError):
        app.add_exception_handler(kind, _machine)
    app.add_exception_handler(BlobsAway, _blobs_away)
    app.add_middleware(AnswerDefects)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return problem_response(error, request.url.path)


async def _bad_parameter(request: Request, error: Exception) -> Response:
    """A query parameter or header that FastAPI could not read; bodies are read by us."""
    assert isinstance(error, RequestValidationError)
    faults = []
    for entry in error.errors():
        name = str(entry["loc"][1])
        kind = "missing-field" if entry["type"] == "missing" else "invalid-value"
        faults.append(Fault(kind, f"{name}{message_of(entry)}.", name, allowed_in(request, name)))
    return problem_response(Refused(faults), request.url.path)


async def _http(routes: Sequence[BaseRoute], request: Request, error: Exception) -> Response:
    """What the router itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        methods = _methods_at(routes, request)
        detail = f"{request.method[:20]} is not allowed here."
        headers = {"Allow": ", ".join(methods)}
        refused = refuse("method-not-allowed", detail, field="method", allowed=methods, headers=headers)
    elif error.status_code == HTTPStatus.NOT_FOUND:
        refused = refuse("not-found", "There is nothing at this path; /docs lists what there is.")
    else:
        refused = refuse("bad-request", f"{error.detail}.", headers=error.headers)
    return problem_response(refused, request.url.path)


def _methods_at(routes: Sequence[BaseRoute], request: Request) -> list[str]:
    """What the path allows; Starlette's own Allow names the methods of its first route only."""
    here = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    methods = {method for route in here for method in getattr(route, "methods", None) or ()}
    return sorted(methods | {"HEAD"} if "GET" in methods and has_head(request.url.path) else methods)


async def _bad_cursor(request: Request, error: Exception) -> Response:
    detail = "Take next_cursor of the page before, unchanged."
    return problem_response(refuse("invalid-cursor", detail, field="cursor"), request.url.path)


async def _import_withdrawn(request: Request, error: Exception) -> Response:
    return problem_response(refuse("import-withdrawn", f"{error}."), request.url.path)


async def _machine(request: Request, error: Exception) -> Response:
    """A failure of the database or a disk is temporary. Anything else is a defect."""
    failure = failure_of(error)
    if failure is None:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return await _defect(request, error)
    log.warning("%s %s: %s: %s", request.method, request.url.path, failure.value, error)
    return problem_response(refused_by(failure), request.url.path)


async def _blobs_away(request: Request, error: Exception) -> Response:
    log.warning("%s %s: the blob store: %s", request.method, request.url.path, error)
    detail = "The store of libraries and sources cannot be used now; send the request again."
    refused = refuse("blobs-unavailable", detail, headers={"Retry-After": str(RETRY_SECONDS)})
    return problem_response(refused, request.url.path)


def refused_by(failure: Failure) -> Refused:
    """The answer to a request that met it."""
    if failure is Failure.FULL:
        detail = "Nothing can be written: the disk of the service is full. Nothing of this request was kept."
        return refuse("storage-full", detail, headers={"Retry-After": str(RETRY_SECONDS * 12)})
    detail = "The database does not answer. Nothing of this request was kept; send it again."
    return refuse("database-unavailable", detail, headers={"Retry-After": str(RETRY_SECONDS)})


async def _defect(request: Request, error: Exception) -> Response:
    """The answer to a defect: no internals."""
    return problem_response(refuse("internal", "The service failed; its log says why."), request.url.path)


def _stopping() -> Refused:
    detail = "The service stops before this request could be answered. Send it again."
    return refuse("busy", detail, headers={"Retry-After": str(RETRY_SECONDS), "Connection": "close"})


class AnswerDefects:
    """ASGI middleware: an exception that nothing else handles is logged and answered, and so is a request that the
    server cancels because it stops.

    FastAPI's own handler answers too, but raises again, and uvicorn then resets the connection under its client."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noting_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not started:
                await problem_response(_stopping(), scope["path"])(scope, receive, send)
        except Exception as error:
            # FastAPI's event streams raise this where the client goes while an event is handed on.
            if started and isinstance(error, ExceptionGroup) and error.split(BrokenResourceError)[1] is None:
                return
            if started or scope["type"] != "http":
                raise
            log.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            response = await _defect(Request(scope), error)
            await response(scope, receive, send)
