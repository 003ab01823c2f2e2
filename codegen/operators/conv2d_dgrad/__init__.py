"""The gradient of a convolution's image: phase by phase a convolution of the output's gradient, as an implicit product
(`implicit_gemm`) or without one (`direct`). Kernels are asked about as conv2d's are."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files as packaged_files
from typing import Any

import numpy as np

from codegen.dtypes import dtype
from codegen.epilogue import operand_names as epilogue_operand_names
from codegen.epilogue import structures
from codegen.kernel import Kernel
from codegen.operator import Array, Config, ConfigField, Cost, Float64, InputKind, Operand, Work
from codegen.operators.conv2d import Conv2d, direct_fields, divided, packed
from codegen.operators.conv2d.product import matmul_tunables, of_product
from codegen.operators.conv2d_dgrad import direct, implicit, inputs
from codegen.operators.conv2d_dgrad import space as spaces
from codegen.operators.conv2d_dgrad.phases import phases
from codegen.operators.conv2d_dgrad.problem import Conv2dDgradProblem
from codegen.operators.conv2d_dgrad.product import aligns, layout_of, product
from codegen.operators.conv2d_dgrad.reduced import reduced_problems
from codegen.operators.conv2d_dgrad.reference import reference
from codegen.operators.matmul import config_fields, split, tensor_rules
from codegen.problem import Problem
from codegen.rules import Accepted, Rejected
from codegen.schedule import Schedule
from codegen.search import Search
from codegen.search_space import SearchSpace
from codegen.targets import Target


class Conv2dDgrad(Conv2d):
    """dx = epilogue(gradient of x); see Conv2dDgradProblem for shapes. In a signature x is what is read, so dy, and out
    what is written, so dx."""

    name = "conv2d_dgrad"
    problem_type = Conv2dDgradProblem
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

    def config(self, kernel: Kernel) -> Config:
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        last, is_direct = s["layout"] == "nhwc", t["algorithm"] == "direct"
        fields = [
            ConfigField("bool", "direct", is_direct),
            ConfigField("bool", "channels_last", last),
            ConfigField("bool", "pointwise", s["pointwise"]),
            ConfigField("bool", "depthwise", s["depthwise"]),
            ConfigField("bool", "strided", s["strided"]),
        ]
        if is_direct:
            fields += direct_fields(s, t)
        else:
            stored = self.stored(kernel)
            fields += config_fields(matmul_tunables(t), stored.layout, (*stored.aligns, s["align_out"]))
        types = (("Input", s["dtype"]), ("Accumulator", s["acc_dtype"]), ("Output", s["out_dtype"]))
        return Config(tuple(fields), tuple(s["epilogue"]), types, s["out_dtype"])

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """Of rank 4 and packed. Accesses go over the ends of rows, so their alignment is said."""
        p = _dgrad(problem)
        if p.channels_last:
            dy, w, dx = (p.n, p.p, p.q, p.k), (p.k, p.r, p.s, p.group_channels), (p.n, p.h, p.w, p.c)
        else:
            dy, w, dx = (p.n, p.k, p.p, p.q), (p.k, p.group_channels, p.r, p.s), (p.n, p.c, p.h, p.w)
        extra, aligned = [], aligns(p)
        for node, name in zip(p.epilogue, epilogue_operand_names(p.epilogue), strict=True):
            element = node.operand_dtype(p.out_dtype)
            if name is not None and element is not None:
                extra.append(packed(name, element, "in", dx, aligned[2]))
        return (
            packed("dy", p.dtype, "in", dy, aligned[0]),
            packed("w", p.dtype, "in", w, aligned[1]),
            packed("dx", p.out_dtype, "out", dx, aligned[2]),
            *extra,
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
        products = sum(number * one.rows * one.columns * one.taps for number, one in phases(p)) * p.n * p.c
        pixels = p.n * p.h * p.w * p.c
        operands = self.operands(p)
        return Cost(
            flops=2 * products + pixels * len(p.epilogue),
            bytes_read=sum(one.elements * dtype(one.dtype).bytes for one in operands if one.role == "in"),
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
        aligned = of_product(s["layout"] == "nhwc", (s["align_x"], s["align_w"], s["align_out"]))
        return tensor_rules.Stored(dtype(s["dtype"]).bytes, aligned, layout_of(s["layout"], pointwise=s["pointwise"]))

    def gather_registers(self, kernel: Kernel, of_product_alone: int) -> int:
        s = kernel.signature_dict
        aligned = (s["align_x"], s["align_w"], s["align_out"])
        return implicit.registers(kernel.tunables.as_dict(), s["layout"] == "nhwc", aligned, of_product_alone)


def _dgrad(problem: Problem) -> Conv2dDgradProblem:
    if not isinstance(problem, Conv2dDgradProblem):
        raise TypeError(f"conv2d_dgrad got a problem of operator {problem.operator!r}")
    return problem


OPERATOR = Conv2dDgrad()
