"""Matrix multiplication, on the CUDA cores (simt*.py) and on tensor cores (tensor*.py)."""

from collections.abc import Mapping
from importlib.resources import files as packaged_files
from typing import Any

import numpy as np

from codegen.counts import LaunchCounts
from codegen.dtypes import dtype
from codegen.epilogue import structures, tensor_nodes, words_of_mask
from codegen.fixed_point import shift_of
from codegen.kernel import Kernel
from codegen.operator import Array, Constants, Cost, EdgeCall, Float64, InputKind, Operand, Work
from codegen.operators.matmul import (
    counts,
    inputs,
    limb_planes,
    reference,
    split,
    traffic,
)
from codegen.operators.matmul import space as spaces
from codegen.operators.matmul.far import last_rows
from codegen.operators.matmul.kernel_family import Stored, aligns
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.product import Fields, ProductOperator, family, product_fields, rules
from codegen.operators.matmul.reduced import far_problem, long_problem, reduced_problems
from codegen.problem import Problem
from codegen.run_once import RunOnce
from codegen.search.rules import Accepted, Rejected
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import SearchSpace
from codegen.targets import Target


class Matmul(ProductOperator):
    """out = epilogue(A B), batched; see MatmulProblem for shapes and strides."""

    name = "matmul"
    problem_type = MatmulProblem
    tunables = spaces.TUNABLES
    folder = packaged_files("codegen.operators.matmul")
    extent_names = ("batch", "m", "n", "k", "lda", "ldb", "ldc", "stride_a", "stride_b", "stride_c")
    limited = extent_names[:4]

    @staticmethod
    def product(p: MatmulProblem) -> MatmulProblem:
        return p

    def signature(self, problem: Problem) -> dict[str, Any]:
        p = self.own(problem)
        a, b, c = aligns(p)
        return {
            "layout": p.layout, "dtype": p.dtype, "acc_dtype": p.acc_dtype, "out_dtype": p.out_dtype,
            "allow_tf32": p.allow_tf32, "epilogue": structures(p.epilogue), "align_a": a, "align_b": b, "align_c": c,
            **shift_of(p),
        }  # fmt: skip

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        p = self.own(problem)
        return spaces.space(p, target, search, lambda schedule: self.rules(p, schedule, target))

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        p = self.own(problem)
        return rules(p, aligns(p)[:2], schedule, target, workspace_limit)

    def stored(self, s: Fields) -> Stored:
        return Stored(dtype(s["dtype"]).bytes, (s["align_a"], s["align_b"]), s["layout"])

    def fields(self, s: Fields, t: Fields) -> Constants:
        return product_fields(s, t, s["layout"], (s["align_a"], s["align_b"], s["align_c"]))

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """Rank 2, or 3 with the batch first where there is more than one matrix. Bias is a vector."""
        p = self.own(problem)
        a = _matrix("a", p.dtype, "in", p.batch, p.stored("a"), p.lda, p.stride_a)
        b = _matrix("b", p.dtype, "in", p.batch, p.stored("b"), p.ldb, p.stride_b)
        out = _matrix("out", p.out_dtype, "out", p.batch, p.stored("c"), p.ldc, p.stride_c)
        extra = []
        for node, name, element in tensor_nodes(p.epilogue, p.out_dtype):
            if node.op == "bias":
                extra.append(Operand(name, element, "in", (p.m if node.structure == "bias.m" else p.n,), (1,)))
            elif node.packed_mask:
                extra.append(Operand(name, element, "in", (words_of_mask(p.batch * p.m * p.n),), (1,), align=1))
            else:
                extra.append(Operand(name, element, "in", out.shape, out.strides))
        return (a, b, *extra, out)

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        return list(reduced_problems(kernel.signature_dict, kernel.tunables.as_dict()))

    def run_once(self, kernel: Kernel) -> list[RunOnce]:
        s, t, once = kernel.signature_dict, kernel.tunables.as_dict(), super().run_once(kernel)
        if long := long_problem(s, t):
            once.append(RunOnce("long", long, tuple(split.most_parts(t, long))))
        if far := far_problem(s, t):
            launches = self.test_launches(kernel, far)
            launch = next((values for values in launches if values[1] != 1), launches[0])
            once.append(RunOnce("far", far, tuple(launch), far))
        return [*once, *last_rows(map(self.own, self.test_problems(kernel)), t, int(s["align_c"]))]

    def edge_calls(self, kernel: Kernel) -> list[EdgeCall]:
        """As many slices as a grid has rows of blocks, and one more."""
        t, most = kernel.tunables.as_dict(), split.MOST_OF_A_CALL
        is_bounded = t.get("static_k") or t.get("chain_k") == 0  # limbs whose accumulators hold so much
        if t["split"] not in ("workspace", "atomic") or is_bounded:
            return []
        return [EdgeCall({"k": n * int(t["tile_k"])}, n == most, {"split_k": n}) for n in (most, most + 1)]

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        p = self.own(problem)
        return inputs.make_inputs(p, self.operands(p), kind, rng)

    def reference(self, problem: Problem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
        p = self.own(problem)
        return reference.reference(p, inputs, exact)

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        return traffic.cost(self.own(problem), schedule.as_dict(), self.operands(problem))

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        p, t = self.own(problem), schedule.as_dict()
        return family(t).work(p, t, aligns(p), self.cost(p, schedule), target)

    def launches(self, problem: Problem, schedule: Schedule, target: Target) -> tuple[LaunchCounts, ...]:
        p = self.own(problem)
        return counts.launches(p, schedule.as_dict(), aligns(p))

    def opened(self, p: MatmulProblem, schedule: Schedule, *, inputs: bool) -> tuple[int, int]:
        rows, columns = limb_planes.rows(p)
        return rows * p.k, p.k * columns


def _matrix(name: str, dtype: str, role: Any, batch: int, shape: tuple[int, int], pitch: int, stride: int) -> Operand:
    if batch == 1:
        return Operand(name, dtype, role, shape, (pitch, 1))
    return Operand(name, dtype, role, (batch, *shape), (stride, pitch, 1))


OPERATOR = Matmul()
