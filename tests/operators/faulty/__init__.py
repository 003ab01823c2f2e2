"""An operator whose kernels are wrong in one chosen way each: what the CPU execution must notice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from codegen.kernel import Kernel
from codegen.operator import Array, Config, ConfigField, Cost, Float64, InputKind, Operand, Operator, Work
from codegen.problem import Extent, Problem
from codegen.rules import Accepted, Rejected
from codegen.schedule import Schedule
from codegen.search import Search, SearchSpace, Tunable
from codegen.targets import Target

HALVES = 64  # elements of a block; the halves are added


class FaultyProblem(Problem):
    operator: Literal["faulty"] = "faulty"
    rows: Extent
    columns: Extent
    pitch: Extent


class Faulty(Operator):
    name = "faulty"
    problem_type = FaultyProblem
    tunables = (Tunable("fault", tuple(range(64)), False, "which way the kernel is wrong; 0 is right"),)
    folder = Path(__file__).parent
    extent_names = ("rows", "columns", "pitch")

    def signature(self, problem: Problem) -> Mapping[str, Any]:
        return {}

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        raise NotImplementedError

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        return Accepted()

    def config(self, kernel: Kernel) -> Config:
        return Config((ConfigField("int", "fault", int(kernel.tunables.get("fault"))),), ())

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

    def test_launches(self, kernel: Kernel) -> list[list[int]]:
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
        raise NotImplementedError

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        raise NotImplementedError

    def threads(self, kernel: Kernel) -> int:
        return HALVES

    def min_blocks(self, kernel: Kernel) -> int:
        return 1

    def shared_bytes(self, kernel: Kernel) -> int:
        return HALVES * 4

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        return 0.01


OPERATOR = Faulty()
