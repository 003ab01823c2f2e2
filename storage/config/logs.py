"""How every server process logs: one line per event on stderr, and only so many of one kind."""

import logging
import re
import sys
from dataclasses import dataclass

from cukiln.printable import printable

FORMAT = "%(asctime)s %(levelname)s %(name)s [%(process)d] %(request)s%(message)s"
SPAN_SECONDS = 60.0
MOST_WARNINGS, MOST_OTHERS = 10, 1_000
"""Lines of one kind in that time. A listening socket without descriptors for its callers wrote 9,000 in a second."""
_NUMBERS = re.compile(r"0x[0-9a-f]+|[0-9]+")
_KIND_LENGTH = 200


def set_up_logging(level: str = "INFO", *filters: logging.Filter) -> None:
    """`level` as CUKILN_LOG_LEVEL gives it. Called once, by the process that owns stderr. A filter may give a record
    `request`, which stands before the message."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter(FORMAT))
    for added in filters:
        handler.addFilter(added)
    handler.addFilter(LimitRepeats(handler))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("alembic").setLevel(logging.WARNING)  # logs at INFO each time it reads the schema
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # logs each request at INFO


class PrintableFormatter(logging.Formatter):
    """A message is one line, whatever a request or a tool put into it; a traceback below it has its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = printable(record.message)
        record.__dict__.setdefault("request", "")
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), lines=True)


@dataclass
class _Repeats:
    since: float
    passed: int = 0
    held_back: int = 0


class LimitRepeats(logging.Filter):
    """Passes so many records of one kind in a span of time, and logs later how many more there were.

    A kind is what one line of code writes at one level, with one kind of exception, whatever its numbers."""

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__()
        self._handler = handler
        self._kinds: dict[tuple[str, int, str, str], _Repeats] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        self._handler.acquire()  # a handler runs its filters before it takes its lock, which a fork renews
        try:
            self._end_spans(record.created)
            repeats = self._kinds.setdefault(_kind(record), _Repeats(record.created))
            if repeats.passed < (MOST_WARNINGS if record.levelno >= logging.WARNING else MOST_OTHERS):
                repeats.passed += 1
                return True
            repeats.held_back += 1
            return False
        finally:
            self._handler.release()

    def _end_spans(self, now: float) -> None:
        ended = [kind for kind, repeats in self._kinds.items() if abs(now - repeats.since) > SPAN_SECONDS]
        for kind in ended:
            repeats = self._kinds.pop(kind)
            if repeats.held_back:
                name, level, text, _ = kind
                message = f"{repeats.held_back:,} more of these in {now - repeats.since:.0f} s: {text}"
                self._handler.emit(logging.LogRecord(name, level, "", 0, message, None, None))


def _kind(record: logging.LogRecord) -> tuple[str, int, str, str]:
    failed = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else ""
    return record.name, record.levelno, _NUMBERS.sub("#", str(record.msg)[:_KIND_LENGTH]), failed
