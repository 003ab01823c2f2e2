"""Matrix multiplication in fp32 on the CUDA cores."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import numpy as np

from codegen.epilogue import node_of, scalars, structures
from codegen.epilogue import operand_names as epilogue_operand_names
from codegen.kernel import Kernel
from codegen.operator import Array, Config, ConfigField, Cost, Float64, InputKind, Operand, Operator, Work
from codegen.operators.matmul import inputs, rules, space, work
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.reduced import reduced_problems
from codegen.operators.matmul.reference import reference
from codegen.problem import Problem
from codegen.rules import Accepted, Rejected
from codegen.schedule import Schedule
from codegen.search import Search, SearchSpace, build_space
from codegen.targets import Target

# Elements that one global memory access moves where extents, pitch and batch stride allow it: 16 bytes.
VECTOR = 4
# Seconds of nvcc per output of a thread.
LIGHT_NODE_SECONDS, ACTIVATION_SECONDS = 0.0003, 0.0019
EXTENT_NAMES = ("batch", "m", "n", "k", "lda", "ldb", "ldc", "stride_a", "stride_b", "stride_c")


class Matmul(Operator):
    """out = epilogue(A B), batched; see MatmulProblem for shapes and strides."""

    name = "matmul"
    problem_type = MatmulProblem
    tunables = space.TUNABLES
    folder = files("codegen.operators.matmul")
    extent_names = EXTENT_NAMES

    def signature(self, problem: Problem) -> dict[str, Any]:
        p = _matmul(problem)
        a, b, c = aligns(p)
        return {
            "layout": p.layout, "dtype": p.dtype, "acc_dtype": p.acc_dtype, "out_dtype": p.out_dtype,
            "allow_tf32": p.allow_tf32, "epilogue": structures(p.epilogue), "align_a": a, "align_b": b, "align_c": c,
        }  # fmt: skip

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        p = _matmul(problem)
        default = space.default(p, target, lambda schedule: self.rules(p, schedule, target))
        return build_space(search, self.tunables, space.levels(p, target), default)

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        p = _matmul(problem)
        return rules.rules(p, aligns(p)[:2], schedule, target, workspace_limit)

    def config(self, kernel: Kernel) -> Config:
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        fields = [
            ConfigField("bool", "a_transposed", s["layout"][0] == "t"),
            ConfigField("bool", "b_transposed", s["layout"][1] == "t"),
            *(ConfigField("int", name, s[name]) for name in ("align_a", "align_b", "align_c")),
            *(ConfigField("int", name, int(t[name])) for name in sorted(self.kernel_tunables)),
            ConfigField("int", "threads", rules.threads(t)),
        ]
        return Config(tuple(fields), tuple(s["epilogue"]))

    def extents(self, problem: Problem) -> list[int]:
        return [int(getattr(problem, name)) for name in EXTENT_NAMES]

    def scalars(self, problem: Problem) -> list[float]:
        return scalars(_matmul(problem).epilogue)

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """Rank 2, or 3 with the batch first where there is more than one matrix. Bias is a vector."""
        p = _matmul(problem)
        a = _matrix("a", p.dtype, "in", p.batch, p.stored("a"), p.lda, p.stride_a)
        b = _matrix("b", p.dtype, "in", p.batch, p.stored("b"), p.ldb, p.stride_b)
        out = _matrix("out", p.out_dtype, "out", p.batch, p.stored("c"), p.ldc, p.stride_c)
        extra = []
        for node, name in zip(p.epilogue, epilogue_operand_names(p.epilogue), strict=True):
            if name is None or node.operand_dtype is None:
                continue
            if node.op == "bias":
                extra.append(
                    Operand(name, node.operand_dtype, "in", (p.m if node.structure == "bias.m" else p.n,), (1,))
                )
            else:
                extra.append(Operand(name, node.operand_dtype, "in", out.shape, out.strides))
        return (a, b, out, *extra)

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        return list(reduced_problems(kernel.signature_dict, kernel.tunables.as_dict()))

    def test_launches(self, kernel: Kernel) -> list[list[int]]:
        return [[int(value)] for tunable in self.tunables if tunable.name == "raster" for value in tunable.allowed]

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        p = _matmul(problem)
        casts = any(node.op == "cast" for node in p.epilogue)
        return inputs.make_inputs(self.operands(p), p.k, -2 if p.a_transposed else -1, casts, kind, rng)

    def reference(self, problem: Problem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
        return reference(_matmul(problem), inputs, exact)

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        return work.cost(_matmul(problem), self.operands(problem))

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        p = _matmul(problem)
        return work.work(p, schedule.as_dict(), aligns(p), self.cost(p, schedule), target)

    def threads(self, kernel: Kernel) -> int:
        return rules.threads(kernel.tunables.as_dict())

    def min_blocks(self, kernel: Kernel) -> int:
        return int(kernel.tunables.get("min_blocks"))

    def shared_bytes(self, kernel: Kernel) -> int:
        return rules.shared_bytes(kernel.tunables.as_dict())

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        """Grows with what unrolling and the epilogue write; fitted to nvcc 13.2: 0.07 to 0.35 CPU seconds."""
        t = kernel.tunables.as_dict()
        outputs = int(t["thread_m"]) * int(t["thread_n"])
        nodes = sum(LIGHT_NODE_SECONDS if node_of(part).exact else ACTIVATION_SECONDS for part in _epilogue(kernel))
        return 0.055 + outputs * (0.0018 * int(t["unroll_k"]) / 8 + nodes) + 0.001 * rules.held(t)


def aligns(problem: MatmulProblem) -> tuple[int, int, int]:
    """Elements per global access of A, B and out (and of what has out's shape)."""

    def of(columns: int, pitch: int, stride: int) -> int:
        moved = stride if problem.batch > 1 else 0
        return VECTOR if columns % VECTOR == 0 and pitch % VECTOR == 0 and moved % VECTOR == 0 else 1

    p = problem
    return (
        of(p.stored("a")[1], p.lda, p.stride_a),
        of(p.stored("b")[1], p.ldb, p.stride_b),
        of(p.stored("c")[1], p.ldc, p.stride_c),
    )


def _epilogue(kernel: Kernel) -> tuple[str, ...]:
    return tuple(kernel.signature_dict["epilogue"])


def _matrix(name: str, dtype: str, role: Any, batch: int, shape: tuple[int, int], pitch: int, stride: int) -> Operand:
    if batch == 1:
        return Operand(name, dtype, role, shape, (pitch, 1))
    return Operand(name, dtype, role, (batch, *shape), (stride, pitch, 1))


def _matmul(problem: Problem) -> MatmulProblem:
    if not isinstance(problem, MatmulProblem):
        raise TypeError(f"matmul got a problem of operator {problem.operator!r}")
    return problem


OPERATOR = Matmul()
