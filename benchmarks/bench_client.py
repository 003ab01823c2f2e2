"""What the client costs the program that calls it: a hit, a hit from the disk, a service that is dead, the import.

A service on loopback tunes one problem; its record, under many keys, fills the client's cache. `hit_us`: a prepared
problem that this process has looked up before; `hit_dict_us`: the same by its dict; `disk_us`: one that an earlier
process has looked up; `dead_service_ms`: one that is not known, once the breaker is open; `import_ms`: of `import
cukiln` in a new process; `torch_call_us`: a call of `cukiln.torch.matmul` whose launch does nothing;
`torch_call_grad_us`: one of which a gradient may be asked (`benchmarks/torch_calls.py`, with what they compare with).
Beside them `hung_service_ms`, the first lookup of a service that accepts and is silent, whose budget is 1 s,
`refused_ms`, that of a closed port, and `client_import_ms`, with all that `cukiln.Client` needs. All are medians.
"""

import hashlib
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cukiln
from benchmarks.harness import median_seconds, scratch_folder, started
from benchmarks.keep_result import keep_result, load, options
from benchmarks.torch_calls import torch_calls
from cukiln.local_cache import CachedAnswer
from cukiln.operations.record_memory import record_bytes
from storage.config.settings import load_settings
from workers.supervisor.start_checks import free_port

TARGET = "sm_90a"
PROBLEM: dict[str, Any] = {"operator": "matmul", "m": 512, "n": 3072, "k": 768, "layout": "nt"}
HITS, BATCH = 200, 100
ON_DISK = 500
IMPORTS = 15
HUNG = 3


def a_record(folder: Path) -> cukiln.WinnerRecord:
    """Of a real job."""
    settings = load_settings(data_dir=folder, port=0, gpus="none")
    with started(settings) as (client, _):
        client.tune([PROBLEM], target=TARGET, search={"level": 0})  # type: ignore[list-item]
        (found,) = client.lookup([PROBLEM], target=TARGET)  # type: ignore[list-item]
    if found.record is None:
        raise SystemExit(f"the problem has no winner: {found.unanswered}")
    return found.record


def fill(client: cukiln.Client, record: cukiln.WinnerRecord) -> list[cukiln.Prepared]:
    """The cache of `client`, with a record of its own for each problem."""
    prepared = []
    for number in range(ON_DISK):
        request = client.prepare({**PROBLEM, "m": 512 + number}, target=TARGET)  # type: ignore[typeddict-item]
        data = record_bytes(record.model_copy(update={"revision": number}))
        answer = CachedAnswer(client.url, record.key, number, hashlib.sha256(data).hexdigest(), time.time())
        client.cache.keep_answer(request.digest, answer, data)
        prepared.append(request)
    return prepared


def hits(folder: Path, record: cukiln.WinnerRecord) -> dict[str, float]:
    url = closed_port()
    with cukiln.Client(url, cache_dir=folder) as client:
        prepared = fill(client, record)
    with cukiln.Client(url, cache_dir=folder) as client:
        places = iter(prepared)
        disk = median_seconds(lambda: client.lookup([next(places)]), ON_DISK)
        hit = median_seconds(lambda: client.lookup([prepared[0]]), HITS, BATCH)
        by_dict = median_seconds(lambda: client.lookup([PROBLEM], target=TARGET), HITS, BATCH)  # type: ignore[list-item]
        if client.lookup([PROBLEM], target=TARGET)[0].record is None:  # type: ignore[list-item]
            raise SystemExit("what was timed were misses")
    figures = {"hit_us": hit, "hit_dict_us": by_dict, "disk_us": disk}
    return {name: round(1e6 * seconds, 2) for name, seconds in figures.items()}


def misses(folder: Path) -> dict[str, float]:
    """Of services that do not answer."""
    hung = []
    for _ in range(HUNG):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with cukiln.Client(url, cache_dir=folder) as client:
                hung.append(median_seconds(lambda: client.lookup([PROBLEM], target=TARGET), 1))  # type: ignore[list-item]
    with cukiln.Client(closed_port(), cache_dir=folder) as client:
        refused = median_seconds(lambda: client.lookup([PROBLEM], target=TARGET), 3)  # type: ignore[list-item]
        dead = median_seconds(lambda: client.lookup([PROBLEM], target=TARGET), HITS)  # type: ignore[list-item]
    return {
        "dead_service_ms": round(1e3 * dead, 3),
        "hung_service_ms": round(1e3 * statistics.median(hung), 1),
        "refused_ms": round(1e3 * refused, 2),
    }


def closed_port() -> str:
    return f"http://127.0.0.1:{free_port('127.0.0.1')}"


def import_ms(statement: str) -> float:
    """In a new process, whose compiled modules are there."""
    code = f"import time\nbegan = time.perf_counter()\n{statement}\nprint(time.perf_counter() - began)"
    times = []
    for _ in range(IMPORTS):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        times.append(float(done.stdout))
    return round(1e3 * statistics.median(times), 1)


def main() -> None:
    arguments = options(__doc__).parse_args()
    with scratch_folder() as folder:
        record = a_record(folder / "data")
        result = {
            "benchmark": "client",
            "load_before": load(),
            "record_bytes": len(record_bytes(record)),
            **hits(folder / "hits", record),
            **misses(folder / "misses"),
            **torch_calls(record),
            "import_ms": import_ms("import cukiln"),
            "client_import_ms": import_ms("import cukiln; cukiln.Client"),
        }
    keep_result(result, keep=not arguments.no_file)


if __name__ == "__main__":
    main()
