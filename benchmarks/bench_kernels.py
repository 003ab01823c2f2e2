"""The kernels that tuning finds for the public shapes on this machine's GPU, against the vendor's library.

Measures the device's ceilings, then tunes `shapes.json` and the gradients of its convolutions by the stand-alone path
(`workers.offline.measure_bundle`). It ends within `--budget`, by when as many shapes as possible of each operator and
dtype have a first comparison; the same command continues from `--out`. Without a GPU it exits with 2. The result is
OUT/kernels.json too; it is kept where all shapes were measured:

- `complete`: whether every candidate was measured; `without_winner`, `without_vendor`: shapes without a time, a
  comparison.
- `shapes`: `us` (ours) and `vendor_us` from the same comparison, `speed` = vendor_us / us (none where the vendor's
  result is outside our bound: `vendor_off`), TFLOP/s, GB/s of the bytes that any algorithm must move, and `of_ceiling`:
  the time that the slower of the device's two measured roofs (`ceilings`) needs, over ours.
- `by_kind`: per operator and dtype the geometric mean of `speed`, the worst, and how many are at least 1.
- `prediction`: how predictions rank against measurements (`benchmarks.prediction_quality`).
"""

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

from benchmarks.keep_result import keep_result, options
from benchmarks.prediction_quality import quality
from benchmarks.shapes import every_shape
from codegen.operators import operator, operators
from codegen.search.schedule import Schedule
from workers.gpu.interface import Device, GpuMissing, choose_device, open_gpu
from workers.gpu.lease import take_lease
from workers.gpu.measure_on_gpu import child_environment, probe
from workers.offline import measure_bundle
from workers.offline.measure_all import lease_of, say
from workers.offline.measure_bundle import best_of, vendor_off, vendor_us
from workers.offline.measured import RESULTS_FILE, write_whole
from workers.processes.processes import Limits, Processes

LIMITS = Limits(wall_seconds=300, cpu_seconds=300, memory_bytes=32 << 30, output_bytes=1 << 20)
WRONG_USE = 2
CEILINGS_FILE, RESULT_FILE = "ceilings.json", "kernels.json"
DEFAULT_OUT = Path("build/bench-kernels")
# Seconds: with the ceilings, all that starts and ends, and a comparison under way the whole stays within 10 minutes.
DEFAULT_BUDGET = 480.0
LEAST_BUDGET = 1.0  # that is left for tuning after slow ceilings: what earlier runs found is shown even so


def matching_shapes(pattern: str) -> list[dict[str, Any]]:
    """The public shapes of known operators, gradients of convolutions too, whose names match, such as `llama3_8b/*`."""
    matching = (shape for shape in every_shape() if fnmatch.fnmatchcase(shape["name"], pattern))
    return [shape for shape in matching if shape["operator"] in operators()]


def figures(problem: Mapping[str, Any], ceilings: Mapping[str, float]) -> dict[str, Any] | None:
    """Of one shape; None where it has no winner."""
    best = best_of(problem)
    if best is None:
        return None
    name, us = best
    kind = operator(problem["operator"])
    parsed = kind.parse(problem["problem"])
    schedule = next(entry["schedule"] for entry in problem["candidates"] if entry["candidate"] == name)
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
        "right": sum(entry["verdict"] == "ok" for entry in problem["candidates"]),
        "schedule": schedule,
    }


def arithmetic(problem: Mapping[str, Any]) -> str:
    """What the products are computed in: the dtype, or tf32 where fp32 may be rounded to it."""
    return "tf32" if problem.get("allow_tf32") else str(problem["dtype"])


def by_kind(problems: Iterable[Mapping[str, Any]], shapes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Per operator and dtype, of the shapes that the vendor's library computes too."""
    speeds: dict[str, dict[str, float]] = {}
    for problem in problems:
        speed = shapes.get(problem["name"], {}).get("speed")
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
    shapes = {problem["name"]: entry for problem in problems if (entry := figures(problem, ceilings)) is not None}
    device = results["device"]
    return {
        "benchmark": "kernels",
        "device": device["name"],
        "uuid": device["uuid"],
        "driver": device["driver"],
        "plan_versions": results["plan_versions"],
        "toolchains": results["toolchains"],
        "complete": results["complete"],
        "without_winner": sorted(problem["name"] for problem in problems if problem["name"] not in shapes),
        "without_vendor": sorted(name for name, entry in shapes.items() if entry["vendor_us"] is None),
        "ceilings": {name: round(rate, 3) for name, rate in ceilings.items()},
        "by_kind": by_kind(problems, shapes),
        "prediction": quality(problems),
        "shapes": shapes,
    }


def ceilings_of(module: str, device: Device, out: Path, processes: Processes) -> dict[str, float]:
    """What the device reaches, from an earlier run under the same driver or measured now; empty where it cannot be."""
    path = out / CEILINGS_FILE
    if path.is_file():
        earlier = json.loads(path.read_bytes())
        if (earlier["uuid"], earlier["driver"]) == (device.uuid, device.driver):
            return dict(earlier["ceilings"])
    lease = lease_of(device.uuid)
    with processes.private_folder("ceilings") as folder:
        command = [sys.executable, "-m", "benchmarks.bench_kernels", "--ceilings", module, device.uuid, str(lease)]
        finished = processes.run(command, cwd=folder, limits=LIMITS, env=child_environment(out / "cache"), device=True)
    if not finished.ok:
        say(f"no ceilings of this device: {finished.text().strip()[-500:]}")
        return {}
    ceilings: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    write_whole(path, json.dumps({"uuid": device.uuid, "driver": device.driver, "ceilings": ceilings}).encode())
    say("ceilings: " + ", ".join(f"{name} {rate:.0f}" for name, rate in ceilings.items()))
    return ceilings


def tune(
    out: Path, problems: Sequence[Mapping[str, Any]], arguments: argparse.Namespace, budget: float
) -> tuple[int, dict[str, Any]]:
    """The exit status of the stand-alone run, and its results. Raises SystemExit where there are none."""
    request = out / "shapes.json"
    request.write_text(json.dumps({"search": {"level": arguments.level}, "problems": list(problems)}), encoding="utf-8")
    command = [
        str(request),
        "--out",
        str(out),
        "--gpu-module",
        arguments.gpu_module,
        "--seconds",
        str(arguments.seconds),
    ]
    command += [] if math.isinf(budget) else ["--budget", str(max(budget, LEAST_BUDGET))]
    for name in ("workers", "device", "limit"):
        value = getattr(arguments, name)
        command += [] if value is None else [f"--{name}", str(value)]
    status = measure_bundle.main(command)
    if status == measure_bundle.WRONG_USE:
        raise SystemExit(status)
    return status, json.loads((out / RESULTS_FILE).read_bytes())


def main() -> int:
    arguments = _arguments()
    start = time.monotonic()
    if arguments.ceilings:  # in a process of its own: it holds the GPU's context
        module, device_uuid, lease = arguments.ceilings
        take_lease(Path(lease), "measures what the device reaches", lambda holder: None)
        print(json.dumps(open_gpu(module, device_uuid).ceilings()))
        return 0
    problems = matching_shapes(arguments.only)
    if not problems:
        print(f"no public shape of {', '.join(operators())} matches {arguments.only!r}", file=sys.stderr)
        return WRONG_USE
    with closing(Processes()) as processes:
        try:
            device = choose_device(probe(arguments.gpu_module, processes, LIMITS), arguments.device or "0")
        except GpuMissing as error:
            print(f"bench-kernels measures on a GPU, and there is none to use: {error}", file=sys.stderr)
            return WRONG_USE
        out: Path = arguments.out.absolute()
        out.mkdir(parents=True, exist_ok=True)
        ceilings = ceilings_of(arguments.gpu_module, device, out, processes)
        status, results = tune(out, problems, arguments, arguments.budget - (time.monotonic() - start))
    result = summarised(results, ceilings)
    result |= {"level": arguments.level, "seconds": arguments.seconds, "wall_s": round(time.monotonic() - start, 1)}
    write_whole(out / RESULT_FILE, (json.dumps(result) + "\n").encode())
    whole = arguments.only == "*" and arguments.limit is None and result["complete"] and not arguments.no_file
    keep_result(result, keep=whole)
    return status


def _arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="shapes whose name matches; default: all")
    parser.add_argument("--level", type=int, default=1, choices=(0, 1, 2), help="of the search")
    parser.add_argument("--limit", type=int, help="candidates of each shape: the best predicted")
    parser.add_argument("--seconds", type=float, default=0.3, help="of one candidate's samples at most")
    parser.add_argument(
        "--budget", type=float, default=DEFAULT_BUDGET, help="seconds of all of it (480); the rest stays unmeasured"
    )
    parser.add_argument("--workers", type=int, help="that compile side by side; default: one per core")
    parser.add_argument("--device", help="UUID or number of the GPU; default: the first")
    parser.add_argument("--gpu-module", default="workers.cuda.cupy_gpu", help="what drives the GPU")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help=f"folder of everything ({DEFAULT_OUT})")
    parser.add_argument("--ceilings", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
