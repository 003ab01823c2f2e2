"""Reduced problems of a kernel's signature: the real Config, alignment class and code path on extents a CPU can run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from codegen.alignment import needs_cuda_cores, widest
from codegen.epilogue import node_of
from codegen.operators.conv2d.problem import AnyNode
from codegen.operators.conv2d.reduced import (
    GEOMETRIES,
    POINTWISE,
    ROOM,
    Geometry,
    filters_to_try,
    image_extent,
    with_channel_bias,
)
from codegen.operators.conv2d_wgrad import direct
from codegen.operators.conv2d_wgrad.problem import Conv2dWgradProblem
from codegen.operators.convolution import matmul_tunables
from codegen.operators.matmul.reduced import reduced_problems as reduced_products

# Output pixels of the problems in turn: images, and rows of each where that is not the square. So a step of a kernel is
# a part of a row, several rows, several images.
PIXELS = ((1, 0), (2, 0), (7, 1), (3, 2))


@dataclass(frozen=True)
class Wish:
    """What a problem should be like, up to its signature's classes. `per_group`: channels; `room`: among how many
    counts of them. `filters` of a group become a multiple of `unit`. `pixels`: products of a sum."""

    images: int
    rows: int
    pixels: int
    groups: int
    per_group: int
    filters: int
    geometry: Geometry
    unit: int = 1
    room: int = ROOM


def reduced_problems(signature: Mapping[str, Any], tunables: Mapping[str, Any]) -> list[Conv2dWgradProblem]:
    """Even, tail tiles, smallest, many tiles: of the product what matmul has, of the geometry another each: padding,
    strides that leave elements unseen, dilation, windows that lie in the padding altogether, several images and
    groups."""
    wishes = _direct(signature, tunables) if tunables["algorithm"] == "direct" else _implicit(signature, tunables)
    return [_granted(signature, wish, chain) for wish, chain in wishes]


def _implicit(s: Mapping[str, Any], t: Mapping[str, Any]) -> Iterator[tuple[Wish, tuple[AnyNode, ...]]]:
    as_matmul = {
        **{name: s[name] for name in ("dtype", "acc_dtype", "out_dtype", "allow_tf32", "epilogue")},
        "layout": "tn" if s["layout"] == "nhwc" else "nn",
        "align_a": s["align_dy"], "align_b": s["align_x"], "align_c": s["align_dw"],
    }  # fmt: skip
    for number, matmul in enumerate(reduced_products(as_matmul, matmul_tunables(t))):
        geometry, (images, rows) = POINTWISE if s["pointwise"] else GEOMETRIES[number], PIXELS[number]
        per_group = max(1, -(-matmul.n // math.prod(geometry.taps[0])))
        wish = Wish(images, rows, matmul.k, matmul.batch, per_group, matmul.m, geometry)
        yield wish, with_channel_bias(matmul.epilogue)


def _direct(s: Mapping[str, Any], t: Mapping[str, Any]) -> Iterator[tuple[Wish, tuple[AnyNode, ...]]]:
    as_product, unit = direct.of_product(t), int(t["filters"])
    chain = with_channel_bias(node_of(part) for part in s["epilogue"])
    # More elements than a thread has; several blocks of filters; less than a block; a few pixels.
    long = max(2, math.isqrt(int(t["elements"])) + 1)
    steps = 7 if t["split"] != "none" else 3
    for number, (blocks, more, step_count, missing) in enumerate(
        ((1, 0, steps, 0), (2, 3, steps, 5), (0, 1, 2, 1), (1, 1, 1, 3))
    ):
        geometry, (images, rows) = POINTWISE if s["pointwise"] else GEOMETRIES[number], PIXELS[number]
        if number == 0 and not s["pointwise"]:
            sizes = ((long, long), (long, long + 1), (long + 1, long + 1), *geometry.taps)
            geometry = Geometry(sizes, (1, 1), (1, 1), ((1, 1), (2, 2)), (0, 0))
        pixels = max(3, step_count * as_product["tile_k"] - missing)
        filters = max(1, blocks * as_product["tile_m"] + more)
        groups = 1 if s["depthwise"] or number == 2 else 3
        yield Wish(images, rows, pixels, groups, 1, -(-filters // groups), geometry, unit, 1), chain


def _granted(s: Mapping[str, Any], wish: Wish, chain: tuple[AnyNode, ...]) -> Conv2dWgradProblem:
    """The problem nearest to the wish that has the signature's classes."""
    g, last, depthwise = wish.geometry, s["layout"] == "nhwc", bool(s["depthwise"])
    quads = needs_cuda_cores(s["dtype"], s["allow_tf32"])

    def fits(operand: str, extent: int) -> bool:
        """Whether this is the operand's class where its rows have that extent."""
        element = s["out_dtype" if operand == "dw" else "dtype"]
        return bool(widest(element, extent, quads=quads) == s[f"align_{operand}"])

    counts = range(wish.per_group, wish.per_group + wish.room)
    r, s_, channels = next(
        (r, c, count)
        for r, c in filters_to_try(g)
        for count in counts
        if fits("dw", r * c * count) and (depthwise or not last or fits("x", count))
    )
    rows = wish.rows or max(1, math.isqrt(-(-wish.pixels // wish.images)))
    columns = -(-wish.pixels // (wish.images * rows))
    rows, columns = (
        max(wanted, 1 + -(-max(0, 1 - image_extent(g, axis, 1, taps)) // g.stride[axis]))
        for axis, (wanted, taps) in enumerate(((rows, r), (columns, s_)))
    )
    if not last:
        sizes = ((p, q) for more in range(ROOM) for p, q in ((rows, columns + more), (rows + 1, columns + more)))
        rows, columns = next((p, q) for p, q in sizes if fits("dy", p * q))
    groups, filters = wish.groups, wish.filters
    if depthwise:
        counts = range(max(2, filters * groups), filters * groups + ROOM)
        groups, filters = next(count for count in counts if not last or (fits("dy", count) and fits("x", count))), 1
    else:
        first = -(-filters // wish.unit) * wish.unit
        filters = next(count for count in range(first, first + 8 * ROOM, wish.unit) if not last or fits("dy", count))
        if filters == channels == 1:
            groups = 1  # else it would be depthwise
    return Conv2dWgradProblem(
        n=wish.images, h=image_extent(g, 0, rows, r), w=image_extent(g, 1, columns, s_), c=groups * channels,
        k=groups * filters, r=r, s=s_, groups=groups, layout=s["layout"], stride=g.stride, dilation=g.dilation,
        padding=g.padding, dtype=s["dtype"], out_dtype=s["out_dtype"], allow_tf32=s["allow_tf32"], epilogue=chain,
    )  # fmt: skip
