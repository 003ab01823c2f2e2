"""The gradient of a convolution's image: phase by phase a convolution of the output's gradient, as an implicit product
(`implicit_gemm`) or without one (`direct`). Kernels have conv2d's interface."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files as packaged_files
from typing import Any

import numpy as np

from codegen.dtypes import dtype
from codegen.epilogue import structures, tensor_nodes
from codegen.kernel import Kernel
from codegen.operator import Array, ConfigField, Cost, Float64, InputKind, Operand, Work
from codegen.operators.conv2d import direct as forward
from codegen.operators.conv2d import implicit as forward_implicit
from codegen.operators.conv2d.product import aligns_of, of_product
from codegen.operators.conv2d_dgrad import direct, implicit, inputs
from codegen.operators.conv2d_dgrad import space as spaces
from codegen.operators.conv2d_dgrad.problem import Conv2dDgradProblem
from codegen.operators.conv2d_dgrad.product import aligns, layout_of, product
from codegen.operators.conv2d_dgrad.reduced import reduced_problems
from codegen.operators.conv2d_dgrad.reference import reference
from codegen.operators.conv2d_dgrad.residue_classes import phases
from codegen.operators.convolution import ConvolutionOperator, divided, input_bytes, packed
from codegen.operators.matmul import split, tensor_rules
from codegen.problem import Problem, require
from codegen.search.rules import Accepted, Rejected
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import SearchSpace
from codegen.targets import Target


class Conv2dDgrad(ConvolutionOperator):
    """dx = epilogue(gradient of x); see Conv2dDgradProblem for shapes. In a signature x is what is read, so dy, and out
    what is written, so dx."""

    name = "conv2d_dgrad"
    problem_type = Conv2dDgradProblem
    tunables = spaces.TUNABLES
    flags = ("pointwise", "depthwise", "strided")
    folder = packaged_files("codegen.operators.conv2d_dgrad")
    files = ("phases.cuh", "filters.cuh", "kernel.cuh")

    def signature(self, problem: Problem) -> dict[str, Any]:
        p = _dgrad(problem)
        dy, w, dx = aligns(p)
        return {
            "layout": p.layout, "dtype": p.dtype, "acc_dtype": p.acc_dtype, "out_dtype": p.out_dtype,
            "allow_tf32": p.allow_tf32, "epilogue": structures(p.epilogue), "align_x": dy, "align_w": w,
            "align_out": dx, "pointwise": p.pointwise, "depthwise": p.depthwise, "strided": p.strided,
        }  # fmt: skip

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        p = _dgrad(problem)
        return spaces.space(p, target, search, lambda schedule: self.rules(p, schedule, target))

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        p, is_direct = _dgrad(problem), schedule.get("algorithm") == "direct"
        if (is_direct or not p.pointwise) and (broken := implicit.index_rule(p, whole=is_direct or p.channels_last)):
            return broken
        return direct.rules(p, schedule, target) if is_direct else implicit.rules(p, schedule, target, workspace_limit)

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """Of rank 4 and packed. Accesses go over the ends of rows, so their alignment is said."""
        p = _dgrad(problem)
        dy, w, dx = aligns(p)
        return (
            packed("dy", p.dtype, "in", p.out_shape, dy),
            packed("w", p.dtype, "in", p.w_shape, w),
            *(packed(name, dtype, "in", p.x_shape, dx) for _, name, dtype in tensor_nodes(p.epilogue, p.out_dtype)),
            packed("dx", p.out_dtype, "out", p.x_shape, dx),
        )

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        return list(reduced_problems(kernel.signature_dict, kernel.tunables.as_dict()))

    def test_launches(self, kernel: Kernel, problem: Problem) -> list[list[int]]:
        t = kernel.tunables.as_dict()
        if t["algorithm"] == "direct":
            return [[0, 0, 0]]
        return split.launches_to_test(t, product(_dgrad(problem)))

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        p = _dgrad(problem)
        return inputs.make_inputs(p, self.operands(p), kind, rng)

    def reference(self, problem: Problem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
        return reference(_dgrad(problem), inputs, exact)

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        """Of the taps that a pixel has, not of the stride's zeros between them."""
        p, t = _dgrad(problem), divided(schedule.as_dict())
        products = sum(number * phase.rows * phase.columns * phase.taps for number, phase in phases(p)) * p.n * p.c
        pixels = p.n * p.h * p.w * p.c
        return Cost(
            flops=2 * products + pixels * len(p.epilogue),
            bytes_read=implicit.bytes_of(operand for operand in self.operands(p) if operand.role == "in"),
            bytes_written=pixels * dtype(p.out_dtype).bytes,
            launches=len(split.functions(t)),
            workspace_bytes=split.workspace_bytes(product(p), t),
        )

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        p, least = _dgrad(problem), self.cost(problem, schedule)
        if schedule.get("algorithm") == "direct":
            return direct.work(p, schedule, least, self.operands(p), target)
        return implicit.work(p, schedule, least, self.operands(p), target)

    def stored(self, kernel: Kernel) -> tensor_rules.Stored:
        s = kernel.signature_dict
        aligned = of_product(s["layout"] == "nhwc", aligns_of(s))
        return tensor_rules.Stored(input_bytes(kernel), aligned, layout_of(s["layout"], pointwise=s["pointwise"]))

    def out_align(self, kernel: Kernel) -> int:
        return int(kernel.signature_dict["align_out"])

    def gather_registers(self, kernel: Kernel, of_product_alone: int) -> int:
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        of_image = forward_implicit.registers(t, s["layout"] == "nhwc", aligns_of(s), of_product_alone)
        return of_image + implicit.WEIGHT_REGISTERS

    def direct_fields(self, kernel: Kernel) -> Iterable[ConfigField]:
        return forward.fields(kernel, self.out_align(kernel))

    def direct_registers(self, kernel: Kernel) -> int:
        return forward.registers(kernel.tunables.as_dict(), input_bytes(kernel))

    def direct_shared_bytes(self, kernel: Kernel) -> int:
        return forward.shared_bytes(kernel.tunables.as_dict())

    def direct_compile_seconds(self, kernel: Kernel) -> float:
        return forward.compile_seconds(kernel.tunables.as_dict(), tuple(kernel.signature_dict["epilogue"]))


_dgrad = require(Conv2dDgradProblem)

OPERATOR = Conv2dDgrad()
