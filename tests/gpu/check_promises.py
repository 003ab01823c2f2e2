"""Checks on a real GPU that kernels give the bits that their PTX gives on the CPU: `make test-gpu`.

Kernels of which no rounding is left open (`codegen.plan.promised`): each is built for this GPU, and run from its PTX
here and on the GPU with the same inputs; the SHA-256 of the outputs must be the same. Needs nvcc and g++.
Exit status: 0 all is as it should be, 1 something is not, 2 there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from codegen.kernel import Candidate
from codegen.lower import lower
from codegen.operators import operator
from codegen.plan.gpu_verification_plan import promised_cases
from codegen.search.search import Search
from codegen.targets import Target, targets
from storage.config.settings import load_settings
from storage.entities.libraries import PtxVerdict
from storage.entities.verdicts import GPU, Verdict
from workers.compile.toolchain import Toolchain, toolchain_of
from workers.cpu.ptx.verify import PtxRequest, verify_ptx
from workers.gpu.driver import require_driver
from workers.gpu.interface import Device, Gpu, GpuMissing, choose_device, list_devices, open_gpu
from workers.gpu.verify_and_time import References, Verifier
from workers.processes.processes import Limits, Processes
from workers.steps.ptx_runs import promise
from workers.steps.winner_library import build_winner
from workers.steps.winner_ptx import broken_promise

MODULE = "workers.cuda.cupy_gpu"
RIGHT, WRONG, NO_GPU = 0, 1, 2
LIMITS = Limits(wall_seconds=120, cpu_seconds=120, memory_bytes=4 << 30, output_bytes=64 << 20)
MATMUL = {"operator": "matmul", "m": 48, "n": 40, "k": 96, "layout": "nt"}
# Floats on CUDA cores, whole numbers on tensor cores, and what neither has: sums of rows.
PROBLEMS: dict[str, dict[str, Any]] = {
    "float32": {**MATMUL, "dtype": "float32", "epilogue": [{"op": "relu"}]},
    "int8": {**MATMUL, "dtype": "int8"},
    "float16": {**MATMUL, "dtype": "float16"},
    "reduce": {"operator": "reduce", "shape": [64, 300], "axes": [1], "dtype": "float32", "fn": "sum"},
}


class NotRight(Exception):
    """A check failed; the message says how."""


def candidates_of(sheet: Target) -> dict[str, Candidate]:
    """The first of each problem."""
    found = {}
    for name, fields in PROBLEMS.items():
        problem = operator(fields["operator"]).parse(fields)
        (found[name], *_) = lower(problem, sheet, Search(level=0)).candidates
    return found


def check(gpu: Gpu, candidate: Candidate, sheet: Target, toolchain: Toolchain, processes: Processes) -> str:
    """What was compared; raises NotRight."""
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


def sheet_of(device: Device) -> Target:
    return next(
        sheet for sheet in targets().values() if sheet.capability == 10 * device.capability[0] + device.capability[1]
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="0", help="its number or UUID")
    parser.add_argument("--module", default=MODULE, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    try:
        device = choose_device(list_devices(chosen.module), chosen.device)
    except GpuMissing as error:
        sys.stdout.write(f"no GPU: {error}\n")
        return NO_GPU
    wrong = 0
    with closing(Processes()) as processes:
        toolchain, sheet = toolchain_of(load_settings(), processes), sheet_of(device)
        require_driver([device], toolchain.cuda)
        gpu = open_gpu(chosen.module, device.uuid)
        for name, candidate in candidates_of(sheet).items():
            try:
                said = f"ok     {name}: {check(gpu, candidate, sheet, toolchain, processes)}"
            except NotRight as error:
                wrong += 1
                said = f"WRONG  {name}: {error}"
            sys.stdout.write(f"{said}\n")
    sys.stdout.write(json.dumps({"promises": {"kernels": len(PROBLEMS), "wrong": wrong}}) + "\n")
    return WRONG if wrong else RIGHT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
