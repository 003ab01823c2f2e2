"""Runs kernels that hold all mutants of their text (tests/support/kernels/mutants.py), one mutant at a time.

`verify_mutants` compiles the kernels and starts `python -m tests.support.kernels.mutant_runs REQUEST`. It runs every
kernel through the whole test plan as it is, in a fork of itself; whatever switches the run asks are the mutants that
this kernel reaches. It then turns each of these on, in a fork of its own, because a mutant may damage its process.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from codegen.kernel import Kernel
from codegen.operator import Operator
from codegen.operators import load_operators, operator, operators
from codegen.plan.verification_plan import Kind, plan_cases
from codegen.problem import Problem
from tests.support.kernels.cpu_helpers import LIMITS, processes, toolchain
from tests.support.run.places import ROOT
from workers.cpu.build import build_cpu
from workers.cpu.library import CpuLibrary
from workers.cpu.run import plan_test

SEED = 7
RUN_CPU_SECONDS = 5.0  # of a kernel's whole plan, which takes about a tenth of it
AS_IT_IS = -1
MAX_SWITCHES = 1024  # as the text's own array


@dataclass(frozen=True)
class MutantVerdict:
    """What became of one mutant (`number`; AS_IT_IS: of none) in kernel `kernel` of those asked."""

    kernel: int
    number: int
    verdict: str
    message: str


def verify_mutants(
    kernels: Sequence[Kernel],
    folder: Path,
    once: Collection[int] = (),
    asked: Mapping[int, Sequence[int]] | None = None,
    most: int = MAX_SWITCHES,
) -> list[MutantVerdict]:
    """The verdict of each kernel as it is and with each mutant that it reaches; a mutant of `once` is not run again
    when one kernel has shown it. `asked`: mutants, each in some of the kernels alone (default: all in all). `most`: so
    many of those that a kernel reaches, the first of `asked`.

    The kernels' operator must be loaded. `folder` keeps the C++ files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    build = build_cpu(kernels, toolchain(), processes(), LIMITS, folder=folder)
    assert not build.errors, build.errors
    ((library, held),) = build.libraries
    request = folder / "request.json"
    request.write_text(
        json.dumps(
            {
                "library": str(library),
                "kernels": [kernel.to_json() for kernel in held],
                "operator": kernels[0].operator,
                "folder": str(operator(kernels[0].operator).folder),
                "once": list(once),
                "most": most,
                "asked": None
                if asked is None
                else {
                    kernel.id: [number for number, those in asked.items() if place in those]
                    for place, kernel in enumerate(kernels)
                },
            }
        )
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "client")))
    argv = [sys.executable, "-m", "tests.support.kernels.mutant_runs", str(request)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    positions = {kernel.id: position for position, kernel in enumerate(kernels)}
    return [
        MutantVerdict(positions[run["kernel"]], run["number"], run["verdict"], run["message"])
        for run in map(json.loads, done.stdout.splitlines())
    ]


class Remembered:
    """An operator as a kernel's test needs it, which has made all inputs and references of the plan of `kernel`: forks
    of this process find them made."""

    def __init__(self, own: Operator, kernel: Kernel, seed: int = SEED) -> None:
        self._own = own
        self._made: dict[tuple[Problem, Kind], tuple[Mapping[str, Any], tuple[Any, Any]]] = {}
        for case in plan_cases(own, kernel, seed):
            inputs = own.make_inputs(case.shown, case.kind, np.random.default_rng(case.seed))
            self._made[case.shown, case.kind] = inputs, own.reference(case.shown, inputs, exact=case.exact)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def make_inputs(self, problem: Problem, kind: Kind, rng: np.random.Generator) -> Mapping[str, Any]:
        return self._made[problem, kind][0]

    def reference(self, problem: Problem, inputs: Mapping[str, Any], exact: bool = False) -> tuple[Any, Any]:
        return next(expected for made, expected in self._made.values() if made is inputs)


def run_all(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if request["operator"] not in operators():
        load_operators([Path(request["folder"])])
    library = CpuLibrary(Path(request["library"]))
    switches = ctypes.CDLL(request["library"])
    once, shown = set(request["once"]), set[int]()
    for data in request["kernels"]:
        kernel = Kernel.from_json(data)
        tested = Remembered(operator(kernel.operator), kernel)
        gc.freeze()  # else each fork copies what it collects
        unchanged = _in_a_fork(library, switches, kernel, tested, AS_IT_IS)
        reached = unchanged.pop("reached", [])
        yield {"kernel": kernel.id, "number": AS_IT_IS, **unchanged}
        asked = reached if request["asked"] is None else request["asked"][kernel.id]
        waiting = [number for number in asked if number in reached and number not in once & shown]
        for number in waiting[: request["most"]]:
            killed = _in_a_fork(library, switches, kernel, tested, number)
            killed.pop("reached", None)
            if killed["verdict"] != "ok":
                shown.add(number)
            yield {"kernel": kernel.id, "number": number, **killed}


def _in_a_fork(
    library: CpuLibrary, switches: ctypes.CDLL, kernel: Kernel, tested: Remembered, number: int
) -> dict[str, Any]:
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiving)
        # Behind the plan's own limit, for what that does not end.
        resource.setrlimit(resource.RLIMIT_CPU, (int(3 * RUN_CPU_SECONDS), int(3 * RUN_CPU_SECONDS)))
        answer = _run(library, switches, kernel, tested, number)
        with os.fdopen(sending, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        words = pipe.read()
    _, status = os.waitpid(child, 0)
    if words:
        answer = json.loads(words)
        assert isinstance(answer, dict)
        return answer
    ended = os.waitstatus_to_exitcode(status)
    # An exception of Python's is this suite's own fault, and no verdict.
    assert ended < 0, f"the run of mutant {number} failed; see above"
    return {"verdict": "runtime_error", "message": f"the process ended with {signal.Signals(-ended).name}"}


def _run(library: CpuLibrary, switches: ctypes.CDLL, kernel: Kernel, tested: Remembered, number: int) -> dict[str, Any]:
    ctypes.c_int.in_dll(switches, "cukiln_mutant").value = number
    test = plan_test(library, kernel, SEED, RUN_CPU_SECONDS)
    test.tested = tested
    failure = test.failure()
    asked = (ctypes.c_ubyte * MAX_SWITCHES).in_dll(switches, "cukiln_reached")
    return {
        "verdict": failure.verdict if failure else "ok",
        "message": failure.message if failure else "",
        "reached": [index for index in range(MAX_SWITCHES) if asked[index]],
    }


if __name__ == "__main__":
    for verdict in run_all(json.loads(Path(sys.argv[1]).read_text())):
        sys.stdout.write(json.dumps(verdict) + "\n")
        sys.stdout.flush()
