"""HEAD wherever GET is (RFC 9110, 9.3.2): probes ask so. FastAPI routes none."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

ENDLESS = "/events"  # has no head without the stream: 405


class HeadAsGet:
    """ASGI middleware: a HEAD request is answered by GET's handler, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD" or not has_head(scope["path"]):
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_head)


def has_head(path: str) -> bool:
    """Whether HEAD is allowed where GET is."""
    return not path.endswith(ENDLESS)
