"""Child process: runs the test plan of a library's kernels on the CPU and says what it saw, one JSON line each.

`python -m workers.run_on_cpu REQUEST` where REQUEST is a JSON file:
`{"library": path, "kernels": [kernel], "operators": {name: folder}, "seed": int, "cpu_seconds": float}`, and `part`
(of `codegen.test_plan.Part`) where not the whole plan is wanted. What kernels print goes to stderr.
Before a kernel runs, `{"start": id}`; after it `{"kernel": id, "verdict": …, "message": …, "details": …,
"wall_seconds": …, "cpu_seconds": …}`. It stops early, with exit status 0, after a kernel that may have damaged this
process; the parent starts another child for the rest.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codegen.kernel import Kernel
from codegen.operator import Operator
from codegen.operators import load_operators, operator, operators
from codegen.test_plan import Case, Judgement, Part, Run, describe_case, differing, judge, plan_cases
from workers.cpu_library import CpuLibrary, Outcome, SharedAccess, Tensor


@dataclass(frozen=True)
class Failure:
    """Why a kernel is not ok. `tainted`: it may have damaged this process."""

    verdict: str
    message: str
    tainted: bool = False


class KernelTest:
    """One kernel under test. `details` grow case by case, so that a failure keeps what was right before it."""

    def __init__(
        self, library: CpuLibrary, kernel: Kernel, seed: int, cpu_seconds: float, part: Part | None = None
    ) -> None:
        self._library = library
        self._part = part or Part()
        self._kernel = kernel
        self._operator: Operator = operator(kernel.operator)
        self._seed = seed
        self._deadline = time.process_time() + cpu_seconds
        self.cases: list[dict[str, Any]] = []
        self._shared: dict[tuple[str, str, int], SharedAccess] = {}

    def failure(self) -> Failure | None:
        """Runs the plan, or the part of it that is wanted; the first thing that is wrong, or null."""
        for case in self._part.of(plan_cases(self._operator, self._kernel, self._seed)):
            found = self._run_case(case)
            if found is not None:
                return found
        return None

    def shared_memory(self) -> list[dict[str, Any]]:
        """What the watched runs counted, by place; those with the most lost wavefronts first."""

        def rank(one: SharedAccess) -> tuple[int, str, int, str]:
            file, _, line = one.site.rpartition(":")
            return one.ideal - one.wavefronts, file, int(line), one.kind

        return [asdict(one) for one in sorted(self._shared.values(), key=rank)]

    def _run_case(self, case: Case) -> Failure | None:
        extents = self._operator.extents(case.problem)
        described = describe_case(case, extents)
        self.cases.append(described)
        inputs = self._operator.make_inputs(case.problem, case.kind, np.random.default_rng(case.seed))
        expected, bound = self._operator.reference(case.problem, inputs, exact=case.exact)
        try:
            tensors = self._library.allocate(self._operator.operands(case.problem))
            # How much a call needs depends on its launch; each gets exactly that, so that a byte more is noticed.
            workspaces = {
                launch: self._library.workspace(self._kernel.namespace, extents, launch)
                for launch in dict.fromkeys(run.launch for run in case.runs)
            }
            for tensor in tensors:
                if tensor.operand.role == "in":
                    tensor.fill(inputs[tensor.operand.name])
            return self._run_all(case, tensors, workspaces, expected, bound, described)
        finally:
            tensors, workspaces = [], {}
            self._library.free()

    def _run_all(
        self,
        case: Case,
        tensors: list[Tensor],
        workspaces: Mapping[tuple[int, ...], NDArray[np.uint8] | None],
        expected: NDArray[np.float64],
        bound: NDArray[np.float64],
        described: dict[str, Any],
    ) -> Failure | None:
        first: NDArray[Any] | None = None
        repeats = not case.exact and self._operator.deterministic(self._kernel)
        (out,) = (tensor for tensor in tensors if tensor.operand.role == "out")
        for run in case.runs:
            out.poison()
            workspace = workspaces[run.launch]
            if workspace is not None:
                workspace[...] = 0xFF
            outcome = self._run(case, run, tensors, workspace)
            self._count(outcome.shared_memory)
            if outcome.status != "ok":
                return Failure(outcome.status, f"{outcome.message} [{_where(described, run)}]", outcome.tainted)
            judgement = judge(out.view, expected, bound, exact=case.exact)
            _keep_worst(described, judgement)
            if not judgement.ok:
                return Failure("incorrect", f"{judgement.sentence()} [{_where(described, run)}]")
            gap = out.broken_gap()
            if gap is not None:
                return Failure(
                    "incorrect", f"wrote between the rows of out, at element {gap} [{_where(described, run)}]"
                )
            if first is None:
                first = out.view.copy()
            elif repeats and (changed := differing(first, out.view.copy())):
                words = f"{changed} of {first.size} elements differ between two runs on the same inputs"
                return Failure("incorrect", f"{words} [{_where(described, run)}]")
        return None

    def _count(self, accesses: Iterable[SharedAccess]) -> None:
        for one in accesses:
            place = (one.site, one.kind, one.bytes)
            before = self._shared.get(place, replace(one, warp_accesses=0, wavefronts=0, ideal=0))
            self._shared[place] = replace(
                one,
                warp_accesses=before.warp_accesses + one.warp_accesses,
                wavefronts=before.wavefronts + one.wavefronts,
                ideal=before.ideal + one.ideal,
            )

    def _run(self, case: Case, run: Run, tensors: list[Tensor], workspace: NDArray[np.uint8] | None) -> Outcome:
        return self._library.run(
            self._kernel.namespace,
            tensors,
            workspace,
            extents=self._operator.extents(case.problem),
            launch=run.launch,
            scalars=self._operator.scalars(case.problem),
            order=run.order,
            seed=run.seed,
            exact=case.exact,
            watch=run.watch,
            # A run that gets no time at all would never end: the timer of 0 seconds is no timer.
            cpu_seconds=max(0.05, self._deadline - time.process_time()),
        )


def _keep_worst(described: dict[str, Any], judgement: Judgement) -> None:
    # JSON has no NaN and no infinity: null stands for an error that is no number.
    if not np.isfinite(judgement.max_error) or judgement.max_error >= (described.get("max_error") or 0.0):
        described["error_bound"] = _number(judgement.error_bound)
    for name, value in (("max_error", judgement.max_error), ("max_ratio", judgement.max_ratio)):
        if not np.isfinite(value):
            described[name] = None
        elif described.get(name, 0.0) is not None:
            described[name] = max(described.get(name, 0.0), value)
    if not judgement.ok:
        described["wrong"] = judgement.wrong
        described["first_wrong"] = {
            "index": list(judgement.index or ()),
            "got": _number(judgement.got),
            "expected": _number(judgement.expected),
            "bound": _number(judgement.bound),
        }


def _number(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None


def _where(described: dict[str, Any], run: Run) -> str:
    return f"{described['kind']} inputs, extents {described['extents']}, launch {list(run.launch)}, {run.order} warps"


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message, allow_nan=False) + "\n")
    sys.stdout.flush()


def run_kernels(request: dict[str, Any]) -> None:
    """Judges the request's kernels one after the other, until one may have damaged this process."""
    unknown = [Path(folder) for name, folder in request["operators"].items() if name not in operators()]
    load_operators(unknown)
    library = CpuLibrary(Path(request["library"]))
    part = Part(**request.get("part", {}))
    for data in request["kernels"]:
        kernel = Kernel.from_json(data)
        _say({"start": kernel.id})
        began_at, wall, cpu = time.time(), time.perf_counter(), time.process_time()
        test = KernelTest(library, kernel, request["seed"], request["cpu_seconds"], part)
        failure = test.failure()
        _say(
            {
                "kernel": kernel.id,
                "verdict": failure.verdict if failure else "ok",
                "message": failure.message if failure else "",
                "details": {
                    "seed": request["seed"],
                    "began_at": began_at,
                    "cases": test.cases,
                    "shared_memory": test.shared_memory(),
                },
                "wall_seconds": time.perf_counter() - wall,
                "cpu_seconds": time.process_time() - cpu,
            }
        )
        if failure and failure.tainted:
            return


def _keep_prints_apart() -> None:
    """A kernel's printf must not get between the lines of this protocol, nor be lost with a process that it kills."""
    protocol = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(protocol, "w", encoding="utf-8")
    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)  # _IOLBF: line by line


if __name__ == "__main__":
    _keep_prints_apart()
    run_kernels(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
