"""The gradient of a convolution's filters: as a product of matrices of which one is gathered on the way
(`implicit_gemm`), and without one (`direct`). Sums run over all output pixels, in slices that are computed in
parallel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files as packaged_files
from typing import Any

import numpy as np

from codegen.dtypes import dtype
from codegen.epilogue import operand_names as epilogue_operand_names
from codegen.epilogue import structures
from codegen.kernel import Kernel
from codegen.operator import (
    GEMM,
    Array,
    Config,
    ConfigField,
    Cost,
    Float64,
    InputKind,
    Operand,
    Work,
)
from codegen.operators.conv2d import Conv2d, packed
from codegen.operators.conv2d.product import matmul_tunables
from codegen.operators.conv2d_wgrad import direct, implicit, inputs
from codegen.operators.conv2d_wgrad import space as spaces
from codegen.operators.conv2d_wgrad.problem import Conv2dWgradProblem, with_axes
from codegen.operators.conv2d_wgrad.product import aligns, product
from codegen.operators.conv2d_wgrad.reduced import reduced_problems
from codegen.operators.conv2d_wgrad.reference import reference
from codegen.operators.matmul import config_fields, split, tensor_rules, traffic
from codegen.problem import Problem
from codegen.rules import Accepted, Rejected
from codegen.schedule import Schedule
from codegen.search import Search
from codegen.search_space import SearchSpace
from codegen.targets import Target


class Conv2dWgrad(Conv2d):
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
        judge = direct.rules if is_direct else implicit.rules
        return judge(p, schedule, target, workspace_limit)

    def config(self, kernel: Kernel) -> Config:
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        last, is_direct = s["layout"] == "nhwc", t["algorithm"] == "direct"
        fields = [
            ConfigField("bool", "direct", is_direct),
            ConfigField("bool", "channels_last", last),
            ConfigField("bool", "pointwise", s["pointwise"]),
            ConfigField("bool", "depthwise", s["depthwise"]),
        ]
        if is_direct:
            fields += _direct_fields(s, t)
        else:
            fields += config_fields(matmul_tunables(t), "tn" if last else "nn", _aligns(s))
        types = (("Input", s["dtype"]), ("Accumulator", s["acc_dtype"]), ("Output", s["out_dtype"]))
        return Config(tuple(fields), tuple(s["epilogue"]), types, s["out_dtype"])

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """Of rank 4 and packed; bias is a vector. Accesses go over the ends of rows, so their alignment is said."""
        p = _wgrad(problem)
        if p.channels_last:
            dy, x, dw = (p.n, p.p, p.q, p.k), (p.n, p.h, p.w, p.c), (p.k, p.r, p.s, p.group_channels)
        else:
            dy, x, dw = (p.n, p.k, p.p, p.q), (p.n, p.c, p.h, p.w), (p.k, p.group_channels, p.r, p.s)
        extra, aligned = [], aligns(p)
        for node, name in zip(p.epilogue, epilogue_operand_names(p.epilogue), strict=True):
            element = node.operand_dtype(p.out_dtype)
            if name is not None and element is not None:
                vector = node.op == "bias"
                extra.append(packed(name, element, "in", (p.k,) if vector else dw, 1 if vector else aligned[2]))
        return (
            packed("dy", p.dtype, "in", dy, aligned[0]),
            packed("x", p.dtype, "in", x, aligned[1]),
            packed("dw", p.out_dtype, "out", dw, aligned[2]),
            *extra,
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
        found = traffic.cost(as_product, t, self.operands(p))
        unseen = p.n * p.h * p.w * p.c - p.elements_seen
        return replace(found, bytes_read=found.bytes_read - unseen * dtype(p.dtype).bytes)

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        p, least = _wgrad(problem), self.cost(problem, schedule)
        if schedule.get("algorithm") == "direct":
            return direct.work(p, schedule.as_dict(), least, target)
        return implicit.work(p, schedule, least, target)

    def estimated_registers(self, kernel: Kernel) -> int:
        t = kernel.tunables.as_dict()
        return direct.registers(t) if t["algorithm"] == "direct" else super().estimated_registers(kernel)

    def gather_registers(self, kernel: Kernel, of_product_alone: int) -> int:
        return implicit.registers(kernel.signature_dict["layout"] == "nhwc", of_product_alone)

    def stored(self, kernel: Kernel) -> tensor_rules.Stored:
        s = kernel.signature_dict
        return tensor_rules.Stored(dtype(s["dtype"]).bytes, _aligns(s)[:2], "tn" if s["layout"] == "nhwc" else "nn")

    def shared_bytes(self, kernel: Kernel) -> int:
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        is_direct = t["algorithm"] == "direct"
        return direct.shared_bytes(t, s["layout"] == "nhwc") if is_direct else super().shared_bytes(kernel)

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        if t["algorithm"] == "direct":
            return direct.compile_seconds(t, tuple(s["epilogue"]))
        return super().predicted_compile_seconds(kernel)


def _direct_fields(s: Mapping[str, Any], t: Mapping[str, Any]) -> list[ConfigField]:
    """Vectors are of filters, and of their channels where each has its own: with channels first single elements."""
    sizes, (dy, x, dw) = direct.of_product(t), _aligns(s)
    numbers = {
        "align_a": dy if s["layout"] == "nhwc" else 1,
        "align_b": x if s["depthwise"] else 1,
        "align_c": dw,
        **{name: sizes[name] for name in ("tile_m", "tile_n", "tile_k", "threads", "threads_k", "filters")},
        "split": split.CODES[t["split"]],
    }
    return [ConfigField("bool", "tensor_cores", False), *(ConfigField("int", name, v) for name, v in numbers.items())]


def _aligns(signature: Mapping[str, Any]) -> tuple[int, int, int]:
    return signature["align_dy"], signature["align_x"], signature["align_dw"]


def _wgrad(problem: Problem) -> Conv2dWgradProblem:
    if not isinstance(problem, Conv2dWgradProblem):
        raise TypeError(f"conv2d_wgrad got a problem of operator {problem.operator!r}")
    return problem


OPERATOR = Conv2dWgrad()
