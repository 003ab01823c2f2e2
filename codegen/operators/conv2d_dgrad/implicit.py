"""Phases as implicit products: matmul's kernels with two gathered operands, one from dy and one from the filters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from codegen.dtypes import dtype
from codegen.operator import Cost, Operand, Work
from codegen.operators.conv2d import implicit as forward
from codegen.operators.conv2d.direct import LARGEST_INDEX
from codegen.operators.conv2d.product import of_product
from codegen.operators.conv2d_dgrad.problem import Conv2dDgradProblem
from codegen.operators.conv2d_dgrad.product import aligns, layout_of, of_phase, product
from codegen.operators.conv2d_dgrad.residue_classes import Phase, phases
from codegen.operators.convolution import matmul_tunables
from codegen.operators.matmul import (
    simt_rules,
    simt_work,
    split,
    tensor_rules,
    tensor_work,
    traffic,
)
from codegen.operators.matmul.kernel_family import is_tensor, on_tensor_cores
from codegen.search.joined_space import Kind
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import Tunable
from codegen.targets import Target

# Registers of the filters' odometer beside those of a gathered image; an estimate.
WEIGHT_REGISTERS = 12


def tunables(problem: Conv2dDgradProblem, target: Target) -> tuple[Tunable, ...]:
    """Those of the kernel that computes the product on the target."""
    on_tensors = on_tensor_cores(product(problem), target)
    return forward.TENSOR_TUNABLES if on_tensors else forward.SIMT_TUNABLES


def kind(problem: Conv2dDgradProblem, target: Target, search: Search) -> Kind:
    """What searches try."""
    of_product = forward.kind_of_product(product(problem), _aligns(problem), target, search)
    if not problem.strided:
        return of_product
    undivided = split.linked(split.ways(()), with_stream=of_product.tunables is forward.TENSOR_TUNABLES)
    return replace(of_product, linked=dict.fromkeys(of_product.levels, undivided))


def default(problem: Conv2dDgradProblem, target: Target, admit: Callable[[Schedule], Accepted | Rejected]) -> Schedule:
    """Level 1's first schedule that breaks no rule, in matmul's order of preference."""
    return forward.default_of_product(product(problem), _aligns(problem), _input_bytes(problem), target, admit)


def rules(
    problem: Conv2dDgradProblem, schedule: Schedule, target: Target, workspace_limit: int | None
) -> Accepted | Rejected:
    """Matmul's rules for the product, and those of the gather. Every static_assert of filters.cuh and of
    conv/gather.cuh is a rule here."""
    t, as_matmul = matmul_tunables(schedule.as_dict()), product(problem)
    if problem.depthwise:
        return Rejected(
            "algorithm", f"{problem.groups} products with one column each are mostly padding: direct computes them"
        )
    if not problem.pointwise and (broken := _split_rule(problem, t) or _gather_rule(problem, t)):
        return broken
    admit = tensor_rules.rules if is_tensor(t) else simt_rules.rules
    outcome = admit(as_matmul, _aligns(problem), Schedule.of(t), target, workspace_limit)
    if isinstance(outcome, Rejected) or problem.pointwise:
        return outcome
    return _register_rule(problem, t, target) or ACCEPTED


def _split_rule(problem: Conv2dDgradProblem, t: Mapping[str, Any]) -> Rejected | None:
    return check(
        not problem.strided or t["split"] == "none",
        "split",
        f"with stride {problem.stride[0]} x {problem.stride[1]} sums differ in length: split = {t['split']} would "
        "leave slices of some empty",
    )


def _gather_rule(problem: Conv2dDgradProblem, t: Mapping[str, Any]) -> Rejected | None:
    count, (dy, w, _) = forward.threads(t), aligns(problem)
    if not problem.channels_last:
        return check(
            count % t["tile_n"] == 0 and t["tile_k"] * t["tile_n"] % max(1, count) == 0 and count % t["tile_k"] == 0,
            "gather",
            f"{count} threads for {t['tile_n']} pixels and {t['tile_k']} taps: each thread needs one pixel of dy and "
            "one tap of the filters",
        )
    of_taps, of_channels = max(1, t["tile_k"] // dy), max(1, t["tile_n"] // w)
    return check(
        count % of_taps == 0,
        "gather",
        f"{count} threads for {of_taps} vectors of taps: each thread needs one tap in all its rows",
    ) or check(
        count % of_channels == 0 and (t["tile_k"] * of_channels % count == 0 or t["tile_k"] * of_channels < count),
        "gather",
        f"{count} threads for {t['tile_k']} x {of_channels} vectors of filters: each thread needs the same channels in "
        "all its rows",
    )


def _register_rule(problem: Conv2dDgradProblem, t: Mapping[str, Any], target: Target) -> Rejected | None:
    alone = forward.product_registers(t, tensor_rules.Stored.of(product(problem), _aligns(problem)))
    wanted = forward.registers(t, problem.channels_last, aligns(problem), alone) + WEIGHT_REGISTERS
    return forward.register_rule(wanted, t, target)


def index_rule(problem: Conv2dDgradProblem, *, whole: bool) -> Rejected | None:
    """What a kernel reaches with 32 bits, as `reached` in kernel.cuh. `whole`: of all images, not of one product's."""
    p = problem
    rows, columns = (
        extent + 2 * ((taps - 1) * p.dilation[axis] // p.stride[axis] + 1)
        for axis, (extent, taps) in enumerate(((p.p, p.r), (p.q, p.s)))
    )
    elements = rows * columns * (p.n * p.k if whole else p.group_filters)
    weights = p.group_filters * p.r * p.s * p.group_channels
    return check(
        elements <= LARGEST_INDEX,
        "index",
        f"dy has {elements} elements with what windows reach beyond it; 32 bits reach {LARGEST_INDEX}",
    ) or check(
        weights <= LARGEST_INDEX, "index", f"a group's filters have {weights} elements; 32 bits reach {LARGEST_INDEX}"
    )


def work(
    problem: Conv2dDgradProblem, schedule: Schedule, least: Cost, operands: tuple[Operand, ...], target: Target
) -> Work:
    """Matmul's counts for each phase's product, together: every tap comes from L2, dy from DRAM once. Blocks
    beyond a phase's own only start."""
    t, blocks = matmul_tunables(schedule.as_dict()), split.grid_blocks(product(problem), schedule.as_dict())
    parts = [(count, _of_phase(problem, phase, t, least, operands, target)) for count, phase in phases(problem)]
    return together(parts, blocks, bytes_of(operands[:2]))


def together(parts: list[tuple[int, Work]], blocks: int, dram_bytes: float) -> Work:
    """One launch of `blocks` that does all parts, each so often, the longest first; `dram_bytes` beside those of the
    parts."""

    def all_of(name: str) -> float:
        return float(sum(count * getattr(part, name) for count, part in parts))

    steps = sum(count * part.blocks * part.steps for count, part in parts)
    most = max((work for _, work in parts), key=lambda work: work.steps)
    return replace(
        most, blocks=blocks, steps=max(1, -(-steps // blocks)), longest=most.steps,
        dram_bytes=all_of("dram_bytes") + dram_bytes, fma=all_of("fma"), mma=all_of("mma"),
        other_instructions=all_of("other_instructions"), shared_bytes=all_of("shared_bytes"),
        l2_bytes=all_of("l2_bytes"),
    )  # fmt: skip


def _of_phase(
    problem: Conv2dDgradProblem,
    phase: Phase,
    t: Mapping[str, Any],
    least: Cost,
    operands: tuple[Operand, ...],
    target: Target,
) -> Work:
    """Of one phase; of DRAM what it writes and what its epilogue reads."""
    as_matmul = of_phase(phase, layout_of(problem.layout, pointwise=problem.pointwise))
    written = share(phase, problem, least, operands)
    as_stored = replace(written, bytes_read=written.bytes_read + int(traffic.input_bytes(as_matmul)))
    dy_w_dx = (*_aligns(problem), aligns(problem)[2])
    counts = (tensor_work.work if is_tensor(t) else simt_work.work)(as_matmul, t, dy_w_dx, as_stored, target)
    if phase.taps == 0:
        moved = float(written.bytes_read + written.bytes_written)
        outputs = as_matmul.batch * as_matmul.m * as_matmul.n
        return replace(
            counts, fma=0.0, mma=0.0, other_instructions=8.0 * outputs / dy_w_dx[2], shared_bytes=0.0,
            l2_bytes=moved, dram_bytes=moved, steps=0,
        )  # fmt: skip
    gathered = 0.0
    if not problem.pointwise:
        tiles = traffic.tile_bytes(as_matmul, t) / dtype(problem.dtype).bytes / 2.0
        gathered = forward.GATHER_INSTRUCTIONS * (tiles / dy_w_dx[0] + tiles / dy_w_dx[1])
    return replace(
        counts,
        dram_bytes=counts.dram_bytes - traffic.input_traffic(as_matmul, t, target),
        other_instructions=counts.other_instructions + gathered,
    )


def share(phase: Phase, problem: Conv2dDgradProblem, least: Cost, operands: tuple[Operand, ...]) -> Cost:
    """Of the bytes that the result and the epilogue's tensors take, those of a phase."""
    of_all = phase.rows * phase.columns / (problem.h * problem.w)
    inputs = bytes_of(operands[:2])
    return replace(
        least, bytes_read=int((least.bytes_read - inputs) * of_all), bytes_written=int(least.bytes_written * of_all)
    )


def bytes_of(operands: Iterable[Operand]) -> int:
    """Of all their elements, each once."""
    return sum(operand.elements * dtype(operand.dtype).bytes for operand in operands)


def _input_bytes(problem: Conv2dDgradProblem) -> int:
    """Of dy and w, each once: phases share dy, and taps of a phase its pixels."""
    p = problem
    return dtype(p.dtype).bytes * (p.n * p.p * p.q * p.k + p.k * p.taps)


def _aligns(problem: Conv2dDgradProblem) -> tuple[int, int]:
    return of_product(problem.channels_last, aligns(problem))
