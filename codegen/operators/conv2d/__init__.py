"""Convolution in two dimensions: as a product of matrices of which one is gathered on the way (`implicit_gemm`), and
without one (`direct`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.resources import files as packaged_files
from typing import Any

import numpy as np

from codegen.dtypes import dtype
from codegen.epilogue import structures, tensor_nodes, words_of_mask
from codegen.kernel import Kernel
from codegen.operator import (
    Array,
    Config,
    ConfigField,
    Cost,
    Float64,
    InputKind,
    Operand,
    Work,
)
from codegen.operators.conv2d import direct, implicit, inputs, unfused_epilogue
from codegen.operators.conv2d import space as spaces
from codegen.operators.conv2d.problem import Conv2dProblem, with_axes
from codegen.operators.conv2d.product import aligns, aligns_of, of_product, product
from codegen.operators.conv2d.reduced import reduced_problems
from codegen.operators.conv2d.reference import reference
from codegen.operators.convolution import ConvolutionOperator, divided, input_bytes, packed
from codegen.operators.matmul import split, tensor_rules, traffic
from codegen.problem import Problem, require
from codegen.search.rules import Accepted, Rejected
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import SearchSpace
from codegen.targets import Target


class Conv2d(ConvolutionOperator):
    """out = epilogue(x * w); see Conv2dProblem for shapes."""

    name = "conv2d"
    problem_type = Conv2dProblem
    tunables = spaces.TUNABLES
    folder = packaged_files("codegen.operators.conv2d")
    files = ("gather.cuh", "separate.cuh", "kernel.cuh")

    def signature(self, problem: Problem) -> dict[str, Any]:
        p = _conv2d(problem)
        x, w, out = aligns(p)
        return {
            "layout": p.layout, "dtype": p.dtype, "acc_dtype": p.acc_dtype, "out_dtype": p.out_dtype,
            "allow_tf32": p.allow_tf32, "epilogue": structures(with_axes(p.epilogue, p.layout)),
            "align_x": x, "align_w": w, "align_out": out, "pointwise": p.pointwise, "depthwise": p.depthwise,
        }  # fmt: skip

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        p = _conv2d(problem)
        return spaces.space(p, target, search, lambda schedule: self.rules(p, schedule, target))

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        p, t = _conv2d(problem), schedule.as_dict()
        is_direct = t["algorithm"] == "direct"
        if unfused_epilogue.is_separate(t):
            if broken := unfused_epilogue.rules(p, t, workspace_limit):
                return broken
            p = unfused_epilogue.sums(p)
        if (is_direct or not p.pointwise) and (broken := implicit.index_rule(p, whole=is_direct or p.channels_last)):
            return broken
        if is_direct:
            return direct.window_rule(p, t) or direct.rules(p, schedule, target)
        return implicit.rules(p, schedule, target, workspace_limit)

    def functions(self, kernel: Kernel) -> tuple[str, ...]:
        if unfused_epilogue.is_separate(kernel.tunables.as_dict()):
            return unfused_epilogue.functions(kernel.signature_dict["epilogue"])
        return super().functions(kernel)

    def config(self, kernel: Kernel) -> Config:
        whole = super().config(kernel)
        separate = ConfigField("bool", "separate", unfused_epilogue.is_separate(kernel.tunables.as_dict()))
        return replace(whole, fields=(separate, *whole.fields))

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """Of rank 4 and packed; bias is a vector. Accesses go over the ends of rows, so their alignment is said."""
        p = _conv2d(problem)
        extra, aligned = [], aligns(p)
        for node, name, element in tensor_nodes(p.epilogue, p.out_dtype):
            if node.packed_mask:
                extra.append(packed(name, element, "in", (words_of_mask(math.prod(p.out_shape)),), 1))
                continue
            vector = node.op == "bias"
            align = aligned[2] if p.channels_last or not vector else 1
            extra.append(packed(name, element, "in", (p.k,) if vector else p.out_shape, align))
        return (
            packed("x", p.dtype, "in", p.x_shape, aligned[0]),
            packed("w", p.dtype, "in", p.w_shape, aligned[1]),
            *extra,
            packed("out", p.out_dtype, "out", p.out_shape, aligned[2]),
        )

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        return list(reduced_problems(kernel.signature_dict, kernel.tunables.as_dict()))

    def test_launches(self, kernel: Kernel, problem: Problem) -> list[list[int]]:
        t = kernel.tunables.as_dict()
        if t["algorithm"] == "direct":
            return [[0, 0, 0]]
        return split.launches_to_test(t, product(_conv2d(problem)))

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        p = _conv2d(problem)
        return inputs.make_inputs(p, self.operands(p), kind, rng)

    def reference(self, problem: Problem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
        return reference(_conv2d(problem), inputs, exact)

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        p, t = _conv2d(problem), schedule.as_dict()
        cost = traffic.cost(product(p), divided(t), self.operands(p))
        unseen = p.n * p.h * p.w * p.c - p.elements_seen
        cost = replace(cost, bytes_read=cost.bytes_read - unseen * dtype(p.dtype).bytes)
        if unfused_epilogue.is_separate(t):
            cost = replace(cost, launches=1 + len(p.epilogue), workspace_bytes=unfused_epilogue.workspace_bytes(p))
        return cost

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        p, t = _conv2d(problem), schedule.as_dict()
        if unfused_epilogue.is_separate(t):
            of_sums = self.work(unfused_epilogue.sums(p), unfused_epilogue.fused(schedule), target)
            return replace(of_sums, others=unfused_epilogue.launches(p, target))
        least = self.cost(problem, schedule)
        if schedule.get("algorithm") == "direct":
            return direct.work(p, schedule.as_dict(), least, target)
        return implicit.work(p, schedule, least, target)

    def stored(self, kernel: Kernel) -> tensor_rules.Stored:
        s = kernel.signature_dict
        last = s["layout"] == "nhwc"
        return tensor_rules.Stored(input_bytes(kernel), of_product(last, aligns_of(s)), "nt" if last else "nn")

    def out_align(self, kernel: Kernel) -> int:
        return unfused_epilogue.out_align(kernel.signature_dict, kernel.tunables.as_dict())

    def gather_registers(self, kernel: Kernel, of_product_alone: int) -> int:
        s = kernel.signature_dict
        return implicit.registers(kernel.tunables.as_dict(), s["layout"] == "nhwc", aligns_of(s), of_product_alone)

    def direct_fields(self, kernel: Kernel) -> Iterable[ConfigField]:
        return direct.fields(kernel, self.out_align(kernel))

    def direct_registers(self, kernel: Kernel) -> int:
        return direct.registers(kernel.tunables.as_dict(), input_bytes(kernel))

    def direct_shared_bytes(self, kernel: Kernel) -> int:
        return direct.shared_bytes(kernel.tunables.as_dict())

    def direct_compile_seconds(self, kernel: Kernel) -> float:
        return direct.compile_seconds(kernel.tunables.as_dict(), tuple(kernel.signature_dict["epilogue"]))

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        if not unfused_epilogue.is_separate(kernel.tunables.as_dict()):
            return super().predicted_compile_seconds(kernel)
        sums = Kernel.of(self.name, {**kernel.signature_dict, "epilogue": []}, unfused_epilogue.fused(kernel.tunables))
        nodes = unfused_epilogue.compile_seconds(tuple(kernel.signature_dict["epilogue"]))
        return super().predicted_compile_seconds(sums) + nodes


_conv2d = require(Conv2dProblem)

OPERATOR = Conv2d()
