"""Tune on a machine that has a GPU and nothing else: no network, no Redis, no database, no service.

`python -m workers.offline.measure_bundle WHAT` verifies and times every candidate of WHAT on this machine's GPU: a
folder that `cukiln export-bundle` wrote, or a job request (the body of POST /v1/jobs), which is then lowered and
compiled here too. What it finds stands in OUT/results.json, which `cukiln import-results` hands to a service. The same
command goes on with a run that was killed. docs/measuring-elsewhere.md says how it is used.

Exit status: 0 every problem has a winner and nothing is left; 1 something failed or is left; 2 wrong use, or no GPU or
compiler to work with; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType

from codegen.errors import CodegenError
from codegen.operators import load_operators
from storage.config.files import gpu_lock_folder
from storage.config.module_texts import gpu_plans
from workers.compile.toolchain import Toolchain, ToolchainMissing, find_toolchain, supported_targets
from workers.gpu.interface import Device, GpuMissing, choose_device
from workers.gpu.lease import lease_file
from workers.gpu.measure_on_gpu import probe
from workers.offline.bundle import BundleError, read_bundle
from workers.offline.measure_all import MEASURE_LIMITS, Run, Setup
from workers.offline.measured import Conditions, Journal, write_results
from workers.offline.show import table
from workers.offline.work import (
    RequestError,
    Work,
    default_target_of,
    read_request_file,
    require_capability,
    work_of_bundle,
    work_of_request,
)
from workers.processes.processes import InfrastructureError, ProcessError, Processes

DONE, LEFT, WRONG_USE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    _resolve(options)
    try:
        load_operators([Path(folder) for folder in options.operator_path.split(os.pathsep) if folder])
        with closing(Processes()) as processes:
            return measure(options, processes)
    except (BundleError, CodegenError, GpuMissing, RequestError, ToolchainMissing) as error:
        sys.stderr.write(f"measure_bundle: {error}\n")
        return WRONG_USE
    except (OSError, ProcessError) as error:
        sys.stderr.write(f"measure_bundle: {error}\n")
        return LEFT


def measure(options: argparse.Namespace, processes: Processes) -> int:
    """Do all of it; the exit status."""
    began = time.monotonic()
    if not options.what.exists():
        raise RequestError(f"{options.what} is not there: name a folder of `cukiln export-bundle` or a request file")
    device = choose_device(probe(options.gpu_module, processes, MEASURE_LIMITS), options.device)
    say(f"{device.name}, {device.uuid}, driver {device.driver}")
    work, toolchain = _work(options, device, processes)
    require_capability(work, device.capability, device.name)
    out: Path = options.out
    conditions = Conditions(device, gpu_plans(problem.problem.operator for problem in work.problems))
    setup = Setup(
        gpu=options.gpu_module,
        device=device,
        lease=lease_of(device.uuid),
        out=out,
        seconds=options.seconds,
        workers=options.workers,
        processes=processes,
        toolchain=toolchain,
        deadline=None if options.budget is None else began + options.budget,
        say=say,
    )
    candidates = sum(len(problem.candidates) for problem in work.problems)
    whole, failure, cancel = False, "", threading.Event()
    with _stopping(cancel) as stopped:
        run = Run(work, setup, conditions, Journal(out, conditions), cancel)
        say(f"{len(work.problems)} problems, {candidates} candidates, {len(work.waiting)} kernels to compile")
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


def say(words: str) -> None:
    """One line of progress, at once: a log may be all that is left of a run."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {words}\n")
    sys.stdout.flush()


def _work(options: argparse.Namespace, device: Device, processes: Processes) -> tuple[Work, Toolchain | None]:
    what: Path = options.what
    if what.is_dir():
        return work_of_bundle(read_bundle(what), what, name=options.problem, limit=options.limit), None
    request = read_request_file(what)
    toolchain = find_toolchain(processes, nvcc=options.nvcc, host_compiler=options.cxx)
    target = default_target_of(device.capability)
    work = work_of_request(request, target, toolchain, name=options.problem, limit=options.limit)
    supported = {target.name for target in supported_targets(toolchain)}
    for problem in work.problems:
        if problem.target.name not in supported:
            raise ToolchainMissing(
                f"{toolchain.nvcc} makes no code for {problem.target.name}, which {problem.name} needs"
            )
    return work, toolchain


def lease_of(uuid: str) -> Path:
    """The file that each process on this machine locks while using the GPU, services too."""
    return lease_file(gpu_lock_folder(os.environ.get("CUKILN_GPU_LOCKS")).absolute(), uuid)


def _resolve(options: argparse.Namespace) -> None:
    """Relative paths become absolute: compilers and the children that measure run in folders of their own."""
    options.what = options.what.absolute()
    what = options.what
    default = what / "measured" if what.is_dir() else what.with_name(f"{what.stem}-measured")
    options.out = (options.out or default).absolute()
    folders = options.operator_path.split(os.pathsep)
    options.operator_path = os.pathsep.join(str(Path(folder).absolute()) for folder in folders if folder)
    for name in ("nvcc", "cxx"):
        program = getattr(options, name)
        if program and os.sep in program:  # else it is looked for in PATH
            setattr(options, name, str(Path(program).absolute()))


@contextlib.contextmanager
def _stopping(cancel: threading.Event) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM set `cancel`, which ends the run in order; the list then holds the signal."""
    received: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        cancel.set()

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
    parser.add_argument("what", type=Path, metavar="WHAT", help="a folder of `cukiln export-bundle`, or a request file")
    parser.add_argument(
        "--out", type=Path, help="folder of the results; default: WHAT/measured, WHAT-measured of a file"
    )
    parser.add_argument("--gpu-module", default="workers.cuda.cupy_gpu", help="what drives the GPU")
    parser.add_argument("--device", default="0", help="UUID or number of the GPU; default: the first")
    parser.add_argument("--seconds", type=_positive, default=0.3, help="of one candidate's samples at most")
    parser.add_argument("--problem", metavar="NAME", help="this problem alone")
    parser.add_argument("--limit", type=int, metavar="N", help="candidates of each problem: the best predicted")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="that compile side by side")
    parser.add_argument("--budget", type=_positive, metavar="SECONDS", help="then it ends; the same command goes on")
    parser.add_argument("--nvcc", default=os.environ.get("CUKILN_NVCC"), help="default: of the wheels, else of PATH")
    parser.add_argument("--cxx", default=os.environ.get("CUKILN_CXX"), help="default: g++")
    parser.add_argument("--operator-path", default=os.environ.get("OPERATOR_PATH", ""), help="trusted operator folders")
    options = parser.parse_args(arguments)
    if options.workers < 1 or (options.limit is not None and options.limit < 1):
        parser.error("--workers and --limit must be 1 or more")
    return options


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value


if __name__ == "__main__":
    sys.exit(main())
