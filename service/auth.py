"""Who may speak to the service: loopback only without an API key, a Bearer token on every /v1 call with one.

Without a key the Host header must name loopback too: a web page whose name was re-bound to 127.0.0.1 reaches this port,
but its browser still sends the page's own name.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from service.answers import problem_response
from service.errors import Refused, refuse
from storage.exposure import is_loopback

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def host_name(header: str) -> str:
    """The Host header without its port: `[::1]:8000` → `[::1]`."""
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0]


class Gate:
    """ASGI middleware in front of every route, known or not: a path must not tell whether it exists without the key."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._key = api_key.encode() if api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refused = self._judge(scope)
            if refused is not None:
                await problem_response(refused, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _judge(self, scope: Scope) -> Refused | None:
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        if self._key is None:
            return _judge_host(headers.get(b"host", b"").decode("latin-1"))
        path = scope["path"]
        if path != "/v1" and not path.startswith("/v1/"):
            return None
        if bearer_is(headers.get(b"authorization", b""), self._key):
            return None
        detail = "Send the service's API key (its CUKILN_API_KEY) as 'Authorization: Bearer <key>'."
        return refuse(
            "unauthorized",
            detail,
            field="Authorization",
            allowed="Bearer <key>",
            headers={"WWW-Authenticate": 'Bearer realm="cukiln"'},
        )


def bearer_is(header: bytes, key: bytes) -> bool:
    """Whether an Authorization header holds the key."""
    scheme, _, token = header.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), key)


def _judge_host(header: str) -> Refused | None:
    if is_loopback(host_name(header)):
        return None
    detail = (
        "This service runs without an API key and answers to loopback names only. "
        "Call it by one of them, or start it with CUKILN_API_KEY."
    )
    return refuse("wrong-host", detail, field="Host", allowed=list(LOOPBACK_NAMES))
