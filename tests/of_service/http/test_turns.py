"""What comes at once is begun a few at a time: a probe waits for a few, not for all."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from service.auth import PROBE, Gate
from service.http.large_bodies import ACCEPTED_AT_ONCE
from service.http.turns import A_ROUND, Turns
from service.routes import events
from tests.support.fixtures.api import Api, serving
from tests.support.fixtures.queue import wait_for
from workers import wake_ups
from workers.supervisor.valkey import EmbeddedValkey

WATCHERS, EVENTS = 40, 30


class Rounds:
    """The number of the event loop's round, of the loop that calls `count`, while a condition does not hold."""

    def __init__(self, end: Callable[[], bool]) -> None:
        self.number, self.end = 0, end

    def count(self) -> None:
        if not self.end():
            self.number += 1
            asyncio.get_running_loop().call_soon(self.count)


def test_so_many_take_a_turn_in_one_round_in_their_order() -> None:
    async def run() -> list[tuple[int, int]]:
        taken: list[tuple[int, int]] = []
        turns, rounds = Turns(), Rounds(lambda: len(taken) >= 99)

        async def take(number: int) -> None:
            await turns.take()
            taken.append((number, rounds.number))

        rounds.count()
        tasks = [asyncio.create_task(take(number)) for number in range(100)]
        await asyncio.sleep(0)
        tasks[50].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return taken

    taken = asyncio.run(run())
    assert [number for number, _ in taken] == [number for number in range(100) if number != 50]
    assert max(Counter(when for _, when in taken).values()) == A_ROUND


def test_a_probe_overtakes_a_hundred_requests(api: Api) -> None:
    begun: list[str] = []

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["path"])

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    async def run() -> None:
        gate = Gate(answer)
        scope: dict[str, Any] = {"type": "http", "method": "GET", "headers": [(b"host", b"localhost")]}
        paths = ["/v1/jobs"] * 100 + [PROBE]
        scopes = [{**scope, "path": path, "app": api.server.config.app} for path in paths]
        await asyncio.gather(*(gate(scope, receive, send) for scope in scopes))

    asyncio.run(run())
    # Where keys are read first, what waited for that goes on three rounds after it: those that come then need not wait.
    assert len(begun) == 101 and begun.index(PROBE) <= 4 * A_ROUND


def test_a_round_accepts_several_connections(api: Api) -> None:
    connections = 4 * ACCEPTED_AT_ONCE
    rounds = Rounds(lambda: len(api.server.server_state.connections) >= connections)
    with ExitStack() as opened:

        def open_all() -> None:  # on the event loop, which accepts none meanwhile
            for _ in range(connections):
                opened.enter_context(socket.create_connection(("127.0.0.1", api.port)))
            rounds.count()

        api.server.servers[0].get_loop().call_soon_threadsafe(open_all)
        wait_for(rounds.end)
    assert rounds.number <= connections / 2


def test_so_many_events_are_sent_in_one_round_to_all_watchers(
    tmp_path: Path, valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = Counter[int]()
    rounds = Rounds(lambda: sent.total() >= WATCHERS * EVENTS)

    def made(**event: Any) -> Any:
        sent[rounds.number] += 1
        return event_of_fastapi(**event)

    event_of_fastapi = events.ServerSentEvent
    with serving(tmp_path / "api", redis_url=valkey.url) as api, ExitStack() as opened:
        path = f"/v1/jobs/{api.submit().json()['job']}/events"
        with wake_ups.connect(valkey.url) as redis:
            for number in range(EVENTS):
                wake_ups.publish(redis, path.split("/")[3], "it", {"number": number})
        monkeypatch.setattr(events, "ServerSentEvent", made)
        monkeypatch.setattr(wake_ups, "ANSWER_SECONDS", 60.0)  # to count takes a core: none gives Redis up for that
        api.server.servers[0].get_loop().call_soon_threadsafe(rounds.count)
        for _ in range(WATCHERS):
            watcher = opened.enter_context(socket.create_connection(("127.0.0.1", api.port)))
            watcher.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        wait_for(rounds.end)
    assert max(sent.values()) <= 2 * A_ROUND
