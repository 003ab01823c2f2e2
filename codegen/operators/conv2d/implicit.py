"""The convolution as an implicit product: matmul's kernels with an operand that is gathered from the image."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from codegen.dtypes import dtype
from codegen.operator import Cost, Work
from codegen.operators.conv2d.direct import LARGEST_INDEX
from codegen.operators.conv2d.problem import Conv2dProblem
from codegen.operators.conv2d.product import aligns, implicit_schedule, of_product, product, without_static_k
from codegen.operators.convolution import matmul_tunables
from codegen.operators.matmul import simt_rules, simt_space, simt_work, tensor_rules, tensor_space, tensor_work, traffic
from codegen.operators.matmul.kernel_family import is_tensor, on_tensor_cores
from codegen.operators.matmul.problem import MatmulProblem
from codegen.search.joined_space import Kind
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import Tunable
from codegen.targets import Target

ALGORITHM = Tunable(
    "algorithm", ("implicit_gemm",), False, "how the convolution is computed", "implicit_gemm", constant=False
)
# The length of a sum is a run-time argument: its taps are counted, not unrolled.
TENSOR_TUNABLES = (ALGORITHM, *(tunable for tunable in tensor_space.TUNABLES if tunable.name != "static_k"))
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
    return kind_of_product(product(problem), _aligns(problem), target, search)


def kind_of_product(as_matmul: MatmulProblem, aligned: tuple[int, int], target: Target, search: Search) -> Kind:
    """Matmul's levels. `aligned`: elements per access of A and B."""
    if on_tensor_cores(as_matmul, target):
        own, levels = TENSOR_TUNABLES, tensor_space.levels(as_matmul, target, aligned)
        every_way = tensor_space.every_way(target)
    else:
        own, levels, every_way = SIMT_TUNABLES, simt_space.levels(as_matmul, target), simt_space.EVERY_WAY
    ways = {level: division for level, (_, division) in levels.items()}
    if not set(every_way.names).isdisjoint(search.tunables or ()):
        ways[1] = every_way
    return Kind(own, lists_of_product({level: values for level, (values, _) in levels.items()}), ways)


def lists_of_product(levels: Mapping[int, simt_space.Lists]) -> dict[int, simt_space.Lists]:
    """Matmul's value lists as those of an implicit product."""
    return {level: {"algorithm": ("implicit_gemm",), **without_static_k(lists)} for level, lists in levels.items()}


def default(problem: Conv2dProblem, target: Target, admit: Callable[[Schedule], Accepted | Rejected]) -> Schedule:
    """Level 1's first schedule that breaks no rule, in matmul's order of preference."""
    return default_of_product(product(problem), _aligns(problem), _input_bytes(problem), target, admit)


def default_of_product(
    as_matmul: MatmulProblem,
    aligned: tuple[int, int],
    stored_bytes: float,
    target: Target,
    admit: Callable[[Schedule], Accepted | Rejected],
    slices: tuple[int, ...] | None = None,
) -> Schedule:
    """`stored_bytes`: of the convolution's operands; `slices`: of k, the few that seem useful where that is None."""

    def admit_product(schedule: Schedule) -> Accepted | Rejected:
        values = schedule.as_dict()
        constant = values.get("static_k", 0) != 0
        return check(not constant, "static_k", "k is no constant here") or admit(implicit_schedule(values))

    if on_tensor_cores(as_matmul, target):
        schedule = tensor_space.default(as_matmul, target, aligned, admit_product, stored_bytes, slices)
    else:
        schedule = simt_space.default(as_matmul, target, admit_product, slices)
    return implicit_schedule(schedule.as_dict())


def rules(
    problem: Conv2dProblem, schedule: Schedule, target: Target, workspace_limit: int | None
) -> Accepted | Rejected:
    """Matmul's rules for the product, and those of the gather. Every static_assert of gather.cuh is a rule here."""
    t, as_matmul = matmul_tunables(schedule.as_dict()), product(problem)
    if problem.depthwise:
        return Rejected(
            "algorithm", f"{problem.groups} products with one column each are mostly padding: direct computes them"
        )
    if not problem.pointwise and (broken := _gather_rule(problem, t)):
        return broken
    admit = tensor_rules.rules if is_tensor(t) else simt_rules.rules
    outcome = admit(as_matmul, _aligns(problem), Schedule.of(t), target, workspace_limit)
    if isinstance(outcome, Rejected) or problem.pointwise:
        return outcome
    return _register_rule(problem, t, target) or ACCEPTED


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
    """Whether a thread of an implicit product may take as many registers as it needs."""
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
    """What a thread needs beside the gather: the least where the launch bounds limit its registers."""
    if not is_tensor(t):
        return simt_rules.registers(t)
    limited = t["maxnreg"] or t["min_blocks"] > 1
    return tensor_rules.least_registers(t, stored) if limited else tensor_rules.registers(t, stored)


def work(problem: Conv2dProblem, schedule: Schedule, least: Cost, target: Target) -> Work:
    """Matmul's counts for the product: every tap comes from L2, the image from DRAM once."""
    x, _, out = aligns(problem)
    per_access = 0 if problem.pointwise else GATHER_INSTRUCTIONS
    inputs, aligned = _input_bytes(problem), (*_aligns(problem), out)
    return work_of_product(product(problem), schedule, aligned, least, target, inputs, per_access, x)


def work_of_product(
    as_matmul: MatmulProblem,
    schedule: Schedule,
    aligned: tuple[int, int, int],
    least: Cost,
    target: Target,
    stored_bytes: int,
    per_access: int,
    width: int,
) -> Work:
    """`stored_bytes`: of the convolution's operands. A gathered access of `width` elements takes `per_access`
    instructions beside those of a copy."""
    t = matmul_tunables(schedule.as_dict())
    expanded = replace(least, bytes_read=least.bytes_read - stored_bytes + int(traffic.input_bytes(as_matmul)))
    counts = (tensor_work.work if is_tensor(t) else simt_work.work)(as_matmul, t, aligned, expanded, target)
    tiles = traffic.tile_bytes(as_matmul, t) / dtype(as_matmul.dtype).bytes
    return replace(
        counts,
        dram_bytes=counts.dram_bytes - traffic.input_traffic(as_matmul, t, target) + stored_bytes,
        other_instructions=counts.other_instructions + per_access * tiles / 2.0 / width,
    )


def _input_bytes(problem: Conv2dProblem) -> int:
    """Of x and w, each once."""
    return dtype(problem.dtype).bytes * (problem.elements_seen + problem.k * problem.taps)


def _aligns(problem: Conv2dProblem) -> tuple[int, int]:
    return of_product(problem.channels_last, aligns(problem))
