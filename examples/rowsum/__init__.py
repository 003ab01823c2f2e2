"""out[r] = sum over columns of in[r, c]: the operator of docs/writing-a-kernel.md."""

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
    constants,
)
from codegen.problem import Extent, Problem
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import SearchSpace, Tunable, build_space
from codegen.targets import Target

THREADS, TILE_ROWS, TILE_COLUMNS = 64, 32, 32  # as in kernel.cuh
UNIT_ROUNDOFF = 2.0**-24  # of fp32


class RowsumProblem(Problem):
    """What is asked for: a packed fp32 matrix of rows x columns."""

    operator: Literal["rowsum"] = "rowsum"
    rows: Extent
    columns: Extent


class Rowsum(Operator):
    name = "rowsum"
    problem_type = RowsumProblem
    folder = Path(__file__).parent
    extent_names = ("rows", "columns")
    tunables = (Tunable("pitch", (32, 36), False, "floats from one row of a tile to the next in shared memory", 36),)

    def signature(self, problem: Problem) -> dict[str, Any]:
        return {"dtype": "float32"}

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        levels: dict[int, dict[str, tuple[int | str, ...]]] = {1: {"pitch": (36,)}, 2: {"pitch": (32, 36)}}
        return build_space(search, self.tunables, levels, Schedule.of({"pitch": 36}))

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        columns = self.extents(problem)[1]
        return (
            check(columns % 4 == 0, "columns", f"{columns} columns are no multiple of the 4 that a copy moves")
            or check(target.capability >= 80, "copy", f"cp.async needs sm_80; the target is {target.name}")
            or ACCEPTED
        )

    def config(self, kernel: Kernel) -> Config:
        return Config(constants(self.tunables, kernel.tunables.as_dict()), ())

    def extents(self, problem: Problem) -> list[int]:
        assert isinstance(problem, RowsumProblem)
        return [problem.rows, problem.columns]

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        rows, columns = self.extents(problem)
        return (
            Operand("in", "float32", "in", (rows, columns), (columns, 1)),
            Operand("out", "float32", "out", (rows,), (1,)),
        )

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        """Whole tiles and more of them than stages; tails in both axes; the smallest."""
        return [
            RowsumProblem(rows=64, columns=128),
            RowsumProblem(rows=45, columns=76),
            RowsumProblem(rows=1, columns=4),
        ]

    def test_launches(self, kernel: Kernel, problem: Problem) -> list[list[int]]:
        return [[]]

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        shape = tuple(self.extents(problem))
        if kind == "integer":
            return {"in": rng.integers(-8, 9, shape).astype(np.float32)}
        return {"in": rng.standard_normal(shape, dtype=np.float32)}

    def reference(self, problem: Problem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
        """The sums, and a bound for additions in any order: Higham, "Accuracy and Stability of Numerical Algorithms",
        2nd edition, (4.4)."""
        values = inputs["in"].astype(np.float64)
        roundings = values.shape[1] * UNIT_ROUNDOFF
        return values.sum(axis=1), roundings / (1 - roundings) * np.abs(values).sum(axis=1)

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        rows, columns = self.extents(problem)
        return Cost(rows * columns, 4 * rows * columns, 4 * rows, launches=1, workspace_bytes=0)

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        rows, columns = self.extents(problem)
        blocks, steps = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
        elements = float(blocks * TILE_ROWS * steps * TILE_COLUMNS)
        return Work(
            blocks=blocks,
            threads=THREADS,
            fma=elements,
            other_instructions=elements,
            shared_bytes=8 * elements,
            l2_bytes=4 * elements,
            dram_bytes=4.0 * rows * columns,
            dynamic_shared_bytes=2 * TILE_ROWS * int(schedule.get("pitch")) * 4,
            independent=1,
            steps=steps,
            overlap=0.5,
        )

    def launch_bounds(self, kernel: Kernel, function: str) -> LaunchBounds:
        return LaunchBounds(THREADS)

    def shared_bytes(self, kernel: Kernel) -> int:
        return 2 * TILE_ROWS * int(kernel.tunables.get("pitch")) * 4

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        return 0.1


OPERATOR = Rowsum()
