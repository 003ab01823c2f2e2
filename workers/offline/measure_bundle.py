"""Measure on a machine that has a GPU and nothing else: no network, compiler, Redis, database or service.

`python -m workers.offline.measure_bundle BUNDLE` verifies and times on this machine's GPU every candidate in a folder
that `cukiln export-bundle` wrote, and compares the best with the vendor's library. What it finds stands in
OUT/results.json, which `cukiln import-results` hands to a service. The same command continues a run that was killed.
docs/measuring-elsewhere.md says how it is used.

Exit status: 0 every problem has a winner and nothing is left; 1 something failed or is left; 2 wrong use, or no GPU to
work with; 130 interrupted.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

from codegen.errors import CodegenError
from codegen.operators import load_operators
from cukiln.counted import counted
from cukiln.types import VendorRatio
from cukiln.vendor_text import ends, result_off, times
from storage.config.files import gpu_lock_folder
from storage.config.limits import MEASURE_LIMITS, MEASURE_SECONDS
from storage.config.own_modules import CHILD, gpu_plans
from workers.gpu.engine import Engine, probe
from workers.gpu.interface import GpuMissing, choose_device
from workers.gpu.measure_on_gpu import child_environment
from workers.offline.children import compiled_folder, own_processes
from workers.offline.measure_all import LIMITS, Run, say
from workers.offline.measured import Conditions, Journal, write_results
from workers.offline.work import BundleError, read_bundle, require_fitting, work_of_bundle
from workers.processes.processes import InfrastructureError, ProcessError, Processes

DONE, LEFT, WRONG_USE, INTERRUPTED = 0, 1, 2, 130
_HEADINGS = ("problem", "candidates", "right", "best µs", "vendor µs", "vendor/best", "margin")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    _resolve(options)
    try:
        load_operators([Path(folder) for folder in options.operator_path.split(os.pathsep) if folder])
        with closing(own_processes(namespaces=not options.no_pid_namespaces)) as processes:
            return measure(options, processes)
    except (CodegenError, GpuMissing, BundleError) as error:
        sys.stderr.write(f"measure_bundle: {error}\n")
        return WRONG_USE
    except (OSError, ProcessError) as error:
        sys.stderr.write(f"measure_bundle: {error}\n")
        return LEFT


def measure(options: argparse.Namespace, processes: Processes) -> int:
    """Do all of it; the exit status."""
    began = time.monotonic()
    processes.keep_warm(CHILD, child_environment())
    device = choose_device(probe(options.gpu_module, processes, MEASURE_LIMITS), options.device)
    say(f"{device.name}, {device.uuid}, driver {device.driver}")
    what: Path = options.what
    bundle = read_bundle(what)
    require_fitting(bundle, device, name=options.problem)
    work = work_of_bundle(bundle, what, name=options.problem, limit=options.limit)
    out: Path = options.out
    candidates = sum(len(problem.candidates) for problem in work.problems)
    say(f"{counted(len(work.problems), 'problem')}, {counted(candidates, 'candidate')}")
    whole, failure, cancel = False, "", threading.Event()
    with stopping(cancel.set) as stopped:
        journal = Journal(out, Conditions(device, gpu_plans(problem.problem.operator for problem in work.problems)))
        for name, uuid in sorted(journal.others):
            say(f"{out} also has what {name}, {uuid}, measured: it does not count for this card, and stays")
        for uuid in sorted(journal.counted):
            say(f"what {uuid}, another card of this product, measured before counts, too")
        engine = Engine(
            options.gpu_module,
            device,
            locks=lock_folder(),
            cache=compiled_folder(out),
            processes=processes,
            limits=LIMITS,
            seconds=options.seconds,
        )
        deadline = None if options.budget is None else began + options.budget
        run = Run(work, journal, engine, out, deadline, cancel)
        try:
            whole = run.everything()
        except InfrastructureError as error:
            failure = str(error)
    results = run.results(complete=whole)
    path = write_results(out, results)
    sys.stdout.write(table(results))
    say(f"{path}: `cukiln import-results {out}` hands it to a service")
    if failure:
        sys.stderr.write(f"measure_bundle: {failure}\n")
    if stopped:
        return INTERRUPTED
    won = all(any(made["verdict"] == "ok" for made in problem["candidates"]) for problem in results["problems"])
    return DONE if whole and won and not failure else LEFT


def lock_folder() -> Path:
    """Of the files that each process on this machine locks while using a GPU, services too."""
    return gpu_lock_folder(os.environ.get("CUKILN_GPU_LOCKS")).absolute()


def _resolve(options: argparse.Namespace) -> None:
    """Relative paths become absolute: the children that measure run in folders of their own."""
    options.what = options.what.absolute()
    options.out = (options.out or options.what / "measured").absolute()
    folders = options.operator_path.split(os.pathsep)
    options.operator_path = os.pathsep.join(str(Path(folder).absolute()) for folder in folders if folder)


@contextlib.contextmanager
def stopping(then: Callable[[], object] = lambda: None) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM call `then`, and end the run in order; the list then holds the signal."""
    received: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        then()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m workers.offline.measure_bundle", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("what", type=Path, metavar="BUNDLE", help="a folder of `cukiln export-bundle`")
    parser.add_argument("--out", type=Path, help="folder of the results; default: BUNDLE/measured")
    parser.add_argument("--gpu-module", default="workers.cuda.cupy_gpu", help="what drives the GPU")
    parser.add_argument("--device", default="0", help="UUID or number of the GPU; default: the first")
    parser.add_argument("--seconds", type=positive, default=MEASURE_SECONDS, help="of one candidate's samples at most")
    parser.add_argument("--problem", metavar="NAME", help="this problem alone")
    parser.add_argument("--limit", type=int, metavar="N", help="candidates of each problem: the best predicted")
    parser.add_argument("--no-pid-namespaces", action="store_true", help="where the driver does not work in one")
    parser.add_argument("--budget", type=positive, metavar="SECONDS", help="then it ends; the same command continues")
    parser.add_argument("--operator-path", default=os.environ.get("OPERATOR_PATH", ""), help="trusted operator folders")
    options = parser.parse_args(arguments)
    if options.limit is not None and options.limit < 1:
        parser.error("--limit must be 1 or more")
    return options


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value


def best_of(problem: Mapping[str, Any]) -> tuple[str, float] | None:
    """The fastest candidate with its microseconds: of the comparison where there was one, else by its own median."""
    comparison = problem["comparison"]
    if comparison and comparison["contenders"]:
        first = comparison["contenders"][0]
        return first["candidate"], float(first["median_us"])
    # Of the right candidates, each measured alone.
    measured = {
        candidate["candidate"]: float(candidate["measurement"]["median_us"])
        for candidate in problem["candidates"]
        if candidate["verdict"] == "ok" and candidate["measurement"]
    }
    best = min(measured, key=lambda name: (measured[name], name), default=None)
    return None if best is None else (best, measured[best])


def vendor_us(problem: Mapping[str, Any]) -> float | None:
    """The vendor's library on the same problem, from the comparison."""
    vendor = (problem["comparison"] or {}).get("vendor")
    return float(vendor["median_us"]) if vendor else None


def vendor_off(problem: Mapping[str, Any]) -> str | None:
    """What is wrong with the vendor's result, if anything is: above the bound of ours, or no number (null)."""
    vendor = (problem["comparison"] or {}).get("vendor") or {}
    return result_off(vendor.get("max_error"), vendor.get("error_bound"))


def vendor_ratio(problem: Mapping[str, Any]) -> VendorRatio | None:
    """The vendor's time over the best one's, with its interval."""
    best = ((problem["comparison"] or {}).get("contenders") or [{}])[0]
    return VendorRatio.model_validate(best["vendor_ratio"]) if best.get("vendor_ratio") else None


def table(results: Mapping[str, Any]) -> str:
    """All problems, and below them what was found wrong or is left."""
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for problem in results["problems"]:
        best, vendor, off = best_of(problem), vendor_us(problem), vendor_off(problem)
        ratio = _ratio_text(vendor, best, vendor_ratio(problem))
        right = sum(candidate["verdict"] == "ok" for candidate in problem["candidates"])
        times = [f"{best[1]:.2f}" if best else "-", f"{vendor:.2f}" if vendor else "-", "off" if off else ratio]
        # How much longer the second one takes; `tie` where that is nothing.
        second = ((problem["comparison"] or {}).get("contenders") or [])[1:2]
        margin = "".join("tie" if entry["tie"] else f"{100 * (entry['ratio'] - 1):.1f} %" for entry in second) or "-"
        rows.append((problem["name"], str(len(problem["candidates"])), str(right), *times, margin))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = [""]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines += ["", *_explained(results["problems"])]
    return "\n".join(lines) + "\n"


def _ratio_text(vendor: float | None, best: tuple[str, float] | None, ratio: VendorRatio | None) -> str:
    """`1.083 (1.079–1.088)`; `tie (0.996–1.004)`; of what an older release compared without an interval `1.08`."""
    if vendor is None or best is None:
        return "-"
    if ratio is None:
        return times(vendor / best[1], None)
    return f"{'tie' if ratio.tie else times(ratio.ratio, ratio)} ({ends(ratio)})"


def _explained(problems: Sequence[Mapping[str, Any]]) -> list[str]:
    """Everything that was not right, counted by problem, with the messages of one of each kind."""
    lines = []
    for problem in problems:
        counts = Counter(candidate["verdict"] for candidate in problem["candidates"] if candidate["verdict"] != "ok")
        example = {
            candidate["verdict"]: candidate["message"] for candidate in problem["candidates"] if candidate["message"]
        }
        for verdict, count in sorted(counts.items()):
            detail = f": {example[verdict]}" if verdict in example else ""
            lines.append(f"{problem['name']}: {count} {verdict}{detail}"[:300])
        comparison = problem["comparison"] or {}
        if changes := comparison.get("unsteady"):
            lines.append(f"{problem['name']}: unsteady while the best took turns: {'; '.join(changes)}"[:300])
        if missing := comparison.get("vendor_missing"):
            lines.append(f"{problem['name']}: the vendor's library was not compared: {missing}"[:300])
        if reasons := comparison.get("limited_by"):
            lines.append(f"{problem['name']}: limited throughout by {', '.join(reasons)}"[:300])
        if off := vendor_off(problem):
            lines.append(f"{problem['name']}: the vendor's result {off}: no ratio (its kernels may round in between)")
    return lines


if __name__ == "__main__":
    sys.exit(main())
