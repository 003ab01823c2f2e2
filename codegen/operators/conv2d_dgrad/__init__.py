"""The gradient of a convolution's image: phase by phase a convolution of the output's gradient, as an implicit product
(`implicit_gemm`) or without one (`direct`). Kernels have conv2d's interface."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from importlib.resources import files as packaged_files
from typing import Any

import numpy as np

from codegen.arrays import Float64, namespace_of
from codegen.counts import LaunchCounts
from codegen.dtypes import dtype
from codegen.fixed_point import FIELDS
from codegen.kernel import Kernel
from codegen.operator import Array, Cost, Work
from codegen.operators.conv2d.problem import Conv2dProblem
from codegen.operators.conv2d_dgrad import reduced, work
from codegen.operators.conv2d_dgrad.problem import Conv2dDgradProblem
from codegen.operators.conv2d_dgrad.residue_classes import Phase, count, largest, phases
from codegen.operators.convolution import channel_planes, direct, implicit, winograd, winograd_fused
from codegen.operators.convolution.channel_planes import ChannelPlanes
from codegen.operators.convolution.operator import (
    MANY_FILTERS,
    Admit,
    every_tunable,
    index_check,
    is_direct,
)
from codegen.operators.convolution.reference import windows
from codegen.operators.convolution.winograd_operator import WinogradOperator
from codegen.operators.matmul import split
from codegen.operators.matmul.problem import Layout, MatmulProblem
from codegen.operators.matmul.product import family
from codegen.problem import Problem
from codegen.run_once import RunOnce
from codegen.search.joined_space import Kind
from codegen.search.rules import Accepted, Rejected, check
from codegen.search.schedule import Schedule
from codegen.targets import Target

# Of Winograd, along an axis.
WINDOW = 3
# Registers of the filters' odometer beside those of a gathered image; an estimate.
WEIGHT_REGISTERS = 12


class Conv2dDgrad(WinogradOperator):
    """dx = epilogue(gradient of x); see Conv2dDgradProblem for shapes. In a signature x is what is read, so dy, and out
    what is written, so dx."""

    name = "conv2d_dgrad"
    problem_type = Conv2dDgradProblem
    layer_type = Conv2dProblem
    tunables = every_tunable((
        *direct.TUNABLES, *winograd.OWN_TUNABLES, *winograd_fused.TUNABLES, *winograd_fused.RING_TUNABLES,
        *winograd.OF_RINGS,
    ))  # fmt: skip
    flags = ("pointwise", "depthwise", "strided")
    folder = packaged_files("codegen.operators.conv2d_dgrad")
    files = ("phases.cuh", "filters.cuh", "planes.cuh", "kernel.cuh")
    direct = direct
    reduced = reduced
    splits_ahead = True

    @staticmethod
    @lru_cache(maxsize=1024)  # called for every schedule
    def product(p: Conv2dDgradProblem) -> MatmulProblem:
        """What a launch is made for: as many products of the largest phase as there are phases."""
        return implicit.image_product(largest(p), _layout(p.layout, pointwise=p.pointwise), p.epilogue, count(p))

    def product_layout(self, layout: str, *, pointwise: bool) -> Layout:
        return _layout(layout, pointwise=pointwise)

    @staticmethod
    @lru_cache(maxsize=1024)
    def aligns(p: Conv2dDgradProblem) -> tuple[int, int, int]:
        """With channels last vectors are of channels of one group, or of neighbouring groups where each has one; with
        channels first operands are gathered element by element, and pixels of a phase are no neighbours."""
        if p.channels_last:
            dy, dx = (p.k, p.c) if p.depthwise else (p.group_filters, p.group_channels)
            return implicit.widths(p, dy, p.group_channels, dx)
        dy, w = (p.p * p.q, p.group_channels) if p.pointwise else (1, 1)
        return implicit.widths(p, dy, w, 1 if p.strided else p.h * p.w)

    def run_once(self, kernel: Kernel) -> list[RunOnce]:
        """And of a strided one axes that are shorter than the stride."""
        s, once = kernel.signature_dict, super().run_once(kernel)
        if s["strided"] and not winograd.is_winograd(kernel):
            t = self.values(kernel.tunables)
            short = self._tolerant(reduced.short(self.problem_type, s, t), t)
            once.append(RunOnce("long", short, tuple(self.test_launches(kernel, short)[0])))
        return once

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        """Of a strided one twice as many as the product of a class of residues takes (12 kernels for sm_90a)."""
        strided = kernel.signature_dict["strided"] and not winograd.is_winograd(kernel)
        return super().predicted_compile_seconds(kernel) * (2 if strided else 1)

    def convolved(self, p: Conv2dDgradProblem) -> Phase:
        return largest(p)

    def phases(self, p: Conv2dDgradProblem) -> int:
        return count(p)

    # ---- as Winograd computes it

    @staticmethod
    @lru_cache(maxsize=1024)
    def layer(p: Conv2dDgradProblem) -> Conv2dProblem:
        """Of dy, by the filters turned over, with channels for filters: what lies around dy is what the window has
        beyond the image's own padding."""
        padding = tuple(tuple(WINDOW - 1 - side for side in sides) for sides in p.padding)
        return Conv2dProblem.model_construct(
            n=p.n, h=p.p, w=p.q, c=p.k, k=p.c, r=p.r, s=p.s, layout=p.layout, padding=padding, dtype=p.dtype,
            acc_dtype=p.acc_dtype, out_dtype=p.out_dtype, allow_tf32=p.allow_tf32, fraction_bits=p.fraction_bits,
            rounding=p.rounding, truncation=p.truncation, epilogue=p.epilogue, winograd=p.winograd,
        )  # fmt: skip

    def of_layer(self, layer: Conv2dProblem) -> Conv2dDgradProblem:
        padding = tuple(tuple(WINDOW - 1 - side for side in sides) for sides in layer.padding)
        own = ("n", "r", "s", "layout", "dtype", "out_dtype", "allow_tf32", "winograd", *FIELDS)
        return Conv2dDgradProblem.model_validate({
            **{name: getattr(layer, name) for name in own}, "h": layer.p, "w": layer.q, "c": layer.k, "k": layer.c,
            "padding": padding, "epilogue": [node.model_dump() for node in layer.epilogue],
        })  # fmt: skip

    def filters_of_layer(self, p: Conv2dDgradProblem, w: Array) -> Array:
        return w[:, ::-1, ::-1].transpose(3, 1, 2, 0)

    def row_of_filters(self, layout: str, channels: int, filters: int) -> int:
        return filters if layout == "nhwc" else 1

    # ---- search

    def product_kind(self, p: Conv2dDgradProblem, target: Target) -> Kind:
        kind = super().product_kind(p, target)
        if not p.strided:
            return kind
        undivided = split.linked(split.ways(()), with_stream=kind.tunables is implicit.TENSOR_TUNABLES)
        return replace(kind, linked=dict.fromkeys(kind.levels, undivided), every_way=None)

    def direct_kind(self, p: Conv2dDgradProblem, target: Target) -> Kind | None:
        """Where a product would be mostly padding, of taps or of columns."""
        if min(p.group_channels, p.group_filters) > direct.MOST_CHANNELS:
            return None
        return Kind(direct.TUNABLES, direct.levels(largest(p), direct.window_of(p)))

    def direct_default(self, p: Conv2dDgradProblem, target: Target, admit: Admit) -> Schedule:
        return direct.default(largest(p), direct.window_of(p), admit)

    def direct_first(self, p: Conv2dDgradProblem) -> bool:
        """Where both the channels and the filters of a group are few."""
        return p.group_filters <= direct.MOST_CHANNELS and p.group_channels < MANY_FILTERS

    def direct_rules(
        self, p: Conv2dDgradProblem, t: Mapping[str, Any], target: Target, workspace_limit: int | None
    ) -> Accepted | Rejected:
        """The forward kernel's rules for the largest phase, and a grid for all of them."""
        of_phase, times = largest(p), count(p)
        across, _ = direct.blocks(of_phase, t)
        return (
            direct.window_rule(p, t)
            or check(
                across * times <= direct.LARGEST_INDEX,
                "grid",
                f"{times} phases of {across} blocks; a launch has at most {direct.LARGEST_INDEX}",
            )
            or direct.rules(of_phase, t, target)
        )

    def index_rule(self, p: Conv2dDgradProblem, *, whole: bool) -> Rejected | None:
        """As `reached` in kernel.cuh."""
        elements = _pixels_reached(p) * (p.n * p.k if whole else p.group_filters)
        weights = p.group_filters * p.r * p.s * p.group_channels
        return index_check(elements, f"dy has {elements} elements with what windows reach beyond it") or index_check(
            weights, f"a group's filters have {weights} elements"
        )

    def _split_rule(self, p: Conv2dDgradProblem, t: Mapping[str, Any]) -> Rejected | None:
        return check(
            not p.strided or t["split"] == "none",
            "split",
            f"with stride {p.stride[0]} x {p.stride[1]} sums differ in length: split = {t['split']} would leave "
            "slices of some empty",
        )

    def gather_rule(self, p: Conv2dDgradProblem, t: Mapping[str, Any]) -> Rejected | None:
        if broken := self._split_rule(p, t):
            return broken
        threads, (dy, w, _) = family(t).threads(t), self.aligns(p)
        if not p.channels_last:
            return check(
                threads % t["tile_n"] == 0
                and t["tile_k"] * t["tile_n"] % max(1, threads) == 0
                and threads % t["tile_k"] == 0,
                "gather",
                f"{threads} threads for {t['tile_n']} pixels and {t['tile_k']} taps: each thread needs one pixel of dy "
                "and one tap of the filters",
            )
        of_taps, of_channels = max(1, t["tile_k"] // dy), max(1, t["tile_n"] // w)
        vectors = t["tile_k"] * of_channels
        if threads % of_taps != 0:
            return Rejected(
                "gather", f"{threads} threads for {of_taps} vectors of taps: each thread needs one tap in all its rows"
            )
        if threads % of_channels != 0 or (vectors % threads != 0 and vectors >= threads):
            return Rejected(
                "gather",
                f"{threads} threads for {t['tile_k']} x {of_channels} vectors of filters: each thread needs the same "
                "channels in all its rows",
            )
        return None

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        p, t = self.own(problem), schedule.as_dict()
        if not channel_planes.ahead(t):
            return super().rules(p, schedule, target, workspace_limit)
        return self._split_rule(p, t) or self.rules_of_planes(p, schedule, target, workspace_limit)

    def gather_registers(self, s: Mapping[str, Any], t: Mapping[str, Any]) -> int:
        if channel_planes.ahead(t):
            return channel_planes.registers(s["layout"], t) + WEIGHT_REGISTERS
        return implicit.image_registers(s, t) + WEIGHT_REGISTERS

    # ---- tests

    def spread(self, p: Conv2dDgradProblem, factors: Array) -> Array:
        filters = np.tile(factors.reshape(p.group_filters, p.r, p.s), (p.groups, 1, 1))
        return np.expand_dims(filters, 3 if p.channels_last else 1)

    def multiply(self, p: Conv2dDgradProblem, first: Float64, second: Float64) -> Float64:
        """Each element of the filter takes dy to where the image was read."""
        xp = namespace_of(first)
        image = xp.zeros((p.n, *p.padded, p.c), dtype=first.dtype)
        gradients = first.reshape(p.pixels, p.groups, p.group_filters).transpose(1, 0, 2)
        filters = second.reshape(p.groups, p.group_filters, p.r, p.s, p.group_channels)
        for r, s, rows, columns in windows(p):
            parts = xp.matmul(gradients, filters[:, :, r, s])
            image[:, rows, columns] += parts.transpose(1, 0, 2).reshape(p.n, p.p, p.q, p.c)
        top, left = p.corner
        return image[:, top : top + p.h, left : left + p.w]

    # ---- what a schedule costs

    def products(self, p: Conv2dDgradProblem) -> list[tuple[int, MatmulProblem]]:
        """Of each phase; sums without taps are empty."""
        layout = _layout(p.layout, pointwise=p.pointwise)
        made = [(number, phase, implicit.image_product(phase, layout, phase.epilogue)) for number, phase in phases(p)]
        return [(number, product.model_copy(update={"k": phase.taps})) for number, phase, product in made]

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        """Of the taps that a pixel has, not of the stride's zeros between them."""
        p = self.own(problem)
        as_product, t = self.divided(p, schedule.as_dict())
        products = sum(number * phase.rows * phase.columns * phase.taps for number, phase in phases(p)) * p.n * p.c
        pixels = p.n * p.h * p.w * p.c
        cost = Cost(
            flops=2 * products + pixels * len(p.epilogue),
            bytes_read=sum(operand.bytes for operand in self.operands(p) if operand.role == "in"),
            bytes_written=pixels * dtype(p.out_dtype).bytes,
            launches=len(split.functions(t)),
            workspace_bytes=split.workspace_bytes(as_product, t),
            truncations=self.truncations(p, t),
        )
        if channel_planes.ahead(t):
            return replace(cost, workspace_bytes=self.planes(p).workspace_bytes(as_product, t))
        return self.cost_of_winograd(p, schedule, cost)

    def planes(self, p: Conv2dDgradProblem) -> ChannelPlanes:
        align = implicit.widths(p, p.group_filters, 1, 1)[0] if p.channels_last else 1
        return ChannelPlanes(
            p.dtype, p.channels_last, p.n, p.p * p.q, p.groups, p.group_filters, p.c * p.r * p.s, _pixels_reached(p),
            align,
        )  # fmt: skip

    def launches(self, problem: Problem, schedule: Schedule, target: Target) -> tuple[LaunchCounts, ...]:
        p, t = self.own(problem), self.values(schedule)
        return self.launches_of_planes(p, t) if channel_planes.ahead(t) else super().launches(p, schedule, target)

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        if winograd.computes(schedule.as_dict()):
            return self.work_of_winograd(self.own(problem), schedule, target)
        p, t, least = self.own(problem), self.values(schedule), self.cost(problem, schedule)
        if is_direct(t):
            return self.direct_work(p, t, least, target)
        s, layout = self.signature(p), _layout(p.layout, pointwise=p.pointwise)
        aligned = (*self.product_aligns(s), s["align_out"])
        planes = self.planes(p) if channel_planes.ahead(t) else None
        count_phase = partial(
            work.of_product, t=t, layout=layout, aligned=aligned, target=target, gathered=not p.pointwise, planes=planes
        )
        run = work.together(p, least, self.operands(p), split.grid_blocks(self.product(p), t), count_phase)
        return run if planes is None else work.of_planes(run, planes, target)

    def direct_work(self, p: Conv2dDgradProblem, t: Mapping[str, Any], least: Cost, target: Target) -> Work:
        across, down = direct.blocks(largest(p), t)
        return work.together(p, least, self.operands(p), across * down * count(p), partial(work.of_sums, t=t))

    def direct_launches(self, p: Conv2dDgradProblem, t: Mapping[str, Any]) -> tuple[LaunchCounts, ...]:
        """Strips of all phases have as many blocks as those of the largest."""
        parts = [
            direct.Part(number, direct.blocks(largest(p) if t["window"] else phase, t)[0], phase)
            for number, phase in phases(p)
        ]
        row = direct.Row(p.w, p.s - 1 - p.corner[1], p.q)
        return (direct.launch(p, parts, row, t, self.fields(self.signature(p), t)),)


def _pixels_reached(p: Conv2dDgradProblem) -> int:
    """Pixels of dy with what windows reach beyond it."""
    rows, columns = (
        extent + 2 * ((taps - 1) * p.dilation[axis] // p.stride[axis] + 1)
        for axis, (extent, taps) in enumerate(((p.p, p.r), (p.q, p.s)))
    )
    return rows * columns


def _layout(layout: str, *, pointwise: bool) -> Layout:
    """With channels last filters have dx's channels along n, with channels first they are gathered by columns, or
    stored along m."""
    return "tn" if pointwise and layout == "nchw" else "nn"


OPERATOR = Conv2dDgrad()
