"""Requests for keys against a server: `python -m benchmarks.lookup_load` reads a `Load` as JSON and prints the figures.

The open loop sends at the times of a Poisson process, and a latency counts from the time at which its request was due,
also where every connection was still busy then. `late_*_ms` is the generator's own lateness: to the write, of requests
for which a connection was idle. Keys are drawn by Zipf's law with exponent 1; a tenth of them does not exist. Every
answer is checked: of a hit the key in the body and, where there is an ETag of ours, the SHA-256 that it holds.
"""

import asyncio
import hashlib
import json
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np

MISSES = 0.1
_HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True)
class Load:
    """`rate`: requests a second; 0 for a closed loop, in which each connection sends when it is answered.
    `port`: on loopback. `keys`: a file with one on each line, the most asked first.
    `prefix`, `suffix`: of the path."""

    kind: Literal["http", "redis"]
    port: int
    keys: str
    rate: float
    seconds: float
    connections: int = 32
    prefix: str = "/v1/kernels/"
    suffix: str = ""
    seed: int = 1


@dataclass
class Request:
    key: bytes
    exists: bool
    due: float


@dataclass(frozen=True)
class Answer:
    """`status`: 200 or 404, of Redis too. `etag`: the part of ours that is a digest."""

    status: int
    body: bytes
    etag: bytes | None = None

    def is_right(self, request: Request) -> bool:
        if not request.exists:
            return self.status == 404
        whole = self.etag is None or hashlib.sha256(self.body).hexdigest()[:32].encode() == self.etag
        return self.status == 200 and request.key in self.body and whole


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._buffer = bytearray()
        self._answer: asyncio.Future[tuple[float, Answer]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def ask(self, request: Request) -> asyncio.Future[tuple[float, Answer]]:
        """The answer, with the time at which it was there."""
        self._transport.write(wire(self._load, request.key))
        self._answer = asyncio.get_running_loop().create_future()
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        read = read_http if self._load.kind == "http" else read_redis
        if self._answer is not None and (answer := read(self._buffer)) is not None:
            self._buffer.clear()
            self._answer.set_result((time.perf_counter(), answer))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            sys.exit(f"the server closed a connection that waited for an answer: {error}")


def wire(load: Load, key: bytes) -> bytes:
    if load.kind == "redis":
        return b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key)
    path = load.prefix.encode() + key + load.suffix.encode()
    return b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\n\r\n" % path


def read_http(data: bytearray) -> Answer | None:
    """The answer, once all of it is there; it has a Content-Length."""
    end = data.find(_HEAD_END)
    if end < 0:
        return None
    head = bytes(data[:end])
    at = head.lower().find(b"content-length:")
    length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
    if len(data) < end + 4 + length:
        return None
    at = head.find(b'etag: "')
    etag = head[at + 7 :].split(b'"', 1)[0].partition(b"-")[2] if at >= 0 else b""
    return Answer(int(head[9:12]), bytes(data[end + 4 :]), etag if len(etag) == 32 else None)


def read_redis(data: bytearray) -> Answer | None:
    end = data.find(b"\r\n")
    if end < 0:
        return None
    length = int(data[1:end])
    if length < 0:
        return Answer(404, b"")
    return Answer(200, bytes(data[end + 2 : end + 2 + length])) if len(data) >= end + 4 + length else None


@dataclass
class Generator:
    """Sends the next request over each connection that is free, as soon as it is due."""

    load: Load
    requests: Iterator[Request]
    seconds: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    wrong: int = 0
    hits: int = 0
    span: float = 0.0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        connect = (lambda: Connection(self.load)), "127.0.0.1", self.load.port
        connections = [(await loop.create_connection(*connect))[1] for _ in range(self.load.connections)]
        began = time.perf_counter()
        await asyncio.gather(*(self._drive(connection, began) for connection in connections))
        self.span = time.perf_counter() - began

    async def _drive(self, connection: Connection, began: float) -> None:
        for request in self.requests:
            due = free = time.perf_counter() - began
            if self.load.rate:
                due = request.due
            elif free >= self.load.seconds:
                return
            if free < due:
                await asyncio.sleep(due - free)
                self.late.append(time.perf_counter() - began - due)
            answered, answer = await connection.ask(request)
            self.seconds.append(answered - began - due)
            self.hits += request.exists
            self.wrong += not answer.is_right(request)


def sampled(load: Load) -> list[Request]:
    """The requests of an open loop with their times, or enough different ones for a closed loop."""
    keys = Path(load.keys).read_bytes().split()
    rng = np.random.default_rng(load.seed)
    count = int(load.rate * load.seconds) if load.rate else 20_000
    weights = 1.0 / np.arange(1, len(keys) + 1)
    ranks = rng.choice(len(keys), size=count, p=weights / weights.sum())
    missing = rng.random(count) < MISSES
    due = np.cumsum(rng.exponential(1 / load.rate, count)) if load.rate else np.zeros(count)
    absent = [hashlib.sha256(b"%d %d" % (load.seed, n)).hexdigest().encode() for n in range(count)]
    return [
        Request(absent[n] if missing[n] else keys[rank], not missing[n], float(due[n])) for n, rank in enumerate(ranks)
    ]


def percentiles(seconds: Sequence[float], prefix: str = "") -> dict[str, float]:
    """In milliseconds."""
    at = {"p50": 50, "p90": 90, "p99": 99, "p999": 99.9, "max": 100}
    values = 1e3 * np.percentile(np.array(seconds), list(at.values()))
    return {f"{prefix}{name}_ms": round(float(value), 3) for name, value in zip(at, values, strict=True)}


def run(load: Load) -> dict[str, Any]:
    requests = sampled(load)
    generator = Generator(load, iter(requests) if load.rate else cycle(requests))
    # epoll and poll round a timeout up to milliseconds; select takes microseconds.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(generator.run())
    figures = {
        "requests": len(generator.seconds),
        "hits": generator.hits,
        "wrong": generator.wrong,
        "per_second": round(len(generator.seconds) / generator.span, 1),
        **percentiles(generator.seconds),
    }
    return {**figures, **(percentiles(generator.late, "late_") if generator.late else {})}


def in_process(load: Load) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.lookup_load"]
    ended = subprocess.run(command, input=json.dumps(asdict(load)).encode(), stdout=subprocess.PIPE, check=True)
    figures: dict[str, Any] = json.loads(ended.stdout)
    return figures


if __name__ == "__main__":
    print(json.dumps(run(Load(**json.load(sys.stdin)))))
