"""A convolution over a ring whose image and filters are split into limbs once, ahead of the implicit product: matrices
of bytes with channels last, a group's in whole vectors of 16 (`codegen/device/conv/channel_planes.cuh`)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from codegen.alignment import round_up
from codegen.counts import LaunchCounts, Primitive, load, merged, store
from codegen.dtypes import dtype
from codegen.operator import Cost, Work
from codegen.operators.convolution import implicit
from codegen.operators.convolution.direct import LARGEST_INDEX
from codegen.operators.convolution.problem import Convolution
from codegen.operators.matmul import counts, limb_planes, limbs, product, split, traffic
from codegen.operators.matmul.kernel_family import Stored
from codegen.operators.matmul.limb_planes import VECTOR
from codegen.operators.matmul.problem import MatmulProblem
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check, check_workspace
from codegen.search.schedule import Schedule
from codegen.targets import Target

# Registers of a pixel's corner, and of the tap and the geometry, as of a gathered image; of planes beside them.
PLANE_REGISTERS = 8
# Instructions for a gathered vector beside those of a copy.
GATHER_INSTRUCTIONS = implicit.GATHER_INSTRUCTIONS


def ahead(t: Mapping[str, Any]) -> bool:
    """Whether this is a schedule of an implicit product of planes."""
    return t.get("algorithm") == "limbs" and limb_planes.ahead(t)


def padded(problem: Convolution, as_product: MatmulProblem) -> MatmulProblem:
    """The product of the planes, whose sums have zeros behind each tap's channels."""
    return as_product.model_copy(update={"k": problem.r * problem.s * round_up(problem.group_channels, VECTOR)})


def of_run(t: Mapping[str, Any]) -> dict[str, Any]:
    """A schedule as matmul's rules and costs read it of the product alone: its planes are there."""
    return {**t, limb_planes.LIMB_SPLIT.name: limb_planes.GIVEN}


def plane_bytes(problem: Convolution) -> int:
    """Of the image and the filters, as in channel_planes.cuh."""
    p = problem
    places = p.n * p.h * p.w * p.groups + p.k * p.r * p.s
    return places * round_up(p.group_channels, VECTOR) * dtype(p.dtype).bytes


def workspace_bytes(problem: Convolution, as_product: MatmulProblem, t: Mapping[str, Any]) -> int:
    return split.partial_bytes(padded(problem, as_product), t) + plane_bytes(problem)


def rules(
    problem: Convolution, as_product: MatmulProblem, t: Mapping[str, Any], target: Target, workspace_limit: int | None
) -> Accepted | Rejected:
    """What an implicit product of planes needs, then matmul's rules for it."""
    p = problem
    if p.depthwise:
        return Rejected("algorithm", f"{p.groups} products with one column each are mostly padding")
    (rows, columns), channels = p.padded, p.groups * round_up(p.group_channels, VECTOR)
    elements = rows * columns * channels * (p.n if p.channels_last else 1)
    broken = check(
        elements <= LARGEST_INDEX,
        "index",
        f"a plane of the image has {elements} bytes with its padding; 32 bits reach {LARGEST_INDEX}",
    ) or check(
        t["truncate"] == "once",
        "limb_split",
        f"tiles of limbs that are split ahead have zeros of their own: truncate = {t['truncate']} is for fused ones",
    )
    if broken:
        return broken
    of_planes, schedule = padded(p, as_product), of_run(t)
    outcome = product.rules(of_planes, (1, 1), Schedule.of(schedule), target, None)
    if isinstance(outcome, Rejected):
        return outcome
    stored = Stored.of(of_planes, (1, 1))
    return (
        implicit.register_rule(registers({"layout": p.layout}, t), t, stored, target)
        or check_workspace(workspace_bytes(p, as_product, t), workspace_limit)
        or ACCEPTED
    )


def registers(s: Mapping[str, Any], t: Mapping[str, Any]) -> int:
    """An estimate of those of a thread that the gather takes: corners of the pixels that it has."""
    outer = t["tile_m"] if s["layout"] == "nhwc" else t["tile_n"]
    pixels: int = max(1, outer * (t["tile_k"] // VECTOR) // limbs.threads(t))
    return implicit.CORNER_REGISTERS * pixels + implicit.TAP_REGISTERS + PLANE_REGISTERS


def launches(
    problem: Convolution, as_product: MatmulProblem, t: Mapping[str, Any], align_out: int, inside: tuple[int, float]
) -> tuple[LaunchCounts, ...]:
    """`inside`: the operand that is gathered, 0 for A, and its share that lies in the image."""
    of_planes, (place, share) = padded(problem, as_product), inside
    asked = list(counts.input_bytes(of_planes, of_run(t)))
    asked[place] = round(asked[place] * share)
    run, *rest = counts.launches(of_planes, of_run(t), (1, 1, align_out), asked)
    multiplications = counts.multiplications(as_product)
    return (_split(problem), replace(run, multiplications=multiplications), *rest)


def _elements(problem: Convolution) -> int:
    return problem.n * problem.h * problem.w * problem.c + problem.k * problem.taps


def _access(problem: Convolution) -> int:
    """Elements of a load of the launch that splits: channels are neighbours where they are last."""
    return implicit.widths(problem, problem.group_channels, 1, 1)[0] if problem.channels_last else 1


def _split(problem: Convolution) -> LaunchCounts:
    size = dtype(problem.dtype).bytes
    parts: Sequence[Primitive] = (
        load(size * _elements(problem), size * _access(problem)),
        store(plane_bytes(problem), VECTOR),
    )
    return LaunchCounts(limb_planes.SPLIT_LIMBS, merged(parts))


def work(
    problem: Convolution, as_product: MatmulProblem, t: Mapping[str, Any], align_out: int, least: Cost, target: Target
) -> Work:
    """Counts for the roofline. The product reads bytes, from the L2 where planes fit there."""
    planes, size = plane_bytes(problem), dtype(problem.dtype).bytes
    beyond = 0 if planes <= traffic.L2_SHARE * target.l2_bytes else planes
    per_element = GATHER_INSTRUCTIONS * size / VECTOR
    of_planes, aligned = padded(problem, as_product), (1, 1, align_out)
    run = implicit.work(of_planes, of_run(t), aligned, least, target, problem.input_bytes, per_element)
    read, items = float(size * _elements(problem)), planes / size / VECTOR
    loads = _elements(problem) / _access(problem)
    turning = VECTOR / 4 * (size // 4) * limbs.TURNING
    split_limbs = traffic.items(
        items,
        instructions=4 * loads + items * (turning + 2 * size),
        l2_bytes=read + planes,
        dram_bytes=read + beyond,
        steps=1,
    )
    return replace(run, dram_bytes=run.dram_bytes - problem.input_bytes + beyond, others=(split_limbs, *run.others))
