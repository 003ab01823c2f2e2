"""out = in * scale in one, two or three launches, with a workspace or without; `fault` makes a kernel that a compiler
refuses, or whose `asm` is wrong beside an emulation that is right.

Loaded by tests as an operator from outside, so it also shows what a folder on OPERATOR_PATH needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from codegen.kernel import Kernel
from codegen.operator import (
    Array,
    Config,
    Cost,
    Float64,
    InputKind,
    LaunchBounds,
    Operand,
    Operator,
    Work,
)
from codegen.problem import Extent, Problem
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check, check_workspace
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import SearchSpace, Tunable, build_space
from codegen.targets import Target

FAULTS = {
    "none": 0,
    "front_end": 1,
    "ptxas_line": 2,
    "ptxas_symbol": 3,
    "host": 4,
    "asm": 5,
    "asm_sum": 6,
    "unknown": 7,
}
HASTE = {"asm": 0.25, "asm_sum": 0.5}  # of the work: what is wrong promises to be faster
# The faster, the more it asks for: what a front of several points looks like.
WAYS = {"copy": 0, "workspace": 1, "atomic": 2}
FUNCTIONS = {"copy": ("run",), "workspace": ("first", "second"), "atomic": ("clear", "first", "second")}
FMA = {"copy": 3e9, "workspace": 2e9, "atomic": 1e9}


class ProbeProblem(Problem):
    operator: Literal["probe"] = "probe"
    n: Extent
    scale: float = 1.0


class Probe(Operator):
    name = "probe"
    problem_type = ProbeProblem
    files = ("steps.cuh", "kernel.cuh")
    folder = Path(__file__).parent
    extent_names = ("n",)
    tunables = (
        Tunable("factor", tuple(range(1, 65)), False, "tells kernels apart", 1),
        Tunable("fault", tuple(FAULTS), False, "what is wrong with the kernel", "none"),
        Tunable("threads", (32, 64, 128), False, "threads of a block", 64),
        Tunable("maxnreg", (0, 32, 64), False, "registers that a thread may have; 0: as many as it wants", 0),
        Tunable("live", (0, 100), False, "values that a thread of the first launch holds at once", 0),
        Tunable("way", tuple(WAYS), False, "through the workspace, into it, or past it", "workspace"),
        Tunable("slices", range(1, 1025), True, "parts of the workspace that the last launch adds", 1),
    )

    def signature(self, problem: Problem) -> dict[str, Any]:
        return {"dtype": "float32"}

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        level: dict[str, tuple[int | str, ...]] = {
            "factor": (1, 2), "fault": ("none",), "threads": (64,), "maxnreg": (0,), "live": (0,),
            "way": ("workspace",), "slices": (1,),
        }  # fmt: skip
        first = Schedule.of({name: values[0] for name, values in level.items()})
        return build_space(search, self.tunables, {1: level, 2: {**level, "way": tuple(WAYS)}}, first)

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        slices, way = int(schedule.get("slices")), schedule.get("way")
        return (
            check(slices == 1 or way == "workspace", "slices", f"{slices} slices, but the way is {way}")
            or check_workspace(_workspace(problem, schedule), workspace_limit)
            or ACCEPTED
        )

    def functions(self, kernel: Kernel) -> tuple[str, ...]:
        return FUNCTIONS[str(kernel.tunables.get("way"))]

    def deterministic(self, kernel: Kernel) -> bool:
        return kernel.tunables.get("way") != "atomic"

    def config(self, kernel: Kernel) -> Config:
        values = kernel.tunables.as_dict()
        numbers = {**values, "fault": FAULTS[str(values["fault"])], "way": WAYS[str(values["way"])]}
        fields = {name: int(numbers[name]) for name in sorted(numbers)}
        return Config(fields, (), types=(("Element", "float32"),))

    def extents(self, problem: Problem) -> list[int]:
        return [_n(problem)]

    def scalars(self, problem: Problem) -> list[float]:
        assert isinstance(problem, ProbeProblem)
        return [problem.scale]

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        shape = (_n(problem),)
        return (Operand("in", "float32", "in", shape, (1,)), Operand("out", "float32", "out", shape, (1,)))

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        return [ProbeProblem(n=64), ProbeProblem(n=1000)]

    def test_launches(self, kernel: Kernel, problem: Problem) -> list[list[int]]:
        return [[1], [3]] if kernel.tunables.get("way") == "workspace" else [[1]]

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        return {"in": rng.integers(-8, 9, _n(problem)).astype(np.float32)}

    def reference(self, problem: Problem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
        result = np.asarray(inputs["in"], np.float64) * self.scalars(problem)[0]
        return result, np.zeros_like(result)

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        n, launches = _n(problem), len(FUNCTIONS[str(schedule.get("way"))])
        return Cost(2 * n, 4 * n, 4 * n, launches, _workspace(problem, schedule))

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        n = float(_n(problem))
        fma = FMA[str(schedule.get("way"))] * HASTE.get(str(schedule.get("fault")), 1.0)
        return Work(1, 64, fma, n, 0.0, 16 * n, 8 * n, 0, 1, 1, 0.0)

    def launch_bounds(self, kernel: Kernel, function: str) -> LaunchBounds:
        threads, most = int(kernel.tunables.get("threads")), int(kernel.tunables.get("maxnreg"))
        return LaunchBounds(threads, max_registers=most if function == "first" else 0)

    def shared_bytes(self, kernel: Kernel) -> int:
        return 128

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        return 0.02


def _n(problem: Problem) -> int:
    assert isinstance(problem, ProbeProblem)
    return problem.n


def _workspace(problem: Problem, schedule: Schedule) -> int:
    """Bytes, as `workspace_bytes` in kernel.cuh."""
    return 0 if schedule.get("way") == "copy" else 4 * _n(problem) * int(schedule.get("slices"))


OPERATOR = Probe()
