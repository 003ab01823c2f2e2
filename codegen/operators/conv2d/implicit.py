"""The convolution as an implicit product: matmul's kernels with an operand that is gathered from the image."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from codegen.dtypes import dtype
from codegen.joined_space import Kind
from codegen.operator import Cost, Work
from codegen.operators.conv2d.direct import LARGEST_INDEX
from codegen.operators.conv2d.problem import Conv2dProblem
from codegen.operators.conv2d.product import (
    aligns,
    implicit_schedule,
    matmul_tunables,
    of_product,
    product,
    without_static_k,
)
from codegen.operators.matmul import simt_rules, simt_space, simt_work, tensor_rules, tensor_space, tensor_work, traffic
from codegen.operators.matmul.path import is_tensor, on_tensor_cores
from codegen.rules import ACCEPTED, Accepted, Rejected, check
from codegen.schedule import Schedule
from codegen.search import Search
from codegen.search_space import Linked, Tunable
from codegen.targets import Target

ALGORITHM = Tunable("algorithm", ("implicit_gemm",), False, "how the convolution is computed")
# The length of a sum is a run-time argument: its taps are counted, not unrolled.
TENSOR_TUNABLES = (ALGORITHM, *(one for one in tensor_space.TUNABLES if one.name != "static_k"))
SIMT_TUNABLES = (ALGORITHM, *simt_space.TUNABLES)


# Registers of a pixel's corner, and of the tap and the geometry; with channels first of all of them. Of 27 tensor-core
# kernels within 12 registers of what they may take (ptxas 13.2, sm_90a, all types, 2 to 16 bytes at once) none spills.
CORNER_REGISTERS, TAP_REGISTERS, COLUMN_REGISTERS = 2, 2, 15
# Instructions for a gathered vector beside those of a copy: its corner, two checks, its address.
GATHER_INSTRUCTIONS = 9


def tunables(problem: Conv2dProblem, target: Target) -> tuple[Tunable, ...]:
    """Those of the kernel that computes the product on the target."""
    return TENSOR_TUNABLES if on_tensor_cores(product(problem), target) else SIMT_TUNABLES


def kind(problem: Conv2dProblem, target: Target, search: Search) -> Kind:
    """What searches try."""
    own, as_matmul = tunables(problem, target), product(problem)
    if own is TENSOR_TUNABLES:
        found = tensor_space.levels(as_matmul, target, _aligns(problem))
        every_way = tensor_space.every_way(target)
    else:
        found, every_way = simt_space.levels(as_matmul, target), simt_space.EVERY_WAY
    lists = {
        level: {"algorithm": ("implicit_gemm",), **without_static_k(values)} for level, (values, _) in found.items()
    }
    ways: dict[int, Linked] = {level: division for level, (_, division) in found.items()}
    if not set(every_way.names).isdisjoint(search.tunables or ()):
        ways[1] = every_way
    return Kind(own, lists, ways)


def default(problem: Conv2dProblem, target: Target, judge: Callable[[Schedule], Accepted | Rejected]) -> Schedule:
    """Level 1's first schedule that breaks no rule, in matmul's order of preference."""

    def judge_product(schedule: Schedule) -> Accepted | Rejected:
        values = schedule.as_dict()
        constant = values.get("static_k", 0) != 0
        return check(not constant, "static_k", "k is no constant here") or judge(implicit_schedule(values))

    as_matmul = product(problem)
    if on_tensor_cores(as_matmul, target):
        found = tensor_space.default(as_matmul, target, _aligns(problem), judge_product, _input_bytes(problem))
        return implicit_schedule(found.as_dict())
    return implicit_schedule(simt_space.default(as_matmul, target, judge_product).as_dict())


def rules(
    problem: Conv2dProblem, schedule: Schedule, target: Target, workspace_limit: int | None
) -> Accepted | Rejected:
    """Matmul's rules for the product, and those of the gather. Every static_assert of gather.cuh is a rule here."""
    t, as_matmul = matmul_tunables(schedule.as_dict()), product(problem)
    if problem.depthwise:
        return Rejected(
            "algorithm", f"{problem.groups} products with one column each are mostly padding: direct computes them"
        )
    judge = tensor_rules.rules if is_tensor(t) else simt_rules.rules
    if problem.pointwise:
        return judge(as_matmul, _aligns(problem), Schedule.of(t), target, workspace_limit)
    if broken := _gather_rule(problem, t):
        return broken
    found = judge(as_matmul, _aligns(problem), Schedule.of(t), target, workspace_limit)
    return found if isinstance(found, Rejected) else _register_rule(problem, t, target) or ACCEPTED


def _gather_rule(problem: Conv2dProblem, t: Mapping[str, Any]) -> Rejected | None:
    count, x = threads(t), aligns(problem)[0]
    if problem.channels_last:
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


def _register_rule(problem: Conv2dProblem, t: Mapping[str, Any], target: Target) -> Rejected | None:
    alone = product_registers(t, tensor_rules.Stored.of(product(problem), _aligns(problem)))
    return register_rule(registers(t, problem.channels_last, aligns(problem), alone), t, target)


def register_rule(wanted: int, t: Mapping[str, Any], target: Target) -> Rejected | None:
    """Whether a thread of an implicit product may take as many registers as it wants."""
    allowed = tensor_rules.launch_bounds(t).registers(target) if is_tensor(t) else target.registers_per_thread
    limit = min(allowed, target.registers_per_sm // (threads(t) * t["min_blocks"]))
    return check(
        wanted <= limit, "registers", f"about {wanted} registers per thread with the gather; {limit} are allowed"
    )


def index_rule(problem: Conv2dProblem, *, whole: bool) -> Rejected | None:
    """What a kernel reaches with 32 bits, as `reached` in kernel.cuh. `whole`: of all images, not of one product's."""
    p = problem
    rows, columns = p.padded
    elements = rows * columns * (p.n * p.c if whole else p.group_channels)
    return check(
        elements <= LARGEST_INDEX,
        "index",
        f"the image has {elements} elements with its padding; 32 bits reach {LARGEST_INDEX}",
    )


def threads(t: Mapping[str, Any]) -> int:
    """Threads of a block."""
    return tensor_rules.threads(t) if is_tensor(t) else simt_rules.threads(t)


def registers(t: Mapping[str, Any], channels_last: bool, x_w_out: tuple[int, int, int], of_product_alone: int) -> int:
    """An estimate of a thread's registers where the image is gathered."""
    if not channels_last:
        return of_product_alone + COLUMN_REGISTERS
    corners: int = -(-t["tile_m"] * t["tile_k"] // (threads(t) * x_w_out[0]))
    return of_product_alone + CORNER_REGISTERS * corners + TAP_REGISTERS


def product_registers(t: Mapping[str, Any], stored: tensor_rules.Stored) -> int:
    """What a thread needs beside the gather; where it is told how many it may take, with that it manages."""
    if not is_tensor(t):
        return simt_rules.registers(t)
    told = t["maxnreg"] or t["min_blocks"] > 1
    return tensor_rules.least_registers(t, stored) if told else tensor_rules.registers(t, stored)


def work(problem: Conv2dProblem, schedule: Schedule, least: Cost, target: Target) -> Work:
    """Matmul's counts for the product: the L2 is asked for every tap, the DRAM for the image once."""
    t, as_matmul = matmul_tunables(schedule.as_dict()), product(problem)
    inputs = _input_bytes(problem)
    expanded = replace(least, bytes_read=least.bytes_read - inputs + int(traffic.input_bytes(as_matmul)))
    x_w_out = (*_aligns(problem), aligns(problem)[2])
    found = (tensor_work.work if is_tensor(t) else simt_work.work)(as_matmul, t, x_w_out, expanded, target)
    gathered = 0.0
    if not problem.pointwise:
        tiles = traffic.tile_bytes(as_matmul, t) / dtype(problem.dtype).bytes
        gathered = GATHER_INSTRUCTIONS * tiles / 2.0 / aligns(problem)[0]
    return replace(
        found,
        dram_bytes=found.dram_bytes - traffic.input_traffic(as_matmul, t, target) + inputs,
        other_instructions=found.other_instructions + gathered,
    )


def _input_bytes(problem: Conv2dProblem) -> int:
    """Of x and w, each once."""
    return dtype(problem.dtype).bytes * (problem.elements_seen + problem.k * problem.taps)


def _aligns(problem: Conv2dProblem) -> tuple[int, int]:
    return of_product(problem.channels_last, aligns(problem))
