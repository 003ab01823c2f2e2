"""What a schedule of Winograd does to the machine: the product, and the transforms around it."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from codegen.counts import LaunchCounts, Primitive, load, merged, store
from codegen.dtypes import dtype
from codegen.operator import Cost, Work
from codegen.operators.convolution import winograd
from codegen.operators.convolution.problem import AllowsWinograd, windows_inside
from codegen.operators.matmul import counts, limb_planes, traffic
from codegen.operators.matmul.kernel_family import is_tensor
from codegen.operators.matmul.product import family
from codegen.operators.matmul.tensor import fragment_bytes, rounding
from codegen.search.schedule import Schedule
from codegen.targets import Target

# Additions and multiplications of a transform of one tile along both axes (passes times operations of a pass, as
# winograd.cuh has them), by output_tile: of the image, of a filter, of the sums.
IMAGE_OPERATIONS = {2: 8 * 4, 4: 12 * 16}
FILTER_OPERATIONS = {2: 7 * 6 + 16, 4: 9 * 12 + 36}
INVERSE_OPERATIONS = {2: 6 * 4, 4: 10 * 12}
# Of a word of limbs: an exchange between lanes, three choices and two permutations (`store_planes` in
# winograd_planes.cuh).
EXCHANGE_INSTRUCTIONS = 6.0
# Of an image with channels first, threads of neighbouring channels read sectors of which each has half, beside the
# next tile's.
SPARSE_SECTORS = 2.0
# Instructions of an element that is loaded and of one that is stored: its address, its check, its conversion.
LOAD_INSTRUCTIONS, STORE_INSTRUCTIONS = 5.0, 3.0
WORD_BYTES = 4  # of a store of limbs


def work(problem: AllowsWinograd, schedule: Schedule, least: Cost, target: Target) -> Work:
    """Counts for the roofline. What a launch has written the next one finds in the L2, where it fits there."""
    t = winograd.as_matmul(schedule.as_dict())
    outputs = int(t["output_tile"])
    as_product, parts = winograd.product(problem, outputs), winograd.workspace_parts(problem, t)
    aligned = winograd.product_aligns(problem.dtype, problem.allow_tf32)
    image, filters, sums = parts
    alone = Cost(0, image + filters, sums, 1, 0)
    count = family(t).work
    run = count(as_product, t, aligned, alone, target)
    if as_product.dtype == "float32" and is_tensor(t):  # the transforms have rounded
        once = rounding(as_product, fragment_bytes(as_product, t))
        run = replace(run, other_instructions=run.other_instructions - once)
    moved = traffic.input_traffic(as_product, t, target)
    from_dram = moved * (image * _beyond_l2(image, target) + filters * _beyond_l2(filters, target)) / (image + filters)
    return replace(
        run,
        dram_bytes=from_dram + sums * _beyond_l2(sums, target),
        others=(
            _filters(problem, t, filters, target),
            _image(problem, t, image, target),
            _inverse(problem, t, sums, least, target),
        ),
    )


def _beyond_l2(moved: int, target: Target) -> float:
    return 0.0 if moved <= traffic.L2_SHARE * target.l2_bytes else 1.0


def _store_instructions(problem: AllowsWinograd, t: Mapping[str, Any]) -> float:
    """Of an element at one place; a store of limbs has those of four."""
    if not limb_planes.ahead(t):
        return STORE_INSTRUCTIONS
    count = _element_bytes(problem, t)
    return math.ceil(count / WORD_BYTES) * EXCHANGE_INSTRUCTIONS + count / WORD_BYTES * STORE_INSTRUCTIONS


def _element_bytes(problem: AllowsWinograd, t: Mapping[str, Any]) -> int:
    """Of a transformed number in the workspace."""
    return limb_planes.element_bytes(winograd.product(problem, int(t["output_tile"])), t)


def _filters(problem: AllowsWinograd, t: Mapping[str, Any], written: int, target: Target) -> Work:
    outputs = int(t["output_tile"])
    size, places = _element_bytes(problem, t), winograd.places(outputs)
    items, read = written / (size * places), float(dtype(problem.dtype).bytes * problem.k * problem.taps)
    stores = places * _store_instructions(problem, t)
    return traffic.items(
        items,
        instructions=items * (9 * LOAD_INSTRUCTIONS + stores + FILTER_OPERATIONS[outputs]),
        l2_bytes=read + written,
        dram_bytes=read + written * _beyond_l2(written, target),
        steps=1,
    )


def _image(problem: AllowsWinograd, t: Mapping[str, Any], written: int, target: Target) -> Work:
    """Tiles overlap: what L1 has not kept of the neighbours comes from the L2."""
    outputs = int(t["output_tile"])
    size, places, (width, _) = _element_bytes(problem, t), winograd.places(outputs), winograd.widths_of(problem, t)
    items = written / (size * places * width)
    read = float(dtype(problem.dtype).bytes * problem.elements_seen)
    stores = _store_instructions(problem, t)
    per_item = places * (LOAD_INSTRUCTIONS + stores + width) + IMAGE_OPERATIONS[outputs] * width
    sparse = SPARSE_SECTORS if limb_planes.ahead(t) and not problem.channels_last else 1.0
    return traffic.items(
        items,
        instructions=items * per_item,
        l2_bytes=sparse * read * places / outputs**2 + written,
        dram_bytes=read + written * _beyond_l2(written, target),
        steps=1,
    )


def _inverse(problem: AllowsWinograd, t: Mapping[str, Any], sums: int, least: Cost, target: Target) -> Work:
    """`least`: the problem's cost, of which out and what the epilogue reads are this launch's."""
    outputs, (_, width) = int(t["output_tile"]), winograd.widths_of(problem, t)
    places = winograd.places(outputs)
    items = float(winograd.tiles(problem, outputs) * problem.k / width)
    sum_bytes = dtype(winograd.product(problem, outputs).acc_dtype).bytes
    read = float(sum_bytes) * places * items * width
    stored = float(least.bytes_written + least.bytes_read - problem.input_bytes)
    per_value = STORE_INSTRUCTIONS + 2.0 * len(problem.epilogue)
    per_item = places * LOAD_INSTRUCTIONS + width * (INVERSE_OPERATIONS[outputs] + outputs**2 * per_value)
    return traffic.items(
        items,
        instructions=items * per_item,
        l2_bytes=read + stored,
        dram_bytes=read * _beyond_l2(sums, target) + stored,
        steps=1,
    )


def launches(problem: AllowsWinograd, schedule: Schedule) -> tuple[LaunchCounts, ...]:
    """What each launch does, in their order."""
    p, t = problem, winograd.as_matmul(schedule.as_dict())
    outputs = int(t["output_tile"])
    as_product, (image, filters, _) = winograd.product(p, outputs), winograd.workspace_parts(p, t)
    aligned = winograd.product_aligns(p.dtype, p.allow_tf32)
    places, read = winograd.places(outputs), dtype(p.dtype).bytes
    sums, (wide_in, wide_out) = dtype(as_product.acc_dtype).bytes, winograd.widths_of(p, t)
    size = WORD_BYTES if limb_planes.ahead(t) else dtype(as_product.dtype).bytes
    run = counts.launches(as_product, t, aligned)[-1]  # in front of it matmul would split limbs, as the transforms do
    # Tiles overlap, and reach beyond the image.
    rows, columns = (
        windows_inside(-(-extent // outputs), outputs, p.corner[axis], outputs + 2, 1, of_image)
        for axis, (extent, of_image) in enumerate(((p.p, p.h), (p.q, p.w)))
    )
    results, tiles, out = p.pixels * p.k, winograd.tiles(p, outputs), dtype(p.out_dtype).bytes
    epilogue = [
        *counts.epilogue_reads(p.epilogue, p.out_dtype, results, wide_out),
        *counts.epilogue_products(p, results, truncated=results),
    ]
    return (
        replace(
            _counted("transform_filters", load(read * p.k * p.taps, read), store(filters, size)),
            once_for=winograd.FILTERS,
        ),
        _counted(
            "transform_image", load(read * p.n * rows * columns * p.c, read * wide_in), store(image, size * wide_in)
        ),
        replace(run, multiplications=places * tiles * p.k * p.c),
        _counted(
            "inverse",
            load(sums * places * tiles * p.k, sums * min(4, wide_out)),
            *epilogue,
            store(out * results, out * wide_out),
        ),
    )


def _counted(function: str, *parts: Primitive) -> LaunchCounts:
    return LaunchCounts(function, merged(parts))
