"""Access: loopback only while there are no keys, then a key with the call's scope.

Without keys the Host header must name loopback too: a web page whose name was re-bound to 127.0.0.1 reaches this port,
but its browser still sends the page's own name.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from service.context import Service, service_of
from service.http.answers import problem_response
from service.http.errors import Refused, refuse
from service.http.handle_errors import refused_by
from service.http.turns import Turns
from service.keyring import ANYONE, Caller, WrongKeys
from storage.config.settings import is_loopback
from storage.database.database_errors import DATABASE_ERRORS, Failure, failure_of
from storage.entities import keys

log = logging.getLogger("cukiln.service")

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="cukiln"'}
SAFE_METHODS = ("GET", "HEAD")
PROBE = "/healthz"
OPEN_PATHS = (PROBE, "/readyz", "/docs", "/openapi.json")
"""They reveal nothing of any job: no key is needed, and they answer without the database."""
Handler = TypeVar("Handler", bound=Callable[..., object])


def needs(scope: keys.Scope) -> Callable[[Handler], Handler]:
    """Of a route's handler: the scope that its callers need. Without it reading needs `read`, all else `admin`."""

    def mark(handler: Handler) -> Handler:
        handler.needs = scope  # type: ignore[attr-defined]
        return handler

    return mark


async def may_call(request: Request) -> None:
    """A dependency of every call, before its body is read; async, or FastAPI would take a thread. Raises Refused (403).

    Pages ask for a missing key themselves."""
    caller: Caller | None = caller_of(request)
    if caller is None or not request.url.path.startswith("/v1/"):
        return
    default: keys.Scope = "read" if request.method in SAFE_METHODS else "admin"
    needed: keys.Scope = getattr(request.scope["route"].endpoint, "needs", default)
    require_scope(caller, needed, "this call")


def require_scope(caller: Caller, needed: keys.Scope, what: str) -> None:
    """Raises Refused (403) where the caller's key does not have it."""
    if not caller.may(needed):
        has = ", ".join(scope for scope in keys.SCOPES if caller.may(scope))
        detail = f"The key {caller.name!r} has the scopes {has}; {what} needs {needed}."
        raise refuse("forbidden", detail, field="Authorization", allowed=[needed])


def admitted(request: Request) -> Caller:
    """The caller of a request that the gate has let in."""
    caller = caller_of(request)
    assert caller is not None, "the gate lets no call in without one"
    return caller


def caller_of(request: Request) -> Caller | None:
    """What sent the request; None on a page that was asked for without a key."""
    caller: Caller | None = request.scope.get("cukiln.caller")
    return caller


def host_name(header: str) -> str:
    """The Host header without its port: `[::1]:8000` → `[::1]`."""
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0]


class Gate:
    """ASGI middleware in front of every route: without a key, no response reveals whether a path exists.

    A request with a large body is admitted here before the second process gets it (`service.http.large_bodies`): wrong
    keys are counted in the first process alone. `cukiln.hand_over` and `cukiln.admitted` of the scope say which."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._wrong = WrongKeys()
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if scope["path"] != PROBE:
                await self._turns.take()
            try:
                scope["cukiln.caller"] = await self._admit(scope)
            except Refused as refused:
                await problem_response(refused, scope["path"])(scope, receive, send)
                return
            if (hand_over := scope.get("cukiln.hand_over")) is not None:
                hand_over()
                return
        await self._app(scope, receive, send)

    async def _admit(self, scope: Scope) -> Caller | None:
        """The caller; None on open paths, and on pages, which ask for a key. Raises Refused."""
        service, path = service_of(Request(scope)), scope["path"]
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        is_call, is_open = path == "/v1" or path.startswith("/v1/"), path in OPEN_PATHS or path.startswith("/static/")
        try:
            if not await service.keys.needs_key(as_last_read=path == PROBE):
                _require_loopback_name(headers.get(b"host", b"").decode("latin-1"))
                return ANYONE
            if is_open:
                return None
            caller = await self._caller(service, scope, headers.get(b"authorization", b""))
        except DATABASE_ERRORS as error:
            if is_open:
                return None
            raise refused_by(failure_of(error) or Failure.UNAVAILABLE) from error
        if caller is None and is_call:
            detail = "Send an API key, CUKILN_API_KEY or one of `cukiln keys create`, as 'Authorization: Bearer <key>'."
            raise refuse("unauthorized", detail, field="Authorization", allowed="Bearer <key>", headers=CHALLENGE)
        return caller

    async def _caller(self, service: Service, scope: Scope, header: bytes) -> Caller | None:
        scheme, _, rest = header.partition(b" ")
        token = rest.strip().decode("latin-1")
        if scheme.lower() != b"bearer" or not token:
            return None
        if scope.get("cukiln.admitted"):
            return await service.keys.caller(token)
        address = scope["client"][0] if scope.get("client") else "-"
        if wait := self._wrong.wait_seconds(address, token):
            detail = f"Too many wrong keys came from {address}."
            raise refuse("too-many-wrong-keys", detail, headers={"Retry-After": str(math.ceil(wait))})
        caller = await service.keys.caller(token)
        if caller is None:
            self._wrong.note_wrong(address)
            parts = keys.parts_of(token)
            log.warning("a wrong key came from %s%s", address, f", with the id {parts[0]}" if parts else "")
        else:
            self._wrong.note_right(address, token)
        return caller


def _require_loopback_name(header: str) -> None:
    if is_loopback(host_name(header)):
        return
    detail = (
        "This service runs without an API key and answers to loopback names only. "
        "Call it by one of them, or start it with CUKILN_API_KEY."
    )
    raise refuse("wrong-host", detail, field="Host", allowed=list(LOOPBACK_NAMES))
