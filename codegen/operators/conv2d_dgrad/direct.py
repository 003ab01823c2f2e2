"""Phases without a product: conv2d's direct kernel, once for each of them."""

from __future__ import annotations

from dataclasses import replace

from codegen.operator import Cost, Operand, Work
from codegen.operators.conv2d import direct as forward
from codegen.operators.conv2d_dgrad.implicit import bytes_of, share, together
from codegen.operators.conv2d_dgrad.problem import Conv2dDgradProblem
from codegen.operators.conv2d_dgrad.residue_classes import count, largest, phases
from codegen.search.rules import Accepted, Rejected, check
from codegen.search.schedule import Schedule
from codegen.targets import Target


def worth(problem: Conv2dDgradProblem) -> bool:
    """Whether a search by level tries it: where a product would be mostly padding, of taps or of columns."""
    return min(problem.group_channels, problem.group_filters) <= forward.MOST_CHANNELS


def rules(problem: Conv2dDgradProblem, schedule: Schedule, target: Target) -> Accepted | Rejected:
    """The forward kernel's rules for the largest phase, and a grid for all of them."""
    of_phase, times, t = largest(problem), count(problem), schedule.as_dict()
    across, _ = forward.blocks(of_phase, t)
    return (
        forward.window_rule(problem, t)
        or check(
            across * times <= forward.LARGEST_INDEX,
            "grid",
            f"{times} phases of {across} blocks; a launch has at most {forward.LARGEST_INDEX}",
        )
        or forward.rules(of_phase, schedule, target)
    )


def work(
    problem: Conv2dDgradProblem, schedule: Schedule, least: Cost, operands: tuple[Operand, ...], target: Target
) -> Work:
    """The forward kernel's counts for each phase, together."""
    t = schedule.as_dict()
    across, down = forward.blocks(largest(problem), t)
    parts = []
    for number, phase in phases(problem):
        written = share(phase, problem, least, operands)
        counts = forward.work(phase, t, written, target)
        if phase.taps == 0:
            counts = replace(counts, l2_bytes=float(written.bytes_read + written.bytes_written))
        parts.append((number, counts))
    return together(parts, across * down * count(problem), bytes_of(operands[:2]))
