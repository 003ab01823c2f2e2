"""HEAD wherever GET is (RFC 9110, 9.3.2): probes ask so. FastAPI routes it only where it is declared."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

DECLARED = "/v1/blobs/"  # its HEAD ignores Range, as RFC 9110, 14.2 says
ENDLESS = "/events"  # has no head without the stream: 405


class HeadAsGet:
    """ASGI middleware: a HEAD request is answered by GET's handler, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_ours(scope):
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_head)


def _is_ours(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "HEAD":
        return False
    return has_head(scope["path"]) and not scope["path"].startswith(DECLARED)


def has_head(path: str) -> bool:
    """Whether HEAD is allowed where GET is."""
    return not path.endswith(ENDLESS)
