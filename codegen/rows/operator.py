"""What operators share that compute each row of a matrix from all of it (`codegen/device/rows.cuh`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from codegen.alignment import classes
from codegen.dtypes import dtype
from codegen.kernel import Kernel
from codegen.operator import Array, Config, ConfigField, Cost, LaunchBounds, Operand, Operator, Work, constants
from codegen.problem import Problem
from codegen.rows import schedules
from codegen.rows.problem import NormProblem, RowProblem
from codegen.search.rules import Accepted, Rejected
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import SearchSpace
from codegen.targets import Target

# Above so many elements rows are repeated.
LARGEST_DRAWN = 2**22
# Of the tail problem, beyond those in flight.
TAIL_STEPS = 3
# Of the test problems: all have inputs whose result is exact (`codegen/rows/reference.py`), one is usual.
EPSILONS = (12.0, 1e-5, 3.0, 48.0)


class RowOperator(Operator):
    """An operator says what its problems, inputs and reference are, and `flops` of an element."""

    problem_type: ClassVar[type[RowProblem]]
    tunables = schedules.TUNABLES
    shared = ("reduce.cuh", "rows.cuh")
    extent_names = ("rows", "columns")
    flops: ClassVar[int]

    def signature(self, problem: Problem) -> dict[str, Any]:
        p = self.own(problem)
        norm = isinstance(p, NormProblem)
        return {
            "dtype": p.dtype, "out_dtype": p.out_dtype, "align": schedules.align(p),
            "scale": norm and p.scale, "shift": norm and p.shift,
        }  # fmt: skip

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        p = self.own(problem)
        return schedules.space(p, target, search, lambda schedule: self.rules(p, schedule, target))

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        return schedules.rules(self.own(problem), schedule, target)

    def config(self, kernel: Kernel) -> Config:
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        fields = (
            *constants(self.tunables, {"steps": 1, "loads": 1, **t}),
            ConfigField("bool", "scale", s["scale"]),
            ConfigField("bool", "shift", s["shift"]),
            ConfigField("bool", "epsilon", issubclass(self.problem_type, NormProblem)),
        )
        return Config(fields, (), (("Input", s["dtype"]), ("Output", s["out_dtype"])))

    def extents(self, problem: Problem) -> list[int]:
        p = self.own(problem)
        return [p.rows, p.columns]

    def scalars(self, problem: Problem) -> list[float]:
        p = self.own(problem)
        return [p.epsilon] if isinstance(p, NormProblem) else []

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """x, the vectors that all rows share, out."""
        p = self.own(problem)
        matrix, strides, wide = (p.rows, p.columns), (p.columns, 1), schedules.align(p)
        wide_out = min(wide, 16 // dtype(p.out_dtype).bytes)
        return (
            Operand("x", p.dtype, "in", matrix, strides, align=wide),
            *(Operand(name, p.dtype, "in", (p.columns,), (1,), align=wide) for name in vectors_of(p)),
            Operand("out", p.out_dtype, "out", matrix, strides, align=wide_out),
        )

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        """Full rows in two blocks; tails, the last block not full; one vector; several blocks of short rows. The
        norms' epsilons are such that results are exact, and one that is usual."""
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        per_step, room, rows = int(t["row_threads"]) * int(t["vector"]), schedules.capacity(t), int(t["rows"])
        full = room or 2 * int(t["loads"]) * per_step
        tail = room - per_step // 2 if room else (2 * int(t["loads"]) + TAIL_STEPS) * per_step + per_step // 2
        sizes = ((2 * rows, full), (2 * rows + 1, tail), (1, 1), (3 * rows + 1, max(1, full // 3)))
        return [self._of_class(s, count, columns, bool(room), number) for number, (count, columns) in enumerate(sizes)]

    def _of_class(self, s: Mapping[str, Any], rows: int, columns: int, downward: bool, number: int) -> RowProblem:
        """The problem whose rows are of about so many elements, at most where `downward`, and of the class."""
        wide = int(s["align"])
        widest = classes(s["dtype"], quads=False)[0]
        count = max(1, columns // wide)
        if wide < widest and count % 2 == 0:  # a wider access would fit
            count += -1 if downward else 1
        fields = {"shape": (rows, count * wide), "dtype": s["dtype"], "out_dtype": s["out_dtype"]}
        if issubclass(self.problem_type, NormProblem):
            fields |= {"scale": s["scale"], "shift": s["shift"], "epsilon": EPSILONS[number]}
        return self.problem_type(**fields)

    def test_launches(self, kernel: Kernel, problem: Problem) -> list[list[int]]:
        return [[]]

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        p = self.own(problem)
        return schedules.cost(p, self.flops, len(vectors_of(p)))

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        p = self.own(problem)
        return schedules.work(p, schedule.as_dict(), self.cost(p, schedule), target)

    def launch_bounds(self, kernel: Kernel, function: str) -> LaunchBounds:
        return LaunchBounds(schedules.threads(kernel.tunables.as_dict()))

    def estimated_registers(self, kernel: Kernel) -> int:
        return schedules.registers(kernel.tunables.as_dict())

    def shared_bytes(self, kernel: Kernel) -> int:
        return schedules.shared_bytes(kernel.tunables.as_dict(), dtype(kernel.signature_dict["dtype"]).bytes)

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        return 0.05 + 0.004 * (schedules.registers(kernel.tunables.as_dict()) - schedules.OVERHEAD_REGISTERS)

    def own(self, problem: Problem) -> Any:
        """The problem, which must be of this operator."""
        if not isinstance(problem, self.problem_type):
            raise TypeError(f"{self.name} got a problem of operator {problem.operator!r}")
        return problem


def vectors_of(problem: RowProblem) -> tuple[str, ...]:
    """Names of the vectors that all rows share."""
    if not isinstance(problem, NormProblem):
        return ()
    return tuple(name for name, present in (("gamma", problem.scale), ("beta", problem.shift)) if present)


def repeated(problem: RowProblem, rows: Array) -> Array:
    """x with the random rows repeated."""
    return np.resize(rows.astype(dtype(problem.dtype).numpy), (problem.rows, problem.columns))


def random_shape(problem: RowProblem) -> tuple[int, int]:
    """How many rows are random, one at least, and how long they are."""
    return min(problem.rows, max(1, LARGEST_DRAWN // problem.columns)), problem.columns
