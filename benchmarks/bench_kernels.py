"""The kernels that tuning finds for the public shapes on this machine's GPU, against the vendor's library.

Measures the device's ceilings, has `shapes.json` and the gradients of its convolutions compiled and verified (`cukiln
export-bundle --compile-only`; a bundle that was made elsewhere: `--bundle`), and measures them without a service
(`workers.offline.measure_bundle`). It ends within `--budget`, by when as many shapes as possible of each operator and
dtype have a first comparison; the same command continues from `--out`. Without a GPU it exits with 2. `--results
FOLDER`: of what was brought back from elsewhere. The result is OUT/kernels.json too; it is kept where all shapes were
measured:

- `complete`: whether every candidate was measured; `without_winner`, `without_vendor`: shapes without a time, a
  comparison.
- `shapes`: `us` (ours) and `vendor_us` from the same comparison, `speed` = vendor_us / us (none where the vendor's
  result is outside our bound: `vendor_off`) of samples of the same rounds, with the ends of its 95 % interval and
  whether that is a `tie` (below 1 %, or not certain), TFLOP/s, GB/s of the bytes that any algorithm must move, and
  `of_ceiling`: the time that the slower of the device's two measured roofs (`ceilings`) needs, over ours. `unsteady`,
  `limited_by`: where the GPU changed meanwhile, or was held back throughout.
- `by_kind`: per operator and dtype the geometric mean of `speed`, the worst, how many are at least 1, and how many of
  all are ties.
- `prediction`: how predictions rank against measurements (`benchmarks.prediction_quality`).
"""

import argparse
import fnmatch
import json
import math
import subprocess
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
from cukiln.cli.elsewhere import read_results, result_files
from cukiln.errors import UsageError
from cukiln.types import VendorRatio
from workers.gpu.engine import probe
from workers.gpu.interface import GpuMissing, choose_device
from workers.offline import measure_bundle
from workers.offline.ceilings import CEILINGS_FILE, LIMITS, ceilings_of
from workers.offline.children import own_processes
from workers.offline.measure_bundle import best_of, vendor_off, vendor_ratio, vendor_us
from workers.offline.measured import RESULTS_FILE, write_whole
from workers.offline.work import default_target_of

WRONG_USE = 2
RESULT_FILE = "kernels.json"
DEFAULT_OUT = Path("build/bench-kernels")
# Seconds: with the ceilings, all that starts and ends, and a comparison under way the whole stays within 10 minutes.
DEFAULT_BUDGET = 480.0
COMPILING_SHARE = 0.5  # of the budget, on a machine that has a compiler too: what is compiled by then is measured
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
    vendor, off, comparison = vendor_us(problem), vendor_off(problem), problem["comparison"] or {}
    roofs = [moved / (ceilings["copy_gb_s"] * 1e3)] if "copy_gb_s" in ceilings else []
    if rate := ceilings.get(f"tflops_{arithmetic(problem['problem'])}"):
        roofs.append(cost.flops / (rate * 1e6))
    return {
        "us": round(us, 3),
        "vendor_us": None if vendor is None else round(vendor, 3),
        **({"speed": None} if vendor is None or off else speed(vendor / us, vendor_ratio(problem))),
        **({"vendor_off": off} if off else {}),
        **{name: comparison[name] for name in ("unsteady", "limited_by") if comparison.get(name)},
        "tflops": round(cost.flops / us * 1e-6, 3),
        "gb_s": round(moved / us * 1e-3, 1),
        "of_ceiling": round(max(roofs) / us, 4) if roofs else None,
        "candidates": len(problem["candidates"]),
        "right": sum(entry["verdict"] == "ok" for entry in problem["candidates"]),
        "schedule": schedule,
    }


def speed(medians: float, ratio: VendorRatio | None) -> dict[str, Any]:
    """Without an interval where an older release compared them."""
    if ratio is None:
        return {"speed": round(medians, 4)}
    ends = {"speed_low": round(ratio.low, 4), "speed_high": round(ratio.high, 4)}
    return {"speed": round(ratio.ratio, 4), **ends, "tie": ratio.tie}


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
            "ties": sum(bool(shapes[name].get("tie")) for name in members),
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


def compiled(out: Path, problems: Sequence[Mapping[str, Any]], arguments: argparse.Namespace, target: str) -> Path:
    """The bundle of the shapes, with what is compiled after a share of the budget. Raises SystemExit."""
    request = out / "shapes.json"
    search = {"level": arguments.level, **({"keep": arguments.limit} if arguments.limit else {})}
    request.write_text(json.dumps({"search": search, "problems": list(problems)}), encoding="utf-8")
    bundle = out / "bundle"
    words = ["export-bundle", str(request), "--compile-only", "--target", target, "--out", str(bundle)]
    if not math.isinf(arguments.budget):
        words += ["--seconds", str(max(1.0, COMPILING_SHARE * arguments.budget))]
    ended = subprocess.run([sys.executable, "-m", "cukiln", *words], stdout=sys.stderr, check=False)
    if ended.returncode:
        raise SystemExit(WRONG_USE)
    return bundle


def measured(out: Path, bundle: Path, arguments: argparse.Namespace, budget: float) -> tuple[int, dict[str, Any]]:
    """The exit status of the stand-alone run, and its results. Raises SystemExit where there are none."""
    command = [
        str(bundle),
        "--out",
        str(out),
        "--gpu-module",
        arguments.gpu_module,
        "--seconds",
        str(arguments.seconds),
    ]
    command += [] if math.isinf(budget) else ["--budget", str(max(budget, LEAST_BUDGET))]
    for name in ("device", "limit"):
        value = getattr(arguments, name)
        command += [] if value is None else [f"--{name}", str(value)]
    status = measure_bundle.main(command)
    if status == measure_bundle.WRONG_USE:
        raise SystemExit(status)
    return status, json.loads((out / RESULTS_FILE).read_bytes())


def brought_back(folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Results and ceilings of a run elsewhere."""
    files = [read_results(path) for path in result_files(folder)]
    ceilings = folder / CEILINGS_FILE
    problems = [problem for results in files for problem in results["problems"]]
    reached = json.loads(ceilings.read_bytes()) if ceilings.is_file() else {}
    measured_on = files[0]["device"]
    if reached and (reached["uuid"], reached["driver"]) != (measured_on["uuid"], measured_on["driver"]):
        print(
            f"{ceilings} is of {reached['uuid']}, the results of {measured_on['uuid']}: it is left out", file=sys.stderr
        )
        reached = {}
    if others := {results["device"]["uuid"] for results in files} - {measured_on["uuid"]}:
        raise UsageError(
            f"{folder} has results of several cards ({', '.join(sorted(others))}): show one after the other"
        )
    return {**files[0], "problems": problems}, reached.get("ceilings", {})


def main() -> int:
    arguments = _arguments()
    start = time.monotonic()
    out: Path = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if arguments.results:
        status = 0
        try:
            results, ceilings = brought_back(arguments.results)
        except UsageError as error:
            print(f"bench-kernels: {error}", file=sys.stderr)
            return WRONG_USE
    else:
        problems = matching_shapes(arguments.only)
        if not problems:
            print(f"no public shape of {', '.join(operators())} matches {arguments.only!r}", file=sys.stderr)
            return WRONG_USE
        with closing(own_processes()) as processes:
            try:
                device = choose_device(probe(arguments.gpu_module, processes, LIMITS), arguments.device or "0")
            except GpuMissing as error:
                print(f"bench-kernels measures on a GPU, and there is none to use: {error}", file=sys.stderr)
                return WRONG_USE
            ceilings = ceilings_of(arguments.gpu_module, device, out, processes)
        bundle = arguments.bundle or compiled(out, problems, arguments, default_target_of(device.capability))
        status, results = measured(out, bundle, arguments, arguments.budget - (time.monotonic() - start))
    result = summarised(results, ceilings)
    if not arguments.results:  # not of what was brought back: only the other machine has them
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
    parser.add_argument("--bundle", type=Path, help="of `cukiln export-bundle`; default: it is made here")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="what was brought back; nothing is measured")
    parser.add_argument("--device", help="UUID or number of the GPU; default: the first")
    parser.add_argument("--gpu-module", default="workers.cuda.cupy_gpu", help="what drives the GPU")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help=f"folder of everything ({DEFAULT_OUT})")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
