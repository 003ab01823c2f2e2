"""Child process: runs the test plan of a library's kernels on the CPU and says what it saw, one JSON line each.

`python -m workers.run_on_cpu REQUEST` where REQUEST is a JSON file:
`{"library": path, "kernels": [kernel], "operators": {name: folder}, "seed": int, "cpu_seconds": float}`.
Before a kernel runs, `{"start": id}`; after it `{"kernel": id, "verdict": …, "message": …, "details": …,
"wall_seconds": …, "cpu_seconds": …}`. It stops early, with exit status 0, after a kernel that may have damaged this
process; the parent starts another child for the rest.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codegen.kernel import Kernel
from codegen.operator import Operator
from codegen.operators import load_operators, operator, operators
from codegen.test_plan import Case, Judgement, Run, describe_case, differing, judge, plan_cases
from workers.cpu_library import CpuLibrary, Outcome, Tensor


@dataclass(frozen=True)
class Failure:
    """Why a kernel is not ok. `tainted`: it may have damaged this process."""

    verdict: str
    message: str
    tainted: bool = False


class KernelTest:
    """One kernel under test. `details` grow case by case, so that a failure keeps what was right before it."""

    def __init__(self, library: CpuLibrary, kernel: Kernel, seed: int, cpu_seconds: float) -> None:
        self._library = library
        self._kernel = kernel
        self._operator: Operator = operator(kernel.operator)
        self._seed = seed
        self._deadline = time.process_time() + cpu_seconds
        self.cases: list[dict[str, Any]] = []

    def failure(self) -> Failure | None:
        """Runs the whole plan; the first thing that is wrong, or null."""
        for case in plan_cases(self._operator, self._kernel, self._seed):
            found = self._run_case(case)
            if found is not None:
                return found
        return None

    def _run_case(self, case: Case) -> Failure | None:
        extents = self._operator.extents(case.problem)
        described = describe_case(case, extents)
        self.cases.append(described)
        inputs = self._operator.make_inputs(case.problem, case.kind, np.random.default_rng(case.seed))
        expected, bound = self._operator.reference(case.problem, inputs, exact=case.exact)
        try:
            tensors = self._library.allocate(self._operator.operands(case.problem))
            workspace = self._library.workspace(self._kernel.namespace, extents)
            for tensor in tensors:
                if tensor.operand.role == "in":
                    tensor.fill(inputs[tensor.operand.name])
            return self._run_all(case, tensors, workspace, expected, bound, described)
        finally:
            tensors = []
            self._library.free()

    def _run_all(
        self,
        case: Case,
        tensors: list[Tensor],
        workspace: NDArray[np.uint8] | None,
        expected: NDArray[np.float64],
        bound: NDArray[np.float64],
        described: dict[str, Any],
    ) -> Failure | None:
        first: NDArray[Any] | None = None
        (out,) = (tensor for tensor in tensors if tensor.operand.role == "out")
        for run in case.runs:
            out.poison()
            if workspace is not None:
                workspace[...] = 0xFF
            outcome = self._run(case, run, tensors, workspace)
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
            elif not case.exact and (changed := differing(first, out.view.copy())):
                words = f"{changed} of {first.size} elements differ between two runs on the same inputs"
                return Failure("incorrect", f"{words} [{_where(described, run)}]")
        return None

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
    for data in request["kernels"]:
        kernel = Kernel.from_json(data)
        _say({"start": kernel.id})
        began_at, wall, cpu = time.time(), time.perf_counter(), time.process_time()
        test = KernelTest(library, kernel, request["seed"], request["cpu_seconds"])
        failure = test.failure()
        _say(
            {
                "kernel": kernel.id,
                "verdict": failure.verdict if failure else "ok",
                "message": failure.message if failure else "",
                "details": {"seed": request["seed"], "began_at": began_at, "cases": test.cases},
                "wall_seconds": time.perf_counter() - wall,
                "cpu_seconds": time.process_time() - cpu,
            }
        )
        if failure and failure.tainted:
            return


if __name__ == "__main__":
    run_kernels(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
