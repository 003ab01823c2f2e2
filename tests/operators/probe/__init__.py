"""out = in * scale, in two launches; `fault` makes a kernel that a compiler refuses.

Loaded by tests as an operator from outside, so it also shows what a folder on OPERATOR_PATH needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from codegen.kernel import Kernel
from codegen.operator import Array, Config, ConfigField, Cost, Float64, InputKind, Operand, Operator, Work
from codegen.problem import Extent, Problem
from codegen.rules import ACCEPTED, Accepted, Rejected
from codegen.schedule import Schedule
from codegen.search import Search, SearchSpace, Tunable, build_space
from codegen.targets import Target

FAULTS = {"none": 0, "front_end": 1, "ptxas_line": 2, "ptxas_symbol": 3, "host": 4}


class ProbeProblem(Problem):
    operator: Literal["probe"] = "probe"
    n: Extent
    scale: float = 1.0


class Probe(Operator):
    name = "probe"
    problem_type = ProbeProblem
    functions = ("first", "second")
    folder = Path(__file__).parent
    extent_names = ("n",)
    tunables = (
        Tunable("factor", tuple(range(1, 65)), False, "tells kernels apart"),
        Tunable("fault", tuple(FAULTS), False, "what is wrong with the kernel"),
        Tunable("threads", (32, 64, 128), False, "threads of a block"),
        Tunable("wave", (0, 1), True, "means nothing"),
    )

    def signature(self, problem: Problem) -> dict[str, Any]:
        return {"dtype": "float32"}

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        level = {"factor": (1, 2), "fault": ("none",), "threads": (64,), "wave": (0,)}
        first = Schedule.of({"factor": 1, "fault": "none", "threads": 64, "wave": 0})
        return build_space(search, self.tunables, {1: level, 2: level}, first)

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        return ACCEPTED

    def config(self, kernel: Kernel) -> Config:
        values = kernel.tunables.as_dict()
        numbers = {**values, "fault": FAULTS[str(values["fault"])]}
        return Config(tuple(ConfigField("int", name, int(numbers[name])) for name in sorted(numbers)), ())

    def extents(self, problem: Problem) -> list[int]:
        return [_n(problem)]

    def scalars(self, problem: Problem) -> list[float]:
        assert isinstance(problem, ProbeProblem)
        return [problem.scale]

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        shape = (_n(problem),)
        return (Operand("in", "float32", "in", shape, (1,)), Operand("out", "float32", "out", shape, (1,)))

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        return [ProbeProblem(n=64)]

    def test_launches(self, kernel: Kernel) -> list[list[int]]:
        return [[0], [1]]

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        return {"in": rng.integers(-8, 9, _n(problem)).astype(np.float32)}

    def reference(self, problem: Problem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
        result = np.asarray(inputs["in"], np.float64) * self.scalars(problem)[0]
        return result, np.zeros_like(result)

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        n = _n(problem)
        return Cost(flops=2 * n, bytes_read=4 * n, bytes_written=4 * n, launches=2, workspace_bytes=4 * n)

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        n = float(_n(problem))
        return Work(1, 64, n, n, 0.0, 16 * n, 8 * n, 0, 1, 1, 0.0)

    def threads(self, kernel: Kernel) -> int:
        return int(kernel.tunables.get("threads"))

    def min_blocks(self, kernel: Kernel) -> int:
        return 1

    def shared_bytes(self, kernel: Kernel) -> int:
        return 128

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        return 0.02


def _n(problem: Problem) -> int:
    assert isinstance(problem, ProbeProblem)
    return problem.n


OPERATOR = Probe()
