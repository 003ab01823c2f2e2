"""A service that sends a byte now and again, and never an answer, holds no call, no thread and no socket."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from cukiln import ServiceUnreachable
from cukiln.client import AsyncClient, Client
from cukiln.http import bounded_network
from cukiln.http.bounded_network import bound_network
from cukiln.http.transport import AsyncTransport, Transport
from tests.support.fixtures.client import MATMUL
from tests.support.fixtures.queue import wait_for
from tests.support.run.forget_caches import forget_caches

OK = b"HTTP/1.1 200 OK\r\n"
ZEROS = gzip.compress(bytes(2**23), mtime=0)[:32]  # behind which each byte of 0 is about a thousand zeros
# What comes at first, and then again and again.
DRIPS = {
    "of a head": (OK, b"x"),
    "heads that are no answer": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "of a body": (OK + b"Content-Length: 1000000\r\n\r\n", b"x"),
    "of a body behind gzip": (OK + b"Content-Encoding: gzip\r\n\r\n" + ZEROS, b"\0"),
    "of an error": (b"HTTP/1.1 500 No\r\nContent-Length: 1000000\r\n\r\n", b"x"),
}
Of = Callable[[Any], Any]
CALLS: dict[str, Of] = {
    "job": lambda client: client.job("job1"),
    "jobs": lambda client: next(client.jobs()) if isinstance(client, Client) else anext(client.jobs()),
    "events": lambda client: next(e) if isinstance(e := client.events("job1"), Iterator) else anext(e),
}


# A body that drips is what a stream of events is.
CASES = [(call, drip) for call in CALLS for drip in DRIPS if (call, drip[:9]) != ("events", "of a body")]
of_calls = pytest.mark.parametrize(
    ("call", "dripping"), CASES, indirect=["dripping"], ids=[f"{call}, {drip}" for call, drip in CASES]
)


@dataclass
class Dripping:
    url: str
    accepted: int = 0
    open: set[socket.socket] = field(default_factory=set)


@pytest.fixture(params=DRIPS)
def dripping(request: pytest.FixtureRequest) -> Iterator[Dripping]:
    first, again = DRIPS[request.param]
    listener = socket.create_server(("127.0.0.1", 0))
    service = Dripping(f"http://127.0.0.1:{listener.getsockname()[1]}")
    over = threading.Event()

    def drip(connection: socket.socket) -> None:
        try:
            for part in itertools.chain([first], itertools.repeat(again)):
                connection.sendall(part)
                if over.wait(0.01):
                    break
        except OSError:  # the client has closed it
            pass
        service.open.discard(connection)
        connection.close()

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            service.accepted += 1
            service.open.add(connection)
            threading.Thread(target=drip, args=[connection], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield service
    over.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def calls_under_way() -> int:
    return sum(thread.name == "cukiln-call" for thread in threading.enumerate())


def test_a_late_lookup_leaves_no_thread_and_no_socket(dripping: Dripping) -> None:
    with Client(dripping.url, lookup_budget=0.1) as client:
        for _ in range(3):
            assert "no answer" in str(client.lookup([MATMUL])[0].unanswered)
        wait_for(lambda: calls_under_way() == 0 and not dripping.open)
        assert dripping.accepted == 3


@pytest.mark.timeout(30)
@of_calls
def test_a_call_without_a_budget_ends_too(call: str, dripping: Dripping) -> None:
    transport = Transport(dripping.url, timeout=0.2, attempts=1)
    with Client(transport=transport) as client, pytest.raises(ServiceUnreachable, match="no answer"):
        CALLS[call](client)
    wait_for(lambda: not dripping.open)


@pytest.mark.timeout(30)
@of_calls
def test_an_awaited_one_does(call: str, dripping: Dripping) -> None:
    async def asked() -> None:
        transport = AsyncTransport(dripping.url, timeout=0.2, attempts=1)
        async with AsyncClient(transport=transport, lookup_budget=0.1) as client:
            with pytest.raises(ServiceUnreachable, match="no answer"):
                await CALLS[call](client)
            assert "no answer" in str((await client.lookup([MATMUL]))[0].unanswered)

    asyncio.run(asked())
    wait_for(lambda: not dripping.open)


def test_a_network_that_no_limit_can_be_set_for_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    forget_caches(bounded_network)
    other = httpx2.MockTransport(lambda request: httpx2.Response(200))
    with (
        httpx2.Client() as whole,
        httpx2.Client(transport=other) as without,
        httpx2.Client(transport=other) as another,
    ):
        bound_network(whole)
        assert not caplog.records
        for client in (without, another):
            bound_network(client)
    (said,) = caplog.records
    assert httpx2.__version__ in said.message and "2.16 has them" in said.message


def test_a_call_that_is_repeated_has_its_time_again(dripping: Dripping) -> None:
    transport = Transport(dripping.url, timeout=0.1, attempts=3)
    transport.sleep = lambda seconds: None
    with Client(transport=transport) as client, pytest.raises(ServiceUnreachable):
        client.job("job1")
    assert dripping.accepted == 3
