"""Reductions over any axes of an array, after a map of one element or of two: threads go along rows of neighbours, or
along columns of vectors."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files as packaged_files
from typing import Any

import numpy as np

from codegen.dtypes import dtype
from codegen.epilogue import scalars, structures, tensor_nodes
from codegen.kernel import Kernel
from codegen.operand import packed_strides
from codegen.operator import (
    Array,
    Config,
    ConfigField,
    Cost,
    Float64,
    InputKind,
    LaunchBounds,
    Operand,
    Operator,
    Work,
    constants,
)
from codegen.operators.reduce import inputs, rules, space, work
from codegen.operators.reduce.axes import MAX_AXES, WIDEST_BYTES
from codegen.operators.reduce.problem import APPROXIMATE, FUNCTIONS, MAPS, OF_TWO, ReduceProblem
from codegen.operators.reduce.reduced import MANY_SLICES, reduced_problems
from codegen.operators.reduce.reference import reference
from codegen.problem import Problem, require
from codegen.search.rules import Accepted, Rejected
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import SearchSpace
from codegen.targets import Target


class Reduce(Operator):
    """out = epilogue(fn of map(x) along the axes); see ReduceProblem."""

    name = "reduce"
    problem_type = ReduceProblem
    tunables = space.TUNABLES
    folder = packaged_files("codegen.operators.reduce")
    shared = ("reduce.cuh",)
    extent_names = (
        *(f"extent_{i}" for i in range(MAX_AXES)), *(f"stride_{i}" for i in range(MAX_AXES)), "outputs",
    )  # fmt: skip
    attribute_names = ("reduced",)

    def signature(self, problem: Problem) -> dict[str, Any]:
        p = _reduce(problem)
        own = space.form(p)
        return {
            "dtype": p.dtype, "out_dtype": p.out_dtype, "fn": p.fn, "map": p.map, "two_inputs": p.two_inputs,
            "write_map": p.write_map, "epilogue": structures(p.epilogue), "inner": own.inner, "align": own.align,
            "scattered": own.scattered,
            "kept_axes": len(own.kept.extents), "reduced_axes": len(own.reduced.extents),
        }  # fmt: skip

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        p = _reduce(problem)
        return space.space(p, target, search, lambda schedule: self.rules(p, schedule, target))

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        return rules.rules(_reduce(problem), self.signature(problem), schedule, target, workspace_limit)

    def functions(self, kernel: Kernel) -> tuple[str, ...]:
        return ("run",) if kernel.tunables.get("split") == "none" else ("run", "combine")

    def config(self, kernel: Kernel) -> Config:
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        flags = {
            "along_rows": t["algorithm"] == "row",
            "two_pass": t["split"] != "none",
            "two_inputs": s["map"] in OF_TWO,
            "write_map": s["write_map"],
            "scattered": s["scattered"],
        }
        numbers = {
            "fn": FUNCTIONS.index(s["fn"]), "map": MAPS.index(s["map"]),
            "kept_axes": s["kept_axes"], "reduced_axes": s["reduced_axes"],
        }  # fmt: skip
        fields = [ConfigField("bool", name, bool(value)) for name, value in flags.items()]
        fields += [ConfigField("int", name, value) for name, value in numbers.items()]
        fields += constants(space.REST, t)
        types = (("Input", s["dtype"]), ("Output", s["out_dtype"]))
        return Config(tuple(fields), tuple(s["epilogue"]), types, s["out_dtype"])

    def extents(self, problem: Problem) -> list[int]:
        """Missing axes come first."""
        p = _reduce(problem)
        missing = MAX_AXES - len(p.shape)
        strides = (stride if extent != 1 else 0 for extent, stride in zip(p.shape, p.strides, strict=True))
        return [*[1] * missing, *p.shape, *[0] * missing, *strides, p.outputs]

    def attributes(self, problem: Problem) -> list[int]:
        """The reduced axes: the sum of 2 to the number of axes behind each."""
        p = _reduce(problem)
        return [sum(1 << (len(p.shape) - 1 - axis) for axis in p.axes)]

    def scalars(self, problem: Problem) -> list[float]:
        return scalars(_reduce(problem).epilogue)

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """`dx` and both inputs have the same strides; what has the output's shape is packed."""
        p = _reduce(problem)
        own = space.form(p)

        def array(name: str, role: Any) -> Operand:
            return Operand(name, p.dtype, role, p.shape, p.strides, own.align)

        def packed(name: str, element: str, role: Any) -> Operand:
            in_vectors = own.inner == "kept" and not own.scattered
            align = min(own.align, WIDEST_BYTES // dtype(element).bytes) if in_vectors else 1
            return Operand(name, element, role, p.out_shape, packed_strides(p.out_shape), align)

        return (
            *(array(name, "in") for name in (("dy", "x") if p.two_inputs else ("x",))),
            *(packed(name, element, "in") for _, name, element in tensor_nodes(p.epilogue, p.out_dtype)),
            packed("out", p.out_dtype, "out"),
            *((array("dx", "out"),) if p.write_map else ()),
        )

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        return list(reduced_problems(kernel.signature_dict, kernel.tunables.as_dict()))

    def test_launches(self, kernel: Kernel, problem: Problem) -> list[list[int]]:
        """A few slices, one, many."""
        return [[1]] if kernel.tunables.get("split") == "none" else [[3], [1], [MANY_SLICES]]

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        p = _reduce(problem)
        return inputs.make_inputs(p, self.operands(p), kind, rng)

    def reference(self, problem: Problem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
        return reference(_reduce(problem), inputs, exact)

    def exact(self, kernel: Kernel) -> bool:
        s = kernel.signature_dict
        return (
            s["map"] not in APPROXIMATE and s["fn"] not in ("mean", "variance", "logsumexp") and super().exact(kernel)
        )

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        p = _reduce(problem)
        return work.cost(p, schedule, self.operands(p))

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        p = _reduce(problem)
        return work.work(p, schedule, self.signature(p), self.cost(p, schedule))

    def launch_bounds(self, kernel: Kernel, function: str) -> LaunchBounds:
        return LaunchBounds(int(kernel.tunables.get("threads")) if function == "run" else rules.COMBINE_THREADS)

    def estimated_registers(self, kernel: Kernel) -> int:
        return rules.registers(kernel.signature_dict, kernel.tunables.as_dict())

    def shared_bytes(self, kernel: Kernel) -> int:
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        own = rules.shared_bytes(s, t)
        return own if t["split"] == "none" else max(own, rules.combine_shared_bytes(s))

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        return work.compile_seconds(kernel.signature_dict, kernel.tunables.as_dict())


_reduce = require(ReduceProblem)

OPERATOR = Reduce()
