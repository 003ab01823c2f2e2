"""Whether the API answers while all of its resource limits are stressed at once: 2,000 connections that each send half
of a request, twelve bodies of 8 MB at a time, an import of 66 MB, which is more than is allowed, and one of as much as
is allowed.

The API is by itself, on a data folder with winners for 100 problems. Beside the attack a probe every 0.1 s and 50
lookups a second, each over a new connection, with latencies from when they were due; `quiet`: the same before. The
peer, measured at the same time, is a server of Python's standard library that is not attacked: the latency that the
machine itself adds. Memory is the peak resident size (VmHWM) of the API's processes, added.
"""

import argparse
import asyncio
import contextlib
import http.server
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks.harness import TARGET, body, peak_memory, places, problem, publish, scratch_folder, spawned, started
from benchmarks.keep_result import keep_result, options
from benchmarks.lookup_load import percentiles
from storage.config.files import raise_descriptor_limit
from storage.config.settings import load_settings
from storage.database.session import Database
from workers.supervisor.serve import child_environment
from workers.supervisor.start_checks import free_port

SLOW_CONNECTIONS = 2_000
BODY_BYTES = 8 * 2**20 - 1_000
LARGE_BODIES = 12
IMPORT_BYTES = 66 * 2**20
LOOKUPS_PER_SECOND, PROBES_PER_SECOND = 50, 10
HALF_A_HEAD = b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
HALF_A_BODY = (
    b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n{"
)
WINNERS = 100


@dataclass
class Answers:
    """Seconds and statuses of all answers."""

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    def figures(self) -> dict[str, Any]:
        return {"answers": len(self.seconds), **percentiles(self.seconds), "statuses": dict(self.statuses)}


async def ask(port: int, path: str, body: bytes | None = None, patience: float = 120.0) -> str:
    """The status of one request over a new connection, or what went wrong."""
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    try:
        async with asyncio.timeout(patience):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(head.encode() + b"\r\n" + (body or b""))
                line = await reader.readline()
                while await reader.read(1 << 16):
                    pass
                return line.split()[1].decode() if line else "closed"
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        return type(error).__name__


async def at_rate(per_second: float, seconds: float, call: Callable[[], Awaitable[str]]) -> Answers:
    """Calls at their due times, whether the ones before are answered or not."""
    answers = Answers()

    async def timed(due: float) -> None:
        status = await call()
        answers.statuses[status] += 1
        answers.seconds.append(time.perf_counter() - due)

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(int(per_second * seconds)):
            due = start + number / per_second
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(timed(due))
    return answers


async def measured(port: int, peer: int, seconds: float) -> dict[str, Any]:
    draw = random.Random(1)

    def lookup() -> Awaitable[str]:
        return ask(port, "/v1/lookups", body([draw.randrange(WINNERS)]))

    probes, lookups, peers = await asyncio.gather(
        at_rate(PROBES_PER_SECOND, seconds, lambda: ask(port, "/healthz")),
        at_rate(LOOKUPS_PER_SECOND, seconds, lookup),
        at_rate(PROBES_PER_SECOND, seconds, lambda: ask(peer, "/")),
    )
    return {"healthz": probes.figures(), "lookups": lookups.figures(), "peer": peers.figures()}


def large_bodies() -> list[bytes]:
    problems = [{**problem(0), "name": "n" * 240 + str(number)} for number in range(10_000)]
    whole = json.dumps({"problems": problems, "target": TARGET}).encode()
    return [
        _filled(b"[]"),
        _filled(b"{}"),
        _filled(b"0"),
        _filled(b'""'),
        b'["' + b"x" * (BODY_BYTES - 4) + b'"]',
        whole,
    ]


def _filled(value: bytes) -> bytes:
    return b"[" + (value + b",") * ((BODY_BYTES - 10) // (len(value) + 1)) + value + b"]"


class Attack:
    """Everything at once, until it is cancelled."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.statuses: dict[str, Counter[str]] = {"bodies": Counter(), "imports": Counter()}
        self.reopened = 0
        self._opened = 0
        self._draw = random.Random(2)
        self._bodies = large_bodies()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(SLOW_CONNECTIONS):
                group.create_task(self._slow(HALF_A_BODY if number % 3 == 0 else HALF_A_HEAD))
            for number in range(LARGE_BODIES):
                group.create_task(self._send(number))
            group.create_task(self._import(IMPORT_BYTES))
            group.create_task(self._import(2 * BODY_BYTES))

    async def _slow(self, sent: bytes) -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(sent)
                self._opened += 1
                if self._opened == SLOW_CONNECTIONS:
                    print("open", flush=True)
                await reader.read(1)
                writer.transport.abort()
            self.reopened += 1
            await asyncio.sleep(10.0 * self._draw.random())

    async def _send(self, number: int) -> None:
        paths = ("/v1/jobs", "/v1/lookups")
        while True:
            body = self._bodies[number % len(self._bodies)]
            status = await ask(self.port, paths[number % 2], body)
            self.statuses["bodies"][status] += 1
            number += 1

    async def _import(self, size: int) -> None:
        problem = b'{"a": "' + b"y" * 4_000 + b'"},'
        body = b'{"schema": 1, "problems": [' + problem * (size // len(problem) - 1) + b"{}]}"
        while True:
            self.statuses["imports"][await ask(self.port, "/v1/results", body)] += 1


def attack(port: int) -> None:
    """Until SIGTERM; in a process of its own, so that it does not delay the measuring one."""
    raise_descriptor_limit()

    async def run() -> None:
        attacking = Attack(port)
        attacks = asyncio.create_task(attacking.run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, attacks.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await attacks
        counts = {name: dict(statuses) for name, statuses in attacking.statuses.items()}
        print(json.dumps({**counts, "slow_connections_reopened": attacking.reopened}))

    asyncio.run(run())


class Ok(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def peak_of_all(pid: int) -> int:
    """Of the process and its descendants, added."""
    root = psutil.Process(pid)
    return sum(peak_memory(process.pid) for process in (root, *root.children(recursive=True)))


def run(seconds: float) -> dict[str, Any]:
    peer = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ok)
    threading.Thread(target=peer.serve_forever, daemon=True).start()
    with scratch_folder() as folder:
        settings = load_settings(data_dir=folder, port=free_port("127.0.0.1"), gpus="none")
        database = Database(settings.database_url)
        with started(settings) as (client, _):
            job = client.tune([problem(0)], target=TARGET, search={"level": 0})
            publish(database, client.kernel(job.problems[0].key), places(WINNERS))
        database.dispose()
        log, environment = folder / "api.log", child_environment(settings)
        command = [sys.executable, "-m", "service"]
        with log.open("wb") as output, spawned(command, settings.port, env=environment, stderr=output) as api:
            quiet = asyncio.run(measured(settings.port, peer.server_port, seconds / 3))
            before = peak_of_all(api.pid)
            attacker = [sys.executable, "-m", "benchmarks.bench_doors", "--attack", str(settings.port)]
            with spawned(attacker, settings.port, env=environment, stdout=subprocess.PIPE) as attacking:
                assert attacking.stdout is not None
                attacking.stdout.readline()  # all are open
                attacked = asyncio.run(measured(settings.port, peer.server_port, seconds))
                attacking.terminate()
                sent = json.loads(attacking.communicate(timeout=200)[0].splitlines()[-1])
            return {
                "benchmark": "doors",
                "healthz_worst_ms": attacked["healthz"]["max_ms"],
                "lookup_p99_ms": attacked["lookups"]["p99_ms"],
                "memory_bytes": peak_of_all(api.pid),
                "memory_before_bytes": before,
                "log_bytes": log.stat().st_size,
                "attacked": attacked,
                "quiet": quiet,
                "sent": sent,
            }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the attack (default: 30)")
    parser.add_argument("--attack", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    raise_descriptor_limit()
    if arguments.attack is not None:
        attack(arguments.attack)
    else:
        keep_result(run(arguments.seconds), keep=not arguments.no_file)


if __name__ == "__main__":
    main()
