"""What a launch of all phases does to the machine: each phase's product or sums, together."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from codegen.dtypes import dtype
from codegen.operator import Cost, Operand, Work
from codegen.operators.conv2d_dgrad.problem import Conv2dDgradProblem
from codegen.operators.conv2d_dgrad.residue_classes import Phase, phases
from codegen.operators.convolution import channel_planes, direct
from codegen.operators.convolution.channel_planes import ChannelPlanes
from codegen.operators.convolution.implicit import GATHER_INSTRUCTIONS, image_product
from codegen.operators.matmul import traffic
from codegen.operators.matmul.problem import Layout
from codegen.operators.matmul.product import family
from codegen.targets import Target

Count = Callable[[Phase, Cost], Work]
"""What one phase does, with the bytes that it writes and that its epilogue reads."""


def together(
    problem: Conv2dDgradProblem, least: Cost, operands: tuple[Operand, ...], blocks: int, count: Count
) -> Work:
    """One launch of `blocks`, the longest first; blocks beyond a phase's own only start. Every tap comes from L2, what
    is read from DRAM once."""
    inputs, parts = sum(operand.bytes for operand in operands[:2]), []
    for number, phase in phases(problem):
        # Of the bytes that the result and the epilogue's tensors take, those of a phase.
        share = phase.rows * phase.columns / (problem.h * problem.w)
        read, written = int((least.bytes_read - inputs) * share), int(least.bytes_written * share)
        parts.append((number, count(phase, replace(least, bytes_read=read, bytes_written=written))))

    def all_of(name: str) -> float:
        return float(sum(number * getattr(part, name) for number, part in parts))

    steps = sum(number * part.blocks * part.steps for number, part in parts)
    most = max((work for _, work in parts), key=lambda work: work.steps)
    return replace(
        most, blocks=blocks, steps=max(1, -(-steps // blocks)), longest=most.steps,
        dram_bytes=all_of("dram_bytes") + inputs, fma=all_of("fma"), mma=all_of("mma"), imad=all_of("imad"),
        other_instructions=all_of("other_instructions"), shared_bytes=all_of("shared_bytes"),
        l2_bytes=all_of("l2_bytes"),
    )  # fmt: skip


def of_product(
    phase: Phase, own: Cost, t: Mapping[str, Any], layout: Layout, aligned: tuple[int, int, int], target: Target, *,
    gathered: bool, planes: ChannelPlanes | None = None,
) -> Work:  # fmt: skip
    """Matmul's counts for a phase's product; of DRAM what it writes and what its epilogue reads. `planes`: of limbs
    that are split ahead."""
    as_matmul = image_product(phase, layout, phase.epilogue)
    if planes is not None:
        as_matmul, t = planes.padded(as_matmul) if phase.taps else as_matmul, channel_planes.of_run(t)
    as_stored = replace(own, bytes_read=own.bytes_read + int(traffic.input_bytes(as_matmul)))
    counts = family(t).work(as_matmul, t, aligned, as_stored, target)
    if phase.taps == 0:
        moved = float(own.bytes_read + own.bytes_written)
        outputs = as_matmul.batch * as_matmul.m * as_matmul.n
        return replace(
            counts, fma=0.0, mma=0.0, imad=0.0, other_instructions=8.0 * outputs / aligned[2], shared_bytes=0.0,
            l2_bytes=moved, dram_bytes=moved, steps=0,
        )  # fmt: skip
    tiles = traffic.tile_bytes(as_matmul, t) / dtype(phase.dtype).bytes / 2.0
    gather = GATHER_INSTRUCTIONS * (tiles / aligned[0] + tiles / aligned[1]) if gathered else 0.0
    if planes is not None:
        gather = 2 * tiles * planes.gather_instructions()
    return replace(
        counts,
        dram_bytes=counts.dram_bytes - traffic.input_traffic(as_matmul, t, target),
        other_instructions=counts.other_instructions + gather,
    )


def of_planes(run: Work, planes: ChannelPlanes, target: Target) -> Work:
    """`run` of planes, behind the launch that splits."""
    inputs = planes.size * sum(planes.elements)
    from_dram = run.dram_bytes - inputs + planes.beyond_l2(target)
    return replace(run, dram_bytes=from_dram, others=(planes.split_work(target), *run.others))


def of_sums(phase: Phase, own: Cost, t: Mapping[str, Any]) -> Work:
    """The counts of conv2d's direct kernel for a phase."""
    counts = direct.work(phase, t, own)
    return counts if phase.taps else replace(counts, l2_bytes=float(own.bytes_read + own.bytes_written))
