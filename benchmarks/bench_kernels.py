"""The kernels that tuning finds for the public shapes on this machine's GPU, against the vendor's library.

Run with `make bench-kernels` or `python -m benchmarks.bench_kernels [--only PATTERN] [--level N] [--budget SECONDS]`.
Measures the device's ceilings, then tunes `shapes.json`, as far as there are operators for it, and the gradients of its
convolutions by the stand-alone path (`workers.measure_bundle`): every candidate is proved and timed, the best are
compared in turns with the vendor's library. It ends within `--budget`, by when as many shapes as possible of each
operator and dtype have a first comparison; everything stands in `--out`, and the same command goes on with it. Without
a GPU it says so, exits with 2 and writes nothing.

The last line is one JSON object, also where the run was cut short; it is OUT/kernels.json too, and is kept under
`benchmarks/results/` where all shapes were measured:

- `complete`: whether every candidate was measured; `without_winner` names the shapes that have no time yet,
  `without_vendor` those that were not compared with the vendor's library.
- `shapes`: per shape `us` (ours) and `vendor_us` from the same comparison, `speed` = vendor_us / us (over 1: ours is
  faster; none where the vendor's result is outside our bound: `vendor_off`), TFLOP/s, GB/s of the bytes that any
  algorithm must move, and `of_ceiling`, the share of what this very device reached (`ceilings`): the time that the
  slower of its two roofs needs, over ours.
- `by_kind`: per operator and dtype the geometric mean of `speed`, the worst, and how many are at least 1.
- `prediction`: how predictions rank against measurements (`benchmarks.prediction_quality`).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.keep_result import keep_result
from benchmarks.prediction_quality import quality
from benchmarks.shapes import every_shape
from codegen.operators import operator, operators
from codegen.schedule import Schedule
from workers import measure_bundle
from workers.elsewhere.measured import RESULTS_FILE, write_whole
from workers.elsewhere.show import best_of, vendor_off, vendor_us
from workers.gpu.interface import Device, GpuMissing
from workers.gpu.measure_on_gpu import child_environment, probe
from workers.processes import Limits, Processes

LIMITS = Limits(wall_seconds=300, cpu_seconds=300, memory_bytes=32 << 30, output_bytes=1 << 20)
WRONG_USE = 2
CEILINGS_FILE, RESULT_FILE = "ceilings.json", "kernels.json"
DEFAULT_OUT = Path("build/bench-kernels")
# Seconds: with the ceilings, all that starts and ends, and a comparison under way the whole stays within 10 minutes.
DEFAULT_BUDGET = 480.0
LEAST_BUDGET = 1.0  # that is left for tuning after slow ceilings: what earlier runs found is shown even so


def shapes(pattern: str) -> list[dict[str, Any]]:
    """The public shapes of known operators, gradients of convolutions too, whose names match, such as `llama3_8b/*`."""
    known = operators()
    return [
        shape for shape in every_shape() if shape["operator"] in known and fnmatch.fnmatchcase(shape["name"], pattern)
    ]


def figures(problem: Mapping[str, Any], ceilings: Mapping[str, float]) -> dict[str, Any] | None:
    """Of one shape; None where nothing was found for it."""
    best = best_of(problem)
    if best is None:
        return None
    name, us = best
    kind = operator(problem["operator"])
    parsed = kind.parse(problem["problem"])
    schedule = next(one["schedule"] for one in problem["candidates"] if one["candidate"] == name)
    cost = kind.cost(parsed, Schedule.of(schedule))
    moved = cost.bytes_read + cost.bytes_written
    vendor, off = vendor_us(problem), vendor_off(problem)
    roofs = [moved / (ceilings["copy_gb_s"] * 1e3)] if "copy_gb_s" in ceilings else []
    if rate := ceilings.get(f"tflops_{arithmetic(problem['problem'])}"):
        roofs.append(cost.flops / (rate * 1e6))
    return {
        "us": round(us, 3),
        "vendor_us": None if vendor is None else round(vendor, 3),
        "speed": None if vendor is None or off else round(vendor / us, 4),
        **({"vendor_off": off} if off else {}),
        "tflops": round(cost.flops / us * 1e-6, 3),
        "gb_s": round(moved / us * 1e-3, 1),
        "of_ceiling": round(max(roofs) / us, 4) if roofs else None,
        "candidates": len(problem["candidates"]),
        "right": sum(one["verdict"] == "ok" for one in problem["candidates"]),
        "schedule": schedule,
    }


def arithmetic(problem: Mapping[str, Any]) -> str:
    """What the products are computed in: the dtype, or tf32 where fp32 may be rounded to it."""
    return "tf32" if problem.get("allow_tf32") else str(problem["dtype"])


def by_kind(problems: Iterable[Mapping[str, Any]], found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Per operator and dtype, of the shapes that the vendor's library computes too."""
    speeds: dict[str, dict[str, float]] = {}
    for problem in problems:
        speed = found.get(problem["name"], {}).get("speed")
        if speed is not None:
            kind = f"{problem['operator']} {arithmetic(problem['problem'])}"
            speeds.setdefault(kind, {})[problem["name"]] = speed
    return {
        kind: {
            "shapes": len(members),
            "geometric_mean": round(math.exp(sum(map(math.log, members.values())) / len(members)), 4),
            "worst": min(members.values()),
            "worst_shape": min(members, key=lambda name: members[name]),
            "at_least_1": sum(speed >= 1 for speed in members.values()),
        }
        for kind, members in sorted(speeds.items())
    }


def summarised(results: Mapping[str, Any], ceilings: Mapping[str, float]) -> dict[str, Any]:
    """The whole result from a results.json."""
    problems = results["problems"]
    found = {problem["name"]: entry for problem in problems if (entry := figures(problem, ceilings)) is not None}
    device = results["device"]
    return {
        "benchmark": "kernels",
        "device": device["name"],
        "uuid": device["uuid"],
        "driver": device["driver"],
        "plan_version": results["plan_version"],
        "toolchains": results["toolchains"],
        "complete": results["complete"],
        "without_winner": sorted(problem["name"] for problem in problems if problem["name"] not in found),
        "without_vendor": sorted(name for name, one in found.items() if one["vendor_us"] is None),
        "ceilings": {name: round(rate, 3) for name, rate in ceilings.items()},
        "by_kind": by_kind(problems, found),
        "prediction": quality(problems),
        "shapes": found,
    }


def ceilings_of(module: str, device: Device, out: Path, processes: Processes) -> dict[str, float]:
    """What the device reaches, from an earlier run under the same driver or measured now; empty where it cannot be."""
    path = out / CEILINGS_FILE
    if path.is_file():
        known = json.loads(path.read_bytes())
        if (known["uuid"], known["driver"]) == (device.uuid, device.driver):
            return dict(known["ceilings"])
    lease = measure_bundle.lease_of(device.uuid)
    with processes.private_folder("ceilings") as folder:
        command = [sys.executable, "-m", "benchmarks.device_ceilings", module, device.uuid, str(lease)]
        finished = processes.run(command, cwd=folder, limits=LIMITS, env=child_environment(out / "cache"), device=True)
    if not finished.ok:
        measure_bundle.say(f"no ceilings of this device: {finished.text().strip()[-500:]}")
        return {}
    found: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    write_whole(path, json.dumps({"uuid": device.uuid, "driver": device.driver, "ceilings": found}).encode())
    measure_bundle.say("ceilings: " + ", ".join(f"{name} {rate:.0f}" for name, rate in found.items()))
    return found


def tune(
    out: Path, problems: Sequence[Mapping[str, Any]], options: argparse.Namespace, budget: float
) -> tuple[int, dict[str, Any]]:
    """The exit status of the stand-alone run, and its results. Raises SystemExit where there are none."""
    request = out / "shapes.json"
    request.write_text(json.dumps({"search": {"level": options.level}, "problems": list(problems)}), encoding="utf-8")
    words = [str(request), "--out", str(out), "--gpu-module", options.gpu_module, "--seconds", str(options.seconds)]
    words += [] if math.isinf(budget) else ["--budget", str(max(budget, LEAST_BUDGET))]
    for name in ("workers", "device", "limit"):
        value = getattr(options, name)
        words += [] if value is None else [f"--{name}", str(value)]
    status = measure_bundle.main(words)
    if status == measure_bundle.WRONG_USE:
        raise SystemExit(status)
    return status, json.loads((out / RESULTS_FILE).read_bytes())


def main() -> int:
    options = _options()
    start = time.monotonic()
    problems = shapes(options.only)
    if not problems:
        print(f"no public shape of {', '.join(operators())} matches {options.only!r}", file=sys.stderr)
        return WRONG_USE
    with closing(Processes()) as processes:
        try:
            device = measure_bundle.choose_device(probe(options.gpu_module, processes, LIMITS), options.device)
        except GpuMissing as error:
            print(f"bench-kernels measures on a GPU, and there is none to use: {error}", file=sys.stderr)
            return WRONG_USE
        out: Path = options.out.absolute()
        out.mkdir(parents=True, exist_ok=True)
        ceilings = ceilings_of(options.gpu_module, device, out, processes)
        status, results = tune(out, problems, options, options.budget - (time.monotonic() - start))
    result = summarised(results, ceilings)
    result |= {"level": options.level, "seconds": options.seconds, "wall_s": round(time.monotonic() - start, 1)}
    write_whole(out / RESULT_FILE, (json.dumps(result) + "\n").encode())
    whole = options.only == "*" and options.limit is None and result["complete"] and not options.no_file
    keep_result(result, keep=whole)
    return status


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="*", metavar="PATTERN", help="shapes whose name matches; default: all")
    parser.add_argument("--level", type=int, default=1, choices=(0, 1, 2), help="of the search")
    parser.add_argument("--limit", type=int, help="candidates of each shape: the best predicted")
    parser.add_argument("--seconds", type=float, default=0.3, help="of one candidate's samples at most")
    parser.add_argument(
        "--budget", type=float, default=DEFAULT_BUDGET, help="seconds of all of it (480); the rest stays unmeasured"
    )
    parser.add_argument("--workers", type=int, help="that compile side by side; default: one per core")
    parser.add_argument("--device", help="UUID or number of the GPU; default: the first")
    parser.add_argument("--gpu-module", default="workers.gpu.cupy_gpu", help="what drives the GPU")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help=f"folder of everything ({DEFAULT_OUT})")
    parser.add_argument("--no-file", action="store_true", help="print the result without keeping it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
