"""An operator whose kernels are wrong in one chosen way each: what the CPU execution must notice."""

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
from codegen.search.rules import Accepted, Rejected, check
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import SearchSpace, Tunable, build_space
from codegen.targets import Target

HALVES = 64  # elements of a block; the halves are added
DECLARED = 35  # its bits depend on the order of warps, and it says so
REJECTED = 63  # the fault that the rules keep from being compiled


class FaultyProblem(Problem):
    operator: Literal["faulty"] = "faulty"
    rows: Extent
    columns: Extent
    pitch: Extent


class Faulty(Operator):
    name = "faulty"
    problem_type = FaultyProblem
    tunables = (Tunable("fault", tuple(range(64)), False, "which way the kernel is wrong; 0 is right", 0),)
    folder = Path(__file__).parent
    extent_names = ("rows", "columns", "pitch")

    def signature(self, problem: Problem) -> Mapping[str, Any]:
        return {}

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        right = Schedule.of({"fault": 0})
        every = {"fault": self.tunables[0].allowed}
        return build_space(search, self.tunables, {1: {"fault": (0,)}, 2: every}, right)

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        fault = schedule.get("fault")
        return check(fault != REJECTED, "fault", f"fault {fault} is the one that the rules reject") or Accepted()

    def config(self, kernel: Kernel) -> Config:
        return Config({"fault": int(kernel.tunables.get("fault"))}, ())

    def deterministic(self, kernel: Kernel) -> bool:
        return kernel.tunables.get("fault") != DECLARED

    def extents(self, problem: Problem) -> list[int]:
        return [int(getattr(problem, name)) for name in self.extent_names]

    def scalars(self, problem: Problem) -> list[float]:
        return []

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        rows, columns, pitch = self.extents(problem)
        return (
            Operand("in", "float32", "in", (rows, columns), (pitch, 1)),
            Operand("out", "float32", "out", (rows, columns), (pitch, 1)),
        )

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        return [FaultyProblem(rows=2, columns=128, pitch=131), FaultyProblem(rows=3, columns=97, pitch=98)]

    def test_launches(self, kernel: Kernel, problem: Problem) -> list[list[int]]:
        return [[]]

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        rows, columns, _ = self.extents(problem)
        if kind == "integer":
            return {"in": rng.integers(1, 9, (rows, columns)).astype(np.float32)}
        return {"in": rng.standard_normal((rows, columns), dtype=np.float32)}

    def reference(self, problem: Problem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
        rows, columns, _ = self.extents(problem)
        blocks = -(-columns // HALVES)
        padded = np.zeros((rows, blocks * HALVES))
        padded[:, :columns] = inputs["in"]
        halves = padded.reshape(rows, blocks, 2, HALVES // 2)
        sums = np.broadcast_to(halves.sum(axis=2, keepdims=True), halves.shape).reshape(rows, -1)[:, :columns]
        return sums, np.full(sums.shape, 1e-5)

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        rows, columns, _ = self.extents(problem)
        return Cost(rows * columns, 4 * rows * columns, 4 * rows * columns, launches=1, workspace_bytes=0)

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        rows, columns, _ = self.extents(problem)
        elements = float(rows * columns)
        return Work(
            blocks=rows * -(-columns // HALVES),
            threads=HALVES,
            fma=elements,
            other_instructions=8 * elements,
            shared_bytes=12 * elements,
            l2_bytes=8 * elements,
            dram_bytes=8 * elements,
            dynamic_shared_bytes=HALVES * 4,
            independent=1,
            steps=1,
            overlap=0.0,
        )

    def launch_bounds(self, kernel: Kernel, function: str) -> LaunchBounds:
        return LaunchBounds(HALVES)

    def shared_bytes(self, kernel: Kernel) -> int:
        return HALVES * 4

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        return 0.01


OPERATOR = Faulty()
