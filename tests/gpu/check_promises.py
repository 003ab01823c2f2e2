"""Checks on a real GPU that kernels give the bits that their PTX gives on the CPU: `make test-gpu`.

Kernels of which no rounding is left open (`codegen.plan.promised`): each is built for this GPU, and run from its PTX
here and on the GPU with the same inputs; the SHA-256 of the outputs must be the same. Needs nvcc and g++.
Exit status: 0 all is as it should be, 1 something is not, 2 there is no GPU, or its driver is too old, 3 nothing was
run: there is no compiler, or no target for this GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from codegen.errors import UnknownTarget
from codegen.kernel import Candidate
from codegen.lower import lower
from codegen.operators import operator
from codegen.plan.gpu_verification_plan import promised_cases
from codegen.search.search import Search
from codegen.targets import Target, target
from storage.config.settings import load_settings
from storage.entities.libraries import PtxVerdict
from storage.entities.verdicts import GPU, Verdict
from tests.gpu.data_sheet import sheet_of
from tests.gpu.run_check import NotRight, failure_of
from workers.compile.toolchain import Toolchain, toolchain_of
from workers.cpu.ptx import PtxRequest, verify_ptx
from workers.gpu.interface import (
    Device,
    Gpu,
    GpuError,
    GpuMissing,
    choose_device,
    list_devices,
    open_gpu,
    require_driver,
)
from workers.gpu.verify_and_time import References, Verifier
from workers.offline.children import own_processes
from workers.processes.processes import Limits, ProcessError, Processes
from workers.steps.run_ptx import broken_promise, promise
from workers.steps.winner_library import build_winner

MODULE = "workers.cuda.cupy_gpu"
RIGHT, WRONG, NO_GPU, NOT_RUN = 0, 1, 2, 3
_SENTENCES = (GpuError, ProcessError, BrokenProcessPool)
LIMITS = Limits(wall_seconds=120, cpu_seconds=120, memory_bytes=4 << 30, output_bytes=64 << 20)
MATMUL = {"operator": "matmul", "m": 48, "n": 40, "k": 96, "layout": "nt"}
# Floats on CUDA cores, whole numbers on tensor cores, and what neither has: sums of rows.
PROBLEMS: dict[str, dict[str, Any]] = {
    "float32": {**MATMUL, "dtype": "float32", "epilogue": [{"op": "relu"}]},
    "int8": {**MATMUL, "dtype": "int8"},
    "float16": {**MATMUL, "dtype": "float16"},
    "reduce": {"operator": "reduce", "shape": [64, 300], "axes": [1], "dtype": "float32", "fn": "sum"},
}


def candidates_of(sheet: Target) -> dict[str, Candidate]:
    """The first of each problem."""
    found = {}
    for name, fields in PROBLEMS.items():
        problem = operator(fields["operator"]).parse(fields)
        (found[name], *_) = lower(problem, sheet, Search(level=0)).candidates
    return found


def check(gpu: Gpu, candidate: Candidate, sheet: Target, toolchain: Toolchain, processes: Processes) -> str:
    """What was compared. Raises NotRight, GpuError, ProcessError."""
    kernel, own = candidate.kernel, operator(candidate.kernel.operator)
    built = build_winner(candidate, sheet, toolchain, processes, LIMITS)
    request = PtxRequest(sheet.name, 1, sheet.tensor_sums)
    text = built.ptx.decode("utf-8")
    [shown] = verify_ptx([kernel], request, toolchain, processes, LIMITS, ptx=text)
    if shown.verdict != "ok":
        raise NotRight(f"its PTX is {shown.verdict} on the CPU: {shown.message}")
    promised = [promise(case, case["runs"][0]["launch"]) for case in shown.details["cases"] if "sha256" in case]
    if not promised:
        raise NotRight("nothing is promised of it")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "winner.so")
        path.write_bytes(built.library)
        verifier = Verifier(gpu, own, kernel, References(gpu, lambda what: None), lambda what: None)
        wrong = verifier.run(gpu.load(path, [kernel]), promised_cases(own, kernel), keep=False)
    if wrong is not None:
        raise NotRight(wrong.message)
    verdict = PtxVerdict(shown.verdict, "", "", request.seed, 0.0, 0.0, promised)
    if (words := broken_promise(verdict, Verdict(venue=GPU, details={"cases": verifier.cases}))) is not None:
        raise NotRight(words)
    return f"{len(promised)} outputs with the promised SHA-256"


def check_here(module: str, device: str, name: str, sheet: str, toolchain: Toolchain) -> str:
    """As `check`, in a process of its own: one with a GPU that reported an error is of no use any more."""
    with closing(own_processes()) as processes:
        own = target(sheet)
        return check(open_gpu(module, device), candidates_of(own)[name], own, toolchain, processes)


def check_all(module: str, device: Device, sheet: Target, toolchain: Toolchain) -> int:
    """How many are wrong; says what each came to. Raises GpuMissing."""
    wrong = 0
    for name in PROBLEMS:
        in_process = partial(in_a_process, module, device.uuid, name, sheet.name, toolchain)
        error = failure_of(name, in_process, sentences=_SENTENCES, raises=(GpuMissing,))
        wrong += error is not None
    return wrong


def in_a_process(*arguments: Any) -> str:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(check_here, *arguments).result()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--device", default="0", help="UUID or number of the GPU; default: the first")
    parser.add_argument("--gpu-module", default=MODULE, help="what drives the GPU")
    chosen = parser.parse_args(arguments)
    try:
        device = choose_device(list_devices(chosen.gpu_module), chosen.device)
        with closing(own_processes()) as processes:
            toolchain = toolchain_of(load_settings(), processes)
        require_driver([device], toolchain.cuda)
        wrong = check_all(chosen.gpu_module, device, sheet_of(device), toolchain)
    except GpuMissing as error:
        print(f"{error}; nothing was checked", file=sys.stderr)
        return NO_GPU
    except ProcessError as error:
        print(f"not run: no compiler: {error}", file=sys.stderr)
        return NOT_RUN
    except UnknownTarget as error:
        print(f"not run: {error.message}", file=sys.stderr)
        return NOT_RUN
    print(json.dumps({"promises": {"kernels": len(PROBLEMS), "wrong": wrong}}))
    return WRONG if wrong else RIGHT


if __name__ == "__main__":
    sys.exit(main())
