"""What every benchmark has: its options, and its result.

A benchmark's last line of output is one JSON object with machine and date; a complete run also writes it to
`benchmarks/results/`, unless `--no-file` is given.
"""

import argparse
import datetime
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def options(documentation: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=(documentation or "").partition("\n\n")[0])
    parser.add_argument("--no-file", "--no-keep", action="store_true", help="print the result without keeping it")
    return parser


def keep_result(result: Mapping[str, Any], *, keep: bool = True) -> None:
    """Print `result` with machine and date as the last line; with `keep` also write it to `benchmarks/results/`."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    whole = {**result, "machine": machine(), "date": today}
    if keep:
        RESULTS.mkdir(exist_ok=True)
        name = f"{result['benchmark']}-{today}.json"
        (RESULTS / name).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(whole), flush=True)


def machine() -> dict[str, Any]:
    """What the figures were measured on: processor, cores, memory in GiB, Python. No host name."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def load() -> float:
    return round(os.getloadavg()[0], 1)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(("model name", "CPU implementer")):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
