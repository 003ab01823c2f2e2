"""Convolution in two dimensions: as a product of matrices of which one is gathered on the way (`implicit_gemm`), and
without one (`direct`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files as packaged_files
from typing import Any, ClassVar

import numpy as np

from codegen.dtypes import dtype
from codegen.epilogue import operand_names as epilogue_operand_names
from codegen.epilogue import scalars, structures, words_of_mask
from codegen.kernel import Kernel
from codegen.operator import (
    CONV,
    GEMM,
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
)
from codegen.operators.conv2d import direct, implicit, inputs, separate
from codegen.operators.conv2d import space as spaces
from codegen.operators.conv2d.problem import Conv2dProblem, Convolution, with_axes
from codegen.operators.conv2d.product import aligns, matmul_tunables, of_product, product
from codegen.operators.conv2d.reduced import reduced_problems
from codegen.operators.conv2d.reference import reference
from codegen.operators.matmul import config_fields, simt_rules, simt_work, split, tensor_rules, tensor_work, traffic
from codegen.operators.matmul.path import is_tensor
from codegen.problem import Problem
from codegen.rules import Accepted, Rejected
from codegen.schedule import Schedule
from codegen.search import Search
from codegen.search_space import SearchSpace
from codegen.targets import Target

EXTENT_NAMES = ("n", "h", "w", "c", "k", "r", "s", "p", "q", "groups")


class Conv2d(Operator):
    """out = epilogue(x * w); see Conv2dProblem for shapes. What is the same for the gradients they inherit."""

    name = "conv2d"
    problem_type: ClassVar[type[Problem]] = Conv2dProblem
    tunables = spaces.TUNABLES
    folder = packaged_files("codegen.operators.conv2d")
    shared: ClassVar[tuple[str, ...]] = (*GEMM, *CONV)
    files: ClassVar[tuple[str, ...]] = ("gather.cuh", "separate.cuh", "kernel.cuh")
    extent_names = EXTENT_NAMES

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
        if separate.is_separate(t):
            if broken := separate.rules(p, t, workspace_limit):
                return broken
            p = separate.sums(p)
        if (is_direct or not p.pointwise) and (broken := implicit.index_rule(p, whole=is_direct or p.channels_last)):
            return broken
        if is_direct:
            return direct.window_rule(p, t) or direct.rules(p, schedule, target)
        return implicit.rules(p, schedule, target, workspace_limit)

    def functions(self, kernel: Kernel) -> tuple[str, ...]:
        t = kernel.tunables.as_dict()
        if separate.is_separate(t):
            return separate.functions(kernel.signature_dict["epilogue"])
        return split.functions(divided(t))

    def deterministic(self, kernel: Kernel) -> bool:
        return split.deterministic(divided(kernel.tunables.as_dict()), str(kernel.signature_dict["acc_dtype"]))

    def config(self, kernel: Kernel) -> Config:
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        last, is_direct = s["layout"] == "nhwc", t["algorithm"] == "direct"
        s = separate.stored(s, t)
        fields = [
            ConfigField("bool", "separate", separate.is_separate(t)),
            ConfigField("bool", "direct", is_direct),
            ConfigField("bool", "channels_last", last),
            ConfigField("bool", "pointwise", s["pointwise"]),
            ConfigField("bool", "depthwise", s["depthwise"]),
        ]
        if is_direct:
            fields += direct_fields(s, t)
        else:
            a, b = of_product(last, (s["align_x"], s["align_w"], s["align_out"]))
            fields += config_fields(matmul_tunables(t), "nt" if last else "nn", (a, b, s["align_out"]))
        types = (("Input", s["dtype"]), ("Accumulator", s["acc_dtype"]), ("Output", s["out_dtype"]))
        return Config(tuple(fields), tuple(s["epilogue"]), types, str(s["out_dtype"]))

    def extents(self, problem: Problem) -> list[int]:
        return [int(getattr(problem, name)) for name in EXTENT_NAMES]

    def scalars(self, problem: Problem) -> list[float]:
        """The geometry, which no tensor shows, then what the epilogue has."""
        if not isinstance(problem, Convolution):
            raise TypeError(f"{self.name} got a problem of operator {problem.operator!r}")
        geometry = (*problem.stride, *problem.padding[0], *problem.padding[1], *problem.dilation)
        return [*map(float, geometry), *scalars(problem.epilogue)]

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """Of rank 4 and packed; bias is a vector. Accesses go over the ends of rows, so their alignment is said."""
        p = _conv2d(problem)
        if p.channels_last:
            x, w, out = (p.n, p.h, p.w, p.c), (p.k, p.r, p.s, p.group_channels), (p.n, p.p, p.q, p.k)
        else:
            x, w, out = (p.n, p.c, p.h, p.w), (p.k, p.group_channels, p.r, p.s), (p.n, p.k, p.p, p.q)
        extra, aligned = [], aligns(p)
        for node, name in zip(p.epilogue, epilogue_operand_names(p.epilogue), strict=True):
            element = node.operand_dtype(p.out_dtype)
            if name is not None and element is not None:
                if node.packed_mask:
                    extra.append(packed(name, element, "in", (words_of_mask(math.prod(out)),), 1))
                    continue
                vector = node.op == "bias"
                align = aligned[2] if p.channels_last or not vector else 1
                extra.append(packed(name, element, "in", (p.k,) if vector else out, align))
        return (
            packed("x", p.dtype, "in", x, aligned[0]),
            packed("w", p.dtype, "in", w, aligned[1]),
            packed("out", p.out_dtype, "out", out, aligned[2]),
            *extra,
        )

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        return list(reduced_problems(kernel.signature_dict, kernel.tunables.as_dict()))

    def launch_values(self, schedule: Schedule) -> list[int]:
        """0 for what an algorithm does not have."""
        values = schedule.as_dict()
        return [int(values.get(name, 0)) for name in self.launch_tunables]

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
        found = traffic.cost(product(p), divided(t), self.operands(p))
        unseen = p.n * p.h * p.w * p.c - p.elements_seen
        found = replace(found, bytes_read=found.bytes_read - unseen * dtype(p.dtype).bytes)
        if separate.is_separate(t):
            found = replace(found, launches=1 + len(p.epilogue), workspace_bytes=separate.workspace_bytes(p))
        return found

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        p, t = _conv2d(problem), schedule.as_dict()
        if separate.is_separate(t):
            of_sums = self.work(separate.sums(p), separate.fused(schedule), target)
            return replace(of_sums, others=separate.launches(p, target))
        least = self.cost(problem, schedule)
        if schedule.get("algorithm") == "direct":
            return direct.work(p, schedule.as_dict(), least, target)
        return implicit.work(p, schedule, least, target)

    def launch_bounds(self, kernel: Kernel, function: str) -> LaunchBounds:
        t = kernel.tunables.as_dict()
        if function != "run":
            return LaunchBounds(split.REDUCE_THREADS)
        if is_tensor(t):
            return tensor_rules.launch_bounds(t)
        if t["algorithm"] == "direct":
            return LaunchBounds(int(t["threads"]))
        return LaunchBounds(simt_rules.threads(t), int(t["min_blocks"]))

    def estimated_registers(self, kernel: Kernel) -> int:
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        if t["algorithm"] == "direct":
            return direct.registers(t, dtype(s["dtype"]).bytes)
        of_product_alone = tensor_rules.registers(t, self.stored(kernel)) if is_tensor(t) else simt_rules.registers(t)
        return of_product_alone if s["pointwise"] else self.gather_registers(kernel, of_product_alone)

    def gather_registers(self, kernel: Kernel, of_product_alone: int) -> int:
        """`estimated_registers` of a product whose operands are gathered."""
        s = kernel.signature_dict
        aligns = (s["align_x"], s["align_w"], s["align_out"])
        return implicit.registers(kernel.tunables.as_dict(), s["layout"] == "nhwc", aligns, of_product_alone)

    def stored(self, kernel: Kernel) -> tensor_rules.Stored:
        """How the operands of the product lie in memory."""
        s = kernel.signature_dict
        last = s["layout"] == "nhwc"
        aligns = of_product(last, (s["align_x"], s["align_w"], s["align_out"]))
        return tensor_rules.Stored(dtype(s["dtype"]).bytes, aligns, "nt" if last else "nn")

    def shared_bytes(self, kernel: Kernel) -> int:
        t = kernel.tunables.as_dict()
        if t["algorithm"] == "direct":
            return direct.shared_bytes(t)
        return tensor_rules.shared_bytes(t, self.stored(kernel).size) if is_tensor(t) else simt_rules.shared_bytes(t)

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        t, epilogue = matmul_tunables(kernel.tunables.as_dict()), tuple(kernel.signature_dict["epilogue"])
        if separate.is_separate(t):
            own = Kernel.of(self.name, {**kernel.signature_dict, "epilogue": []}, separate.fused(kernel.tunables))
            return self.predicted_compile_seconds(own) + separate.compile_seconds(epilogue)
        if t["algorithm"] == "direct":
            return direct.compile_seconds(t, epilogue)
        if is_tensor(t):
            return tensor_work.compile_seconds(t, epilogue, self.stored(kernel))
        return simt_work.compile_seconds(t, epilogue)


def direct_fields(s: Mapping[str, Any], t: Mapping[str, Any]) -> list[ConfigField]:
    """Vectors are of filters, and of their channels where each has its own: with channels first single elements."""
    last = s["layout"] == "nhwc"
    numbers = {
        "align_a": s["align_x"] if last and s["depthwise"] else 1,
        "align_b": 1,
        "align_c": s["align_out"] if last else 1,
        **{name: t[name] for name in ("threads", "threads_k", "filters", "pixels", "window", "taps")},
    }
    return [ConfigField("bool", "tensor_cores", False), *(ConfigField("int", name, v) for name, v in numbers.items())]


def divided(tunables: Mapping[str, Any]) -> dict[str, Any]:
    """With how the sums are divided, which `direct` never does."""
    return {"split": "none", "split_k": 1, **tunables}


def packed(name: str, element: str, role: Any, shape: tuple[int, ...], align: int) -> Operand:
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return Operand(name, element, role, shape, tuple(reversed(strides)), align)


def _conv2d(problem: Problem) -> Conv2dProblem:
    if not isinstance(problem, Conv2dProblem):
        raise TypeError(f"conv2d got a problem of operator {problem.operator!r}")
    return problem


OPERATOR = Conv2d()
