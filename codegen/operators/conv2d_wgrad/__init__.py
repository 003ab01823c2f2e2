"""The gradient of a convolution's filters: as a product of matrices of which one is gathered on the way
(`implicit_gemm`), and without one (`direct`). Sums run over all output pixels, in slices that are computed in
parallel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.resources import files as packaged_files
from typing import Any

import numpy as np

from codegen.dtypes import dtype
from codegen.epilogue import structures, tensor_nodes
from codegen.kernel import Kernel
from codegen.operator import (
    GEMM,
    Array,
    ConfigField,
    Cost,
    Float64,
    InputKind,
    Operand,
    Work,
)
from codegen.operators.conv2d_wgrad import direct, implicit, inputs
from codegen.operators.conv2d_wgrad import space as spaces
from codegen.operators.conv2d_wgrad.problem import Conv2dWgradProblem, with_axes
from codegen.operators.conv2d_wgrad.product import aligns, product
from codegen.operators.conv2d_wgrad.reduced import reduced_problems
from codegen.operators.conv2d_wgrad.reference import reference
from codegen.operators.convolution import ConvolutionOperator, input_bytes, packed
from codegen.operators.matmul import split, tensor_rules, traffic
from codegen.problem import Problem, require
from codegen.search.rules import Accepted, Rejected
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import SearchSpace
from codegen.targets import Target


class Conv2dWgrad(ConvolutionOperator):
    """dw = epilogue(dy * x); see Conv2dWgradProblem for shapes."""

    name = "conv2d_wgrad"
    problem_type = Conv2dWgradProblem
    tunables = spaces.TUNABLES
    folder = packaged_files("codegen.operators.conv2d_wgrad")
    shared = (*GEMM, "conv/launch.cuh")
    files = ("gather.cuh", "direct.cuh", "kernel.cuh")

    def signature(self, problem: Problem) -> dict[str, Any]:
        p = _wgrad(problem)
        dy, x, dw = aligns(p)
        return {
            "layout": p.layout, "dtype": p.dtype, "acc_dtype": p.acc_dtype, "out_dtype": p.out_dtype,
            "allow_tf32": p.allow_tf32, "epilogue": structures(with_axes(p.epilogue)),
            "align_dy": dy, "align_x": x, "align_dw": dw, "pointwise": p.pointwise, "depthwise": p.depthwise,
        }  # fmt: skip

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        p = _wgrad(problem)
        return spaces.space(p, target, search, lambda schedule: self.rules(p, schedule, target))

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        p, is_direct = _wgrad(problem), schedule.get("algorithm") == "direct"
        if (is_direct or not p.pointwise) and (broken := implicit.index_rule(p)):
            return broken
        admit = direct.rules if is_direct else implicit.rules
        return admit(p, schedule, target, workspace_limit)

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """Of rank 4 and packed; bias is a vector. Accesses go over the ends of rows, so their alignment is said."""
        p = _wgrad(problem)
        extra, (dy, x, dw) = [], aligns(p)
        for node, name, element in tensor_nodes(p.epilogue, p.out_dtype):
            vector = node.op == "bias"
            extra.append(packed(name, element, "in", (p.k,) if vector else p.w_shape, 1 if vector else dw))
        return (
            packed("dy", p.dtype, "in", p.out_shape, dy),
            packed("x", p.dtype, "in", p.x_shape, x),
            *extra,
            packed("dw", p.out_dtype, "out", p.w_shape, dw),
        )

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        return list(reduced_problems(kernel.signature_dict, kernel.tunables.as_dict()))

    def test_launches(self, kernel: Kernel, problem: Problem) -> list[list[int]]:
        t, p = kernel.tunables.as_dict(), _wgrad(problem)
        if t["algorithm"] == "direct":
            return direct.launches_to_test(p, t)
        return split.launches_to_test(t, product(p))

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        p = _wgrad(problem)
        return inputs.make_inputs(p, self.operands(p), kind, rng)

    def reference(self, problem: Problem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
        return reference(_wgrad(problem), inputs, exact)

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        p, t = _wgrad(problem), schedule.as_dict()
        if t["algorithm"] == "direct":
            t, as_product = direct.of_product(t), product(p, direct=True)
        else:
            as_product = product(p)
        cost = traffic.cost(as_product, t, self.operands(p))
        unseen = p.n * p.h * p.w * p.c - p.elements_seen
        return replace(cost, bytes_read=cost.bytes_read - unseen * dtype(p.dtype).bytes)

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        p, least = _wgrad(problem), self.cost(problem, schedule)
        if schedule.get("algorithm") == "direct":
            return direct.work(p, schedule.as_dict(), least, target)
        return implicit.work(p, schedule, least, target)

    def stored(self, kernel: Kernel) -> tensor_rules.Stored:
        s = kernel.signature_dict
        return tensor_rules.Stored(input_bytes(kernel), _aligns(s)[:2], "tn" if s["layout"] == "nhwc" else "nn")

    def out_align(self, kernel: Kernel) -> int:
        return int(kernel.signature_dict["align_dw"])

    def gather_registers(self, kernel: Kernel, of_product_alone: int) -> int:
        return implicit.registers(kernel.signature_dict["layout"] == "nhwc", of_product_alone)

    def direct_fields(self, kernel: Kernel) -> Iterable[ConfigField]:
        return _direct_fields(kernel.signature_dict, kernel.tunables.as_dict())

    def direct_registers(self, kernel: Kernel) -> int:
        return direct.registers(kernel.tunables.as_dict())

    def direct_shared_bytes(self, kernel: Kernel) -> int:
        return direct.shared_bytes(kernel.tunables.as_dict(), kernel.signature_dict["layout"] == "nhwc")

    def direct_compile_seconds(self, kernel: Kernel) -> float:
        return direct.compile_seconds(kernel.tunables.as_dict(), tuple(kernel.signature_dict["epilogue"]))


def _direct_fields(s: Mapping[str, Any], t: Mapping[str, Any]) -> list[ConfigField]:
    """Vectors are of filters, and of their channels where each has its own: with channels first single elements."""
    sizes, (dy, x, dw) = direct.of_product(t), _aligns(s)
    numbers = {
        "align_a": dy if s["layout"] == "nhwc" else 1,
        "align_b": x if s["depthwise"] else 1,
        "align_c": dw,
        **{name: sizes[name] for name in ("tile_m", "tile_n", "tile_k", "threads", "threads_k", "filters")},
        "split": split.SPLIT.number(t),
    }
    return [ConfigField("bool", "tensor_cores", False), *(ConfigField("int", name, v) for name, v in numbers.items())]


def _aligns(signature: Mapping[str, Any]) -> tuple[int, int, int]:
    return signature["align_dy"], signature["align_x"], signature["align_dw"]


_wgrad = require(Conv2dWgradProblem)

OPERATOR = Conv2dWgrad()
