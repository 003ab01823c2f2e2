"""A log is one line for each event, and no fault that repeats fills the disk with it."""

from __future__ import annotations

import asyncio
import io
import logging
import resource
import socket
import sys
import threading
from collections.abc import Iterator

import pytest

from storage.config.logs import FORMAT, MOST_WARNINGS, SPAN_SECONDS, LimitRepeats, PrintableFormatter


@pytest.fixture
def log() -> Iterator[logging.Handler]:
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(PrintableFormatter(FORMAT))
    handler.addFilter(LimitRepeats(handler))
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


def lines(log: logging.Handler) -> list[str]:
    assert isinstance(log, logging.StreamHandler)
    written: str = log.stream.getvalue()
    return written.splitlines()


def record(message: str, *args: object, at: float = 0.0, level: int = logging.WARNING) -> logging.LogRecord:
    made = logging.LogRecord("cukiln.test", level, __file__, 1, message, args, None)
    made.created = at
    return made


def test_of_one_kind_so_many_pass_and_the_rest_is_counted(log: logging.Handler) -> None:
    for number in range(1000):
        log.handle(record("cannot do %d: %s", number, "because", at=number / 1000))
    assert len(lines(log)) == MOST_WARNINGS
    log.handle(record("something else", at=2.0))
    assert len(lines(log)) == MOST_WARNINGS + 1
    log.handle(record("something else", at=SPAN_SECONDS + 1))
    assert f"{1000 - MOST_WARNINGS} more of these in 61 s: cannot do %d: %s" in lines(log)[-2]


def test_a_kind_comes_back_after_its_span_also_where_the_clock_went_back(log: logging.Handler) -> None:
    for at in (1000.0, 500.0):
        for _ in range(100):
            log.handle(record("again", at=at))
    assert sum(line.endswith("again") and "more of" not in line for line in lines(log)) == 2 * MOST_WARNINGS


def test_threads_that_log_at_once_while_spans_end_do_not_disturb_each_other(log: logging.Handler) -> None:
    failed: list[BaseException] = []

    def many(thread: int) -> None:
        try:
            for number in range(2000):
                name = "".join("abcdefghij"[int(digit)] for digit in f"{thread}{number:04}")
                log.handle(record(name, at=number * SPAN_SECONDS / 300))
        except BaseException as error:  # noqa: BLE001 - shown below
            failed.append(error)

    threads = [threading.Thread(target=many, args=(thread,)) for thread in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failed == []


def test_a_socket_without_descriptors_for_its_callers_does_not_fill_the_log(log: logging.Handler) -> None:
    async def run() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0, backlog=500)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as caller:
            caller.setblocking(False)
            # Every number below the limit is taken: a call to accept has none left.
            resource.setrlimit(resource.RLIMIT_NOFILE, (caller.fileno() + 1, hard))
            try:
                taken = []
                while True:
                    try:
                        taken.append(socket.socket())
                    except OSError:
                        break
                caller.connect_ex(server.sockets[0].getsockname())
                await asyncio.sleep(0.1)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for connection in taken:
                    connection.close()
        server.close()

    asyncio.run(run())
    warned = [line for line in lines(log) if "out of system resource" in line]
    assert 1 <= len(warned) <= MOST_WARNINGS


def test_text_of_a_request_neither_breaks_a_line_nor_reaches_the_terminal(log: logging.Handler) -> None:
    log.handle(record("GET %s failed", "/a\n2026-01-01 ERROR forged \x1b[2J\x9b2J"))
    [line] = lines(log)
    assert line.endswith(r"GET /a\n2026-01-01 ERROR forged \x1b[2J\x9b2J failed")


def test_a_traceback_keeps_its_lines(log: logging.Handler) -> None:
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        logging.getLogger("cukiln.test").exception("it failed")
    assert len(lines(log)) > 3
    assert lines(log)[-1] == r"ValueError: \x1b[2J"
