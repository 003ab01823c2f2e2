"""Convolution in two dimensions, with groups (`codegen/operators/convolution/` has what its gradients share).

out[n, k, p, q] = epilogue(sum over r, s, c of x[n, g C' + c, p stride_h - top + r dilation_h, …] * w[k, c, r, s])
for the group g of filter k and C' = c / groups channels of a group; what lies outside of x counts as 0.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files as packaged_files
from typing import Any

from codegen.arrays import Float64, namespace_of
from codegen.counts import LaunchCounts
from codegen.fixed_point import over_ring
from codegen.kernel import Kernel
from codegen.operator import Array, Config, Cost, Work
from codegen.operators.conv2d import reduced, unfused_epilogue
from codegen.operators.conv2d.problem import Conv2dProblem as Conv2dProblem
from codegen.operators.convolution import channel_planes, direct, far, implicit, winograd, winograd_fused
from codegen.operators.convolution.channel_planes import ChannelPlanes
from codegen.operators.convolution.operator import Admit, every_tunable, index_check
from codegen.operators.convolution.problem import with_axes
from codegen.operators.convolution.reference import padded, windows
from codegen.operators.convolution.winograd_operator import WinogradOperator
from codegen.operators.matmul.problem import Layout, MatmulProblem
from codegen.operators.matmul.product import family
from codegen.problem import Problem
from codegen.search.joined_space import Kind
from codegen.search.rules import Accepted, Rejected, check
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import SearchSpace, launch_time_names
from codegen.targets import Target


class Conv2d(WinogradOperator):
    """out = epilogue(x * w); see Conv2dProblem for shapes."""

    name = "conv2d"
    problem_type = layer_type = Conv2dProblem
    tunables = every_tunable((
        *direct.TUNABLES, unfused_epilogue.TUNABLE, *winograd.OWN_TUNABLES, *winograd_fused.TUNABLES,
        *winograd_fused.RING_TUNABLES, *winograd.OF_RINGS,
    ))  # fmt: skip
    beside = (unfused_epilogue.TUNABLE,)
    splits_ahead = True
    folder = packaged_files("codegen.operators.conv2d")
    files = ("gather.cuh", "separate.cuh", "kernel.cuh")
    direct = direct
    reduced = reduced

    @staticmethod
    @lru_cache(maxsize=1024)  # called for every schedule
    def product(p: Conv2dProblem) -> MatmulProblem:
        last = p.channels_last
        return implicit.image_product(p, "nt" if last else "nn", with_axes(p.epilogue, "n" if last else "m"))

    def product_layout(self, layout: str, *, pointwise: bool) -> Layout:
        return "nt" if layout == "nhwc" else "nn"

    @staticmethod
    @lru_cache(maxsize=1024)
    def aligns(p: Conv2dProblem) -> tuple[int, int, int]:
        """With channels last vectors are of channels of one group, or of neighbouring groups where each has one; with
        channels first the image is gathered element by element."""
        if not p.channels_last:
            return implicit.widths(p, p.h * p.w if p.pointwise else 1, p.taps, p.p * p.q)
        if p.depthwise:
            return implicit.widths(p, p.c, p.taps, p.k)
        return implicit.widths(p, p.group_channels, p.taps, p.group_filters)

    def _last_blocks(self, kernel: Kernel) -> far.Last | None:
        last, t = super()._last_blocks(kernel), kernel.tunables.as_dict()
        separate = last is not None and unfused_epilogue.is_separate(t)
        return far.with_nodes(last, len(kernel.signature_dict["epilogue"])) if last and separate else last

    # ---- as Winograd computes it

    def layer(self, p: Conv2dProblem) -> Conv2dProblem:
        return p

    def of_layer(self, layer: Conv2dProblem) -> Conv2dProblem:
        return layer

    def filters_of_layer(self, p: Conv2dProblem, w: Array) -> Array:
        return w

    def row_of_filters(self, layout: str, channels: int, filters: int) -> int:
        return 9 * channels

    # ---- search

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        joined = super().space(problem, target, search)
        by_level = search.level != 0 and search.tunables is None and search.schedules is None
        p = self.own(problem)
        if not (p.epilogue and by_level) or joined.first is None or over_ring(p):
            return joined
        alone = unfused_epilogue.alone(joined.first)
        part = SearchSpace.of_one(alone, launch_time_names(self.tunables))
        return replace(joined, parts=(*joined.parts, part), compared=(alone,))

    def direct_kind(self, p: Conv2dProblem, target: Target) -> Kind | None:
        return Kind(direct.TUNABLES, direct.levels(p, direct.window_of(p))) if direct.worth(p) else None

    def direct_default(self, p: Conv2dProblem, target: Target, admit: Admit) -> Schedule:
        return direct.default(p, direct.window_of(p), admit)

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        p, t = self.own(problem), schedule.as_dict()
        if channel_planes.ahead(t):
            return self.rules_of_planes(p, schedule, target, workspace_limit)
        if not unfused_epilogue.is_separate(t):
            return super().rules(p, schedule, target, workspace_limit)
        broken = unfused_epilogue.rules(p, t, workspace_limit)
        return broken or super().rules(unfused_epilogue.sums(p), schedule, target, workspace_limit)

    def direct_rules(
        self, p: Conv2dProblem, t: Mapping[str, Any], target: Target, workspace_limit: int | None
    ) -> Accepted | Rejected:
        return direct.window_rule(p, t) or direct.rules(p, t, target)

    def index_rule(self, p: Conv2dProblem, *, whole: bool) -> Rejected | None:
        """As `reached` in kernel.cuh."""
        rows, columns = p.padded
        elements = rows * columns * (p.n * p.c if whole else p.group_channels)
        return index_check(elements, f"the image has {elements} elements with its padding")

    def gather_rule(self, p: Conv2dProblem, t: Mapping[str, Any]) -> Rejected | None:
        count, x = family(t).threads(t), self.aligns(p)[0]
        if p.channels_last:
            per_row = max(1, t["tile_k"] // x)
            return check(
                count % per_row == 0,
                "gather",
                f"{count} threads for {per_row} vectors of taps: each thread needs one tap in all its rows",
            )
        return check(
            count % t["tile_n"] == 0 and t["tile_k"] * t["tile_n"] % max(1, count) == 0,
            "gather",
            f"{count} threads for {t['tile_n']} pixels and {t['tile_k']} taps: each thread needs one pixel",
        )

    # ---- the kernel

    def gather_registers(self, s: Mapping[str, Any], t: Mapping[str, Any]) -> int:
        return channel_planes.registers(s["layout"], t) if channel_planes.ahead(t) else implicit.image_registers(s, t)

    def out_align(self, s: Mapping[str, Any], t: Mapping[str, Any]) -> int:
        return unfused_epilogue.out_align(s, t)

    def functions(self, kernel: Kernel) -> tuple[str, ...]:
        if unfused_epilogue.is_separate(kernel.tunables.as_dict()):
            return ("run", *(f"node{index}" for index in range(len(kernel.signature_dict["epilogue"]))))
        return super().functions(kernel)

    def config(self, kernel: Kernel) -> Config:
        whole = super().config(kernel)
        separate = unfused_epilogue.is_separate(kernel.tunables.as_dict())
        return replace(whole, fields={"separate": separate, **whole.fields})

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        if not unfused_epilogue.is_separate(kernel.tunables.as_dict()):
            return super().predicted_compile_seconds(kernel)
        sums = Kernel.of(self.name, {**kernel.signature_dict, "epilogue": []}, kernel.tunables)
        nodes = unfused_epilogue.compile_seconds(tuple(kernel.signature_dict["epilogue"]))
        return super().predicted_compile_seconds(sums) + nodes

    # ---- tests

    def spread(self, p: Conv2dProblem, factors: Array) -> Array:
        return factors.reshape(p.shape_of("w")[1:])

    def multiply(self, p: Conv2dProblem, first: Float64, second: Float64) -> Float64:
        image, xp = padded(p, first), namespace_of(first)
        out = xp.zeros((p.groups, p.pixels, p.group_filters), dtype=first.dtype)
        filters = second.reshape(p.groups, p.group_filters, p.r, p.s, p.group_channels)
        for r, s, rows, columns in windows(p):
            seen = image[:, rows, columns].reshape(p.pixels, p.groups, p.group_channels)
            out += xp.matmul(seen.transpose(1, 0, 2), filters[:, :, r, s].transpose(0, 2, 1))
        return out.transpose(1, 0, 2).reshape(p.n, p.p, p.q, p.k)

    # ---- what a schedule costs

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        p, t, cost = self.own(problem), schedule.as_dict(), super().cost(problem, schedule)
        if channel_planes.ahead(t):
            return replace(cost, workspace_bytes=self.planes(p).workspace_bytes(self.product(p), t))
        if not unfused_epilogue.is_separate(t):
            return cost
        return replace(cost, launches=1 + len(p.epilogue), workspace_bytes=unfused_epilogue.workspace_bytes(p))

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        p, t = self.own(problem), self.values(schedule)
        if channel_planes.ahead(t):
            return self._work_of_planes(p, t, self.cost(p, schedule), target)
        if not unfused_epilogue.is_separate(t):
            return super().work(p, schedule, target)
        sums = unfused_epilogue.sums(p)
        return replace(
            super().work(sums, schedule, target), others=unfused_epilogue.launches(p, self.aligns(sums)[2], target)
        )

    def launches(self, problem: Problem, schedule: Schedule, target: Target) -> tuple[LaunchCounts, ...]:
        p, t = self.own(problem), self.values(schedule)
        if channel_planes.ahead(t):
            return self.launches_of_planes(p, t)
        if not unfused_epilogue.is_separate(t):
            return super().launches(p, schedule, target)
        sums = unfused_epilogue.sums(p)
        width = int(self.fields(self.signature(p), t)["align_c"])
        nodes = unfused_epilogue.counted_launches(self.product(p), width)
        return (*super().launches(sums, schedule, target), *nodes)

    def planes(self, p: Conv2dProblem) -> ChannelPlanes:
        rows, columns = p.padded
        align = implicit.widths(p, p.group_channels, 1, 1)[0] if p.channels_last else 1
        return ChannelPlanes(
            p.dtype, p.channels_last, p.n, p.h * p.w, p.groups, p.group_channels, p.k * p.r * p.s, rows * columns,
            align, align,
        )  # fmt: skip

    def _work_of_planes(self, p: Conv2dProblem, t: Mapping[str, Any], least: Cost, target: Target) -> Work:
        planes = self.planes(p)
        of_planes, aligned = planes.padded(self.product(p)), (1, 1, self.aligns(p)[2])
        run = implicit.work(
            of_planes, channel_planes.of_run(t), aligned, least, target, p.input_bytes, planes.gather_instructions()
        )
        from_dram = run.dram_bytes - p.input_bytes + planes.beyond_l2(target)
        return replace(run, dram_bytes=from_dram, others=(planes.split_work(target), *run.others))

    def direct_work(self, p: Conv2dProblem, t: Mapping[str, Any], least: Cost, target: Target) -> Work:
        return direct.work(p, t, least)

    def direct_launches(self, p: Conv2dProblem, t: Mapping[str, Any]) -> tuple[LaunchCounts, ...]:
        part, row = direct.Part(1, direct.blocks(p, t)[0], p), direct.Row(p.q, p.corner[1], p.w)
        return (direct.launch(p, [part], row, t, self.fields(self.signature(p), t)),)


OPERATOR = Conv2d()
