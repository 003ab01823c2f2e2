"""The gradient of a convolution's filters: as a product of matrices of which one is gathered on the way
(`implicit_gemm`), and without one (`direct`). Sums run over all output pixels, in slices that are computed in
parallel."""

from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files as packaged_files
from typing import Any

from codegen.arrays import Float64, namespace_of
from codegen.counts import LaunchCounts
from codegen.kernel import Kernel
from codegen.operator import GEMM, Array, Cost, Work
from codegen.operators.conv2d_wgrad import direct, reduced
from codegen.operators.conv2d_wgrad import space as spaces
from codegen.operators.conv2d_wgrad.far import last_filters
from codegen.operators.conv2d_wgrad.problem import Conv2dWgradProblem
from codegen.operators.convolution import implicit
from codegen.operators.convolution.operator import Admit, ConvolutionOperator, every_tunable, index_check, is_direct
from codegen.operators.convolution.problem import with_axes
from codegen.operators.convolution.reference import padded, windows
from codegen.operators.matmul.problem import Layout, MatmulProblem
from codegen.operators.matmul.product import family
from codegen.problem import Problem
from codegen.run_once import RunOnce
from codegen.search.joined_space import Kind
from codegen.search.rules import Accepted, Rejected, check
from codegen.search.schedule import Schedule
from codegen.targets import Target

# Registers of a thread's place in the image and of what moves it, and of dy's where its images are apart; estimates.
PLACE_REGISTERS, APART_REGISTERS = 14, 4
# Rows or columns of a padded image that are counted, as `longest_axis` in kernel.cuh.
LONGEST_AXIS = 2**28


class Conv2dWgrad(ConvolutionOperator):
    """dw = epilogue(dy * x); see Conv2dWgradProblem for shapes."""

    name = "conv2d_wgrad"
    problem_type = Conv2dWgradProblem
    tunables = every_tunable(direct.TUNABLES)
    folder = packaged_files("codegen.operators.conv2d_wgrad")
    shared = (*GEMM, "conv/feed.cuh", "conv/launch.cuh")
    files = ("gather.cuh", "direct.cuh", "kernel.cuh")
    align_names = ("align_dy", "align_x", "align_dw")
    turned = False
    of_filters = False  # filters' gradients are what it computes, of dy and x
    narrow = "row"
    gather_instructions = 14  # the place moves on, two checks, its address
    direct = direct
    reduced = reduced

    @staticmethod
    @lru_cache(maxsize=1024)  # called for every schedule
    def product(p: Conv2dWgradProblem) -> MatmulProblem:
        """dy x image: a matrix for each group."""
        layout: Layout = "tn" if p.channels_last else "nn"
        return implicit.product_of(p, p.groups, p.group_filters, p.taps, p.pixels, layout, with_axes(p.epilogue, "m"))

    def product_layout(self, layout: str, *, pointwise: bool) -> Layout:
        return "tn" if layout == "nhwc" else "nn"

    @staticmethod
    @lru_cache(maxsize=1024)
    def aligns(p: Conv2dWgradProblem) -> tuple[int, int, int]:
        """With channels last vectors are of one group, or of neighbouring groups where each has one channel and one
        filter; with channels first the image is gathered element by element, and dy's pixels are neighbours."""
        if not p.channels_last:
            return implicit.widths(p, p.p * p.q, 1, p.taps)
        dy, x = (p.k, p.c) if p.depthwise else (p.group_filters, p.group_channels)
        return implicit.widths(p, dy, x, p.taps)

    # ---- search

    def product_kind(self, p: Conv2dWgradProblem, target: Target) -> Kind:
        return spaces.product_kind(self.product(p), self.aligns(p)[:2], target)

    def product_default(self, p: Conv2dWgradProblem, target: Target, admit: Admit) -> Schedule:
        return spaces.product_default(p, self.product(p), self.aligns(p)[:2], target, admit)

    def direct_kind(self, p: Conv2dWgradProblem, target: Target) -> Kind | None:
        return direct.kind(p, _all_filters(p), target) if p.one_channel else None

    def direct_default(self, p: Conv2dWgradProblem, target: Target, admit: Admit) -> Schedule:
        return direct.default(p, _all_filters(p), target, admit)

    def direct_rules(
        self, p: Conv2dWgradProblem, t: Mapping[str, Any], target: Target, workspace_limit: int | None
    ) -> Accepted | Rejected:
        return direct.rules(p, _all_filters(p), t, target, workspace_limit)

    def index_rule(self, p: Conv2dWgradProblem, *, whole: bool) -> Rejected | None:
        """What a kernel reaches and counts with 32 bits, as `is_reached` in kernel.cuh."""
        rows, columns = p.padded
        elements, longest = rows * columns * p.n * p.c, max(rows, columns)
        return index_check(elements, f"the images have {elements} elements with their padding") or check(
            longest <= LONGEST_AXIS,
            "index",
            f"an axis of the image has {longest} elements with its padding; {LONGEST_AXIS} are counted",
        )

    def gather_rule(self, p: Conv2dWgradProblem, t: Mapping[str, Any]) -> Rejected | None:
        threads, (dy, x, _) = family(t).threads(t), self.aligns(p)
        taps, pixels = max(1, t["tile_n"] // x), max(1, t["tile_k"] // dy)
        if threads % taps != 0:
            return Rejected(
                "gather", f"{threads} threads for {taps} vectors of taps: each thread needs one tap at all its pixels"
            )
        if not p.channels_last and threads % pixels != 0:
            return Rejected(
                "gather",
                f"{threads} threads for {pixels} vectors of dy's pixels: each thread needs the same pixels of all its "
                "filters",
            )
        return None

    def gather_registers(self, s: Mapping[str, Any], t: Mapping[str, Any]) -> int:
        return PLACE_REGISTERS + (0 if s["layout"] == "nhwc" else APART_REGISTERS)

    # ---- tests

    def test_launches(self, kernel: Kernel, problem: Problem) -> list[list[int]]:
        t = kernel.tunables.as_dict()
        if not is_direct(t):
            return super().test_launches(kernel, problem)
        return direct.launches_to_test(_all_filters(self.own(problem)), t)

    def run_once(self, kernel: Kernel) -> list[RunOnce]:
        s, t = kernel.signature_dict, self.values(kernel.tunables)
        product, t = (_all_filters, direct.of_product(t)) if is_direct(t) else (self.product, t)
        of_filters = last_filters(map(self.own, self.test_problems(kernel)), t, product, int(s["align_dw"]))
        return [*super().run_once(kernel), *of_filters]

    def spread(self, p: Conv2dWgradProblem, factors: Array) -> Array:
        by_pixel = factors.reshape(p.n, p.p, p.q)
        return by_pixel[..., None] if p.channels_last else by_pixel[:, None]

    def multiply(self, p: Conv2dWgradProblem, first: Float64, second: Float64) -> Float64:
        image, xp = padded(p, second), namespace_of(second)
        by_group = first.reshape(p.pixels, p.groups, p.group_filters).transpose(1, 2, 0)
        dw = xp.zeros((p.groups, p.group_filters, p.r, p.s, p.group_channels), dtype=first.dtype)
        for r, s, rows, columns in windows(p):
            seen = image[:, rows, columns].reshape(p.pixels, p.groups, p.group_channels)
            element = xp.matmul(by_group, seen.transpose(1, 0, 2))
            dw[:, :, r : r + 1, s : s + 1] = element.reshape(p.groups, p.group_filters, 1, 1, p.group_channels)
        return dw.reshape(p.k, p.r, p.s, p.group_channels)

    # ---- what a schedule costs

    def divided(self, p: Conv2dWgradProblem, t: Mapping[str, Any]) -> tuple[MatmulProblem, Mapping[str, Any]]:
        return (_all_filters(p), direct.of_product(t)) if is_direct(t) else (self.product(p), t)

    def direct_work(self, p: Conv2dWgradProblem, t: Mapping[str, Any], least: Cost, target: Target) -> Work:
        return direct.work(p, _all_filters(p), self.aligns(p), t, least, target)

    def direct_launches(self, p: Conv2dWgradProblem, t: Mapping[str, Any]) -> tuple[LaunchCounts, ...]:
        return direct.launches(p, _all_filters(p), self.aligns(p), t)


@lru_cache(maxsize=1024)
def _all_filters(p: Conv2dWgradProblem) -> MatmulProblem:
    """A matrix of all filters, as a kernel of `direct` has it."""
    layout: Layout = "tn" if p.channels_last else "nn"
    return implicit.product_of(p, 1, p.k, p.taps, p.pixels, layout, with_axes(p.epilogue, "m"))


OPERATOR = Conv2dWgrad()
