"""An id for each request: the caller's X-Request-ID, else a new one. The answer has it, a problem's body, and the lines
that are logged for it alone."""

import logging
import re

from asgi_correlation_id import CorrelationIdMiddleware, correlation_id
from fastapi import FastAPI

HEADER = "X-Request-ID"
_CALLERS = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
logging.getLogger("asgi_correlation_id").setLevel(logging.ERROR)  # warns of each id that is replaced


def install(app: FastAPI) -> None:
    """To be called last: what was added before is inside."""
    app.add_middleware(
        CorrelationIdMiddleware,
        header_name=HEADER,
        update_request_header=False,
        validator=lambda given: _CALLERS.fullmatch(given) is not None,
    )


def request_id() -> str | None:
    """Of the request that is handled; None outside of one."""
    return correlation_id.get()


class NameRequests(logging.Filter):
    """Gives each record `request`, to be shown by its format."""

    def filter(self, record: logging.LogRecord) -> bool:
        if (own := request_id()) is not None:
            record.request = f"request {own}: "
        return True
