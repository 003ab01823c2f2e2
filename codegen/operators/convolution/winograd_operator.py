"""Winograd as a third algorithm of a convolution's operator: of the forward one as it is, of a gradient as that of the
output's gradient."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from codegen.arrays import Float64, namespace_of
from codegen.counts import LaunchCounts, Openings, RingForm
from codegen.errors import InvalidSearch
from codegen.fixed_point import over_ring
from codegen.kernel import Kernel
from codegen.operator import Array, Config, Cost, InputKind, LaunchBounds, Work
from codegen.operators.convolution import (
    channel_planes,
    direct,
    far,
    winograd,
    winograd_fused,
    winograd_plan,
    winograd_reference,
    winograd_work,
)
from codegen.operators.convolution.channel_planes import ChannelPlanes
from codegen.operators.convolution.operator import ConvolutionOperator
from codegen.operators.convolution.problem import AllowsWinograd
from codegen.operators.convolution.ring_forms import forms_of_others
from codegen.operators.matmul import ring_space
from codegen.operators.matmul.far import launch
from codegen.operators.matmul.reduced import reduced_problems as reduced_products
from codegen.problem import Problem
from codegen.run_once import RunOnce
from codegen.search.joined_space import Kind
from codegen.search.rules import Accepted, Rejected
from codegen.search.schedule import Schedule, Value
from codegen.search.search import Search
from codegen.search.space import SearchSpace, Tunable
from codegen.targets import Target

# What `ring_forms` compares a schedule with: no more of one than tells how it truncates.
AS_PRODUCT = Schedule.of({"algorithm": "imad", "truncate": "once"})
AS_WINOGRAD = Schedule.of({"algorithm": "winograd_imad", "output_tile": 2, "truncate": "once"})


class WinogradOperator(ConvolutionOperator):
    """An operator says which convolution its problem is, its layer."""

    problem_type: ClassVar[type[AllowsWinograd]]
    layer_type: ClassVar[type[AllowsWinograd]]
    shared: ClassVar[tuple[str, ...]] = (
        *ConvolutionOperator.shared, "conv/winograd_planes.cuh", "conv/winograd.cuh", "conv/winograd_fused.cuh",
    )  # fmt: skip

    @abstractmethod
    def layer(self, p: Any) -> AllowsWinograd:
        """The convolution that Winograd computes for a problem that fits it."""

    @abstractmethod
    def of_layer(self, layer: Any) -> Problem:
        """The problem of a layer."""

    @abstractmethod
    def filters_of_layer(self, p: Any, w: Array) -> Array:
        """w as the layer reads it, channels last in both."""

    @abstractmethod
    def row_of_filters(self, layout: str, channels: int, filters: int) -> int:
        """How many elements of w lie along one row, by a layer's channels and filters."""

    @abstractmethod
    def planes(self, p: Any) -> ChannelPlanes:
        """What is split into limbs ahead of an implicit product."""

    def rules_of_planes(
        self, p: Any, schedule: Schedule, target: Target, workspace_limit: int | None
    ) -> Accepted | Rejected:
        """`rules` of an implicit product of planes."""
        if p.depthwise:
            return super().rules(p, schedule, target, workspace_limit)
        return self.planes(p).rules(self.product(p), self.values(schedule), target, workspace_limit)

    def launches_of_planes(self, p: Any, t: Mapping[str, Any]) -> tuple[LaunchCounts, ...]:
        """`launches` of an implicit product of planes."""
        inside = self.gathered_place(p), self.share_inside(p)
        return self.planes(p).launches(self.products(p), t, self.signature(p)["align_out"], inside)

    # ---- search

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        """Raises InvalidSearch also where all that a search lists is Winograd's, which does not compute the problem."""
        p, space = self.own(problem), super().space(problem, target, search)
        listed = [schedule.as_dict() for schedule in space.schedules or ()]
        if listed and not p.fits_winograd and all(map(winograd.computes, listed)):
            others = self._others(p, target)
            broken = winograd.does_not_fit(p, int(listed[0]["output_tile"]), others)
            raise InvalidSearch(broken.message, field="search.schedules", allowed=others)
        return space

    def every_kind(self, p: Any, target: Target) -> dict[Value, tuple[Tunable, ...]]:
        every = {**super().every_kind(p, target), winograd.NAME: winograd.tunables(p, target)}
        return {**every, winograd_fused.NAME: winograd_fused.TUNABLES}

    def ring_kinds(self, p: Any, target: Target) -> dict[Value, Kind]:
        if not p.fits_winograd:
            return {}
        return {**winograd.ring_kinds(self.layer(p), target), winograd_fused.NAME: winograd_fused.ring_kind()}

    def ring_tunables_lacking(self, p: Any, target: Target) -> dict[Value, tuple[Tunable, ...]]:
        if p.fits_winograd:
            return {}
        of_floats = {winograd.NAME: winograd.SIMT_TUNABLES}
        return winograd.ring_tunables(target) | {winograd_fused.NAME: winograd_fused.RING_TUNABLES, **of_floats}

    def kinds(self, p: Any, target: Target, search: Search) -> dict[Value, Kind]:
        kinds = super().kinds(p, target, search)
        if winograd.worth(p, search):
            kinds[winograd.NAME] = winograd.kind(self.layer(p), target)
        if winograd.worth(p, search, winograd_fused.NAME) and winograd_fused.worth(p):
            kinds[winograd_fused.NAME] = winograd_fused.kind(self.layer(p))
        return kinds

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        p, t = self.own(problem), schedule.as_dict()
        if not winograd.computes(t):
            return super().rules(p, schedule, target, workspace_limit)
        if not p.fits_winograd:
            return winograd.does_not_fit(p, int(t["output_tile"]), self._others(p, target))
        broken = self.index_rule(p, whole=p.channels_last)
        if broken or not winograd_fused.computes(t):
            return broken or winograd.rules(self.layer(p), t, target, workspace_limit)
        return winograd_fused.rules(self.layer(p), t, target)

    def _others(self, p: Any, target: Target) -> list[str]:
        """The other algorithms that compute a problem."""
        if over_ring(p):
            return list(map(str, ring_space.ALGORITHM.allowed))
        return ["implicit_gemm"] * (not p.depthwise) + ["direct"] * (self.direct_kind(p, target) is not None)

    # ---- the kernel

    def functions(self, kernel: Kernel) -> tuple[str, ...]:
        if not winograd.is_winograd(kernel):
            return super().functions(kernel)
        return winograd_fused.FUNCTIONS if _fused(kernel) else winograd.FUNCTIONS

    def transformed(self, kernel: Kernel) -> str | None:
        return winograd.FILTERS if winograd.is_winograd(kernel) and not _fused(kernel) else None

    def transformed_bytes(self, problem: Problem, schedule: Schedule) -> int:
        t = schedule.as_dict()
        if not winograd.computes(t) or winograd_fused.computes(t):
            return 0
        return winograd.workspace_parts(self.layer(self.own(problem)), t)[1]

    def config(self, kernel: Kernel) -> Config:
        if not winograd.is_winograd(kernel):
            return super().config(kernel)
        return winograd_fused.config(kernel, self.flags) if _fused(kernel) else winograd.config(kernel, self.flags)

    def launch_bounds(self, kernel: Kernel, function: str) -> LaunchBounds:
        if _fused(kernel):
            return winograd_fused.launch_bounds(kernel.tunables.as_dict())
        return super().launch_bounds(kernel, function)

    def estimated_registers(self, kernel: Kernel) -> int:
        if _fused(kernel):
            return winograd_fused.registers(kernel.tunables.as_dict(), kernel.signature_dict["dtype"])
        return winograd.registers(kernel) if winograd.is_winograd(kernel) else super().estimated_registers(kernel)

    def shared_bytes(self, kernel: Kernel) -> int:
        if _fused(kernel):
            return winograd_fused.shared_bytes(kernel.tunables.as_dict(), kernel.signature_dict["dtype"])
        return winograd.shared_bytes(kernel) if winograd.is_winograd(kernel) else super().shared_bytes(kernel)

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        if not winograd.is_winograd(kernel):
            return super().predicted_compile_seconds(kernel)
        return winograd_fused.compile_seconds(kernel) if _fused(kernel) else winograd.compile_seconds(kernel)

    # ---- tests

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        if not winograd.is_winograd(kernel):
            return super().test_problems(kernel)
        s, t = kernel.signature_dict, kernel.tunables.as_dict()

        def row(channels: int, filters: int) -> int:
            return self.row_of_filters(s["layout"], channels, filters)

        return [self.of_layer(layer) for layer in winograd_plan.reduced_problems(self.layer_type, s, t, row)]

    def run_once(self, kernel: Kernel) -> list[RunOnce]:
        once = self._special(kernel) if winograd.is_winograd(kernel) else super().run_once(kernel)
        s, t = kernel.signature_dict, self.values(kernel.tunables)
        if channel_planes.ahead(t):
            of_planes = channel_planes.grouped(reduced_products(self._as_matmul(s), t)[0])
            problem = self._tolerant(self.reduced.of_product(self.problem_type, s, 1, of_planes), t)
            once.append(RunOnce("long", problem, tuple(self.test_launches(kernel, problem)[0])))
        return [*once, *self._far(kernel)]

    def _special(self, kernel: Kernel) -> list[RunOnce]:
        """Of Winograd over numbers: several tiles, of two images where a plan has them, of which some have what is no
        number."""
        problem = self.own(self.test_problems(kernel)[:2][-1])
        if over_ring(problem):
            return []
        return [RunOnce("special", problem, tuple(self.test_launches(kernel, problem)[0]))]

    def _far(self, kernel: Kernel) -> list[RunOnce]:
        s, t, last = kernel.signature_dict, self.values(kernel.tunables), self._last_blocks(kernel)
        if last is None:
            return []
        as_product = not winograd.computes(t) and t["algorithm"] != "direct"
        whole = s["layout"] == "nhwc" or t["algorithm"] == "direct"

        def launch_of(problem: Any) -> tuple[int, ...]:
            return launch(t, self.product(problem)) if as_product else (0, 1, 0)

        def within(problem: Any) -> bool:
            return self.index_rule(problem, whole=whole) is None

        reach, problems = far.Reach(as_product and bool(s["pointwise"]), whole, within), self.test_problems(kernel)
        if winograd.computes(t):  # the smallest: its transforms and the products of all places take long
            problems.sort(key=lambda problem: self.own(problem).pixels * self.own(problem).c * self.own(problem).k)
        return far.last_images(problems, reach, last, launch_of)

    def _last_blocks(self, kernel: Kernel) -> far.Last | None:
        """Of each launch; None where they do not compute the last images."""
        s, t = kernel.signature_dict, self.values(kernel.tunables)
        if _fused(kernel):
            return far.of_blocks(lambda p: winograd_fused.blocks(self.layer(p), t)[0])
        if winograd.is_winograd(kernel):
            return far.of_winograd(t, self.layer) if s["layout"] == "nhwc" else None
        if channel_planes.ahead(t):
            return None
        if t["algorithm"] == "direct":
            return far.of_blocks(lambda p: direct.blocks(self.convolved(p), t)[0])
        return far.of_product(t, self.product, self.phases, int(s["align_out"]))

    def convolved(self, p: Any) -> Any:
        """The convolution whose pixels a direct kernel's blocks follow."""
        return p

    def phases(self, p: Any) -> int:
        """How many products of a problem lie one behind the other."""
        return 1

    def test_launches(self, kernel: Kernel, problem: Problem) -> list[list[int]]:
        if not winograd.is_winograd(kernel):
            return super().test_launches(kernel, problem)
        if _fused(kernel):
            return [[0, 0, 0]]
        return winograd_plan.launches_to_test(kernel.tunables.as_dict(), self.layer(self.own(problem)))

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        p, made = self.own(problem), super().make_inputs(problem, kind, rng)
        if p.winograd == "none" or kind not in ("integer", "special"):
            return made
        image, filters = p.reads
        if kind == "special":
            return winograd_plan.with_few_special(self.layer(p), made, image, rng)
        drawn = winograd_plan.integers(self.layer(p), made[image].shape, made[filters].shape, rng)
        kept = winograd_plan.kept_channels(self.layer(p), rng)
        return {
            **made,
            image: (drawn[0] * (kept if p.channels_last else kept[:, None, None])).astype(made[image].dtype),
            filters: drawn[1].astype(made[filters].dtype),
        }

    def reached(self, p: Any) -> Callable[[Array], Array] | None:
        if p.winograd == "none":
            return None
        return partial(winograd_reference.reached, self.layer(p))

    def bound(self, p: Any, first: Float64, second: Float64) -> Float64:
        of_sums = super().bound(p, first, second)
        if p.winograd == "none":
            return of_sums
        of_layer = winograd_reference.bound(self.layer(p), first, self.filters_of_layer(p, second))
        return namespace_of(first).maximum(of_sums, of_layer)

    # ---- what a schedule costs

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        return self.cost_of_winograd(self.own(problem), schedule, super().cost(problem, schedule))

    def cost_of_winograd(self, p: Any, schedule: Schedule, cost: Cost) -> Cost:
        """`cost`, with the launches and the workspace of a schedule of Winograd."""
        t = schedule.as_dict()
        if not winograd.computes(t) or winograd_fused.computes(t):
            return cost
        needed = winograd.workspace_bytes(self.layer(p), t)
        return replace(cost, launches=len(winograd.FUNCTIONS), workspace_bytes=needed)

    def launches(self, problem: Problem, schedule: Schedule, target: Target) -> tuple[LaunchCounts, ...]:
        if not winograd.computes(schedule.as_dict()):
            return super().launches(problem, schedule, target)
        layer, t = self.layer(self.own(problem)), schedule.as_dict()
        return (
            winograd_fused.launches(layer, t) if winograd_fused.computes(t) else winograd_work.launches(layer, schedule)
        )

    def opened(self, p: Any, schedule: Schedule, *, inputs: bool) -> tuple[int, int]:
        """Of Winograd the transformed tiles and filters, without what fills the matrices up."""
        if inputs or not winograd.computes(schedule.as_dict()):
            return super().opened(p, schedule, inputs=inputs)
        layer, outputs = self.layer(p), int(schedule.get("output_tile"))
        places = winograd.places(outputs)
        return places * winograd.tiles(layer, outputs) * layer.c, places * layer.k * layer.c

    def ring_forms(self, problem: Problem, schedule: Schedule, openings: Openings) -> tuple[RingForm, ...]:
        """The schedule's own form, as its row has it; a product and F(2), truncated once, beside it; and those of other
        systems."""
        p = self.own(problem)
        if not over_ring(p):
            return ()
        tried = [schedule, AS_PRODUCT, *([AS_WINOGRAD] if p.fits_winograd else [])]
        ours: dict[str, RingForm] = {}
        for each in tried:
            form = self._own_form(p, each, openings)
            ours.setdefault(form.name.partition(",")[0], form)
        others = forms_of_others(self.layer(p)) if p.fits_winograd else ()
        product = ours.pop("product")
        return (product, *others, *(ours[name] for name in sorted(ours)))

    def _own_form(self, p: Any, schedule: Schedule, openings: Openings) -> RingForm:
        t, sent = schedule.as_dict(), self.ring_bytes(p, schedule, openings)
        assert sent is not None, "over a ring"
        name = "product" if not winograd.computes(t) else "winograd" if t["output_tile"] == 2 else "winograd F(4)"
        place = {"once": "", "tile": ", each tile truncated", "product": ", each product truncated"}[str(t["truncate"])]
        products = self.multiplications(p)
        if winograd.computes(t):
            name, (tiles, _) = f"{name}, truncated once", self.opened(p, schedule, inputs=False)
            products = tiles * self.layer(p).k + self.epilogue_products(p)
        return RingForm(name + place, openings.filters, True, sent, self.truncations(p, t), products)

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        if not winograd.computes(schedule.as_dict()):
            return super().work(problem, schedule, target)
        return self.work_of_winograd(self.own(problem), schedule, target)

    def work_of_winograd(self, p: Any, schedule: Schedule, target: Target) -> Work:
        layer, t, least = self.layer(p), schedule.as_dict(), self.cost(p, schedule)
        if winograd_fused.computes(t):
            return winograd_fused.work(layer, t, least)
        return winograd_work.work(layer, schedule, least, target)


def _fused(kernel: Kernel) -> bool:
    return winograd_fused.computes(kernel.tunables.as_dict())
