"""Reduced problems of a kernel's signature: the real Config, alignment class and code path on extents a CPU can run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from codegen.alignment import needs_cuda_cores, widest
from codegen.epilogue import AnyNode as MatrixNode
from codegen.epilogue import Bias, node_of
from codegen.operators.conv2d import direct
from codegen.operators.conv2d.problem import AnyNode, ChannelBias, Conv2dProblem, Padding
from codegen.operators.conv2d.product import aligns_of, of_product
from codegen.operators.convolution import matmul_tunables
from codegen.operators.matmul.reduced import reduced_problems as reduced_products

# Extents beyond the wished one among which one of the right class is searched.
ROOM = 128


@dataclass(frozen=True)
class Geometry:
    """How windows lie: (along h, along w). `taps` are the filters worth trying, the best first; `beyond` are elements
    at the end of the image that no window reaches."""

    taps: tuple[tuple[int, int], ...]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    padding: Padding
    beyond: tuple[int, int]


# Both axes differ in all of it. None is a product of stored matrices, not even with a filter of one element.
GEOMETRIES = (
    Geometry(((2, 2), (3, 3), (1, 2), (1, 3), (1, 1)), (1, 1), (1, 1), ((1, 1), (1, 1)), (0, 0)),
    Geometry(((3, 2), (3, 3), (2, 1), (1, 3), (1, 1)), (2, 1), (1, 2), ((0, 1), (2, 2)), (1, 0)),
    Geometry(((2, 3), (1, 3), (4, 1), (3, 3), (1, 1)), (3, 2), (2, 1), ((3, 3), (0, 2)), (2, 1)),
    Geometry(((1, 2), (3, 1), (2, 2), (1, 1)), (1, 2), (1, 1), ((0, 0), (1, 0)), (0, 1)),
)
POINTWISE = Geometry(((1, 1),), (1, 1), (1, 1), ((0, 0), (0, 0)), (0, 0))


@dataclass(frozen=True)
class Wish:
    """What a problem should be like, up to its signature's classes. `per_group`: channels. `filters` of a group become
    a multiple of `unit`."""

    images: int
    rows: int
    columns: int
    groups: int
    per_group: int
    filters: int
    geometry: Geometry
    unit: int = 1


def reduced_problems(signature: Mapping[str, Any], tunables: Mapping[str, Any]) -> list[Conv2dProblem]:
    """Even, tail tiles, smallest, many tiles: of the product what matmul has, of the geometry another each: padding,
    strides that leave elements unseen, dilation, windows that lie in the padding altogether, several images and
    groups."""
    wishes = _direct(signature, tunables) if tunables["algorithm"] == "direct" else _implicit(signature, tunables)
    return [_granted(signature, wish, chain) for wish, chain in wishes]


def _implicit(s: Mapping[str, Any], t: Mapping[str, Any]) -> Iterator[tuple[Wish, tuple[AnyNode, ...]]]:
    last, (align_a, align_b) = s["layout"] == "nhwc", of_product(s["layout"] == "nhwc", aligns_of(s))
    as_matmul = {
        **{name: s[name] for name in ("dtype", "acc_dtype", "out_dtype", "allow_tf32", "epilogue")},
        "layout": "nt" if last else "nn", "align_a": align_a, "align_b": align_b, "align_c": s["align_out"],
    }  # fmt: skip
    for number, matmul in enumerate(reduced_products(as_matmul, matmul_tunables(t))):
        geometry = POINTWISE if s["pointwise"] else GEOMETRIES[number]
        images = 1 if number == 0 else 2
        if last:
            groups, pixels, filters = matmul.batch, -(-matmul.m // images), matmul.n
        else:
            images = matmul.batch if s["pointwise"] else images
            groups, pixels, filters = (
                (1 if s["pointwise"] else matmul.batch),
                matmul.n,
                matmul.m,
            )
        rows = max(1, math.isqrt(pixels) if number else pixels // 8)
        taps = math.prod(geometry.taps[0])
        per_group = max(1, -(-matmul.k // taps))
        chain = with_channel_bias(matmul.epilogue)
        yield Wish(images, rows, -(-pixels // rows), groups, per_group, filters, geometry), chain


def _direct(s: Mapping[str, Any], t: Mapping[str, Any]) -> Iterator[tuple[Wish, tuple[AnyNode, ...]]]:
    pixels, filters = direct.block(t)
    taps, unit = int(t["taps"]), int(t["filters"])
    chain = with_channel_bias(node_of(part) for part in s["epilogue"])
    # More taps than come at once; blocks along both axes; less than a block.
    long = max(2, math.isqrt(taps) + 1)
    for number, (images, blocks, more, groups) in enumerate(((1, 1, 0, 1), (2, 2, 3, 3), (1, 0, 0, 2), (3, 1, 1, 1))):
        geometry = POINTWISE if s["pointwise"] else GEOMETRIES[number]
        if number == 0 and not s["pointwise"]:
            sizes = ((long, long), (long, long + 1), (long + 1, long + 1), *geometry.taps)
            geometry = Geometry(sizes, (1, 1), (1, 1), ((1, 1), (2, 2)), (0, 0))
        if s["pointwise"] and s["layout"] == "nchw":
            groups = 1  # with groups it is no product of stored matrices there
        per_image = max(3, (blocks * pixels + more) // images)
        rows = max(1, math.isqrt(per_image))
        columns = -(-per_image // rows)
        if window := int(t["window"]):
            of_filter = taps // window + 1 if number == 0 else geometry.taps[0][0]
            geometry = _of_window(GEOMETRIES[number], window, of_filter)
            columns = strip_columns(int(t["pixels"]))[number]
            rows = -(-per_image // columns)
        per_group = 1 if number else max(1, taps // math.prod(geometry.taps[0]))
        wanted = max(1, blocks * filters + more) if groups == 1 or s["depthwise"] else unit
        yield Wish(images, rows, columns, groups, per_group, wanted, geometry, unit), chain


def strip_columns(pixels: int) -> tuple[int, int, int, int]:
    """Columns of the outputs where so many neighbouring pixels are of a thread: one whole strip, a second of one
    pixel, and strips that are not full."""
    return pixels, pixels + 1, 1, max(1, pixels - 1)


def _of_window(geometry: Geometry, window: int, rows: int) -> Geometry:
    """With windows of `window` columns next to each other, and of `rows` rows, or as many more as the class takes."""
    g, taps = geometry, tuple((count, window) for count in range(rows, rows + 8))
    return Geometry(taps, (g.stride[0], 1), (g.dilation[0], 1), g.padding, (g.beyond[0], 0))


def _granted(s: Mapping[str, Any], wish: Wish, chain: tuple[AnyNode, ...]) -> Conv2dProblem:
    """The problem nearest to the wish that has the signature's classes."""
    g, last, depthwise = wish.geometry, s["layout"] == "nhwc", bool(s["depthwise"])
    quads = needs_cuda_cores(s["dtype"], s["allow_tf32"])

    def is_x(extent: int) -> bool:
        return widest(s["dtype"], extent, quads=quads) == int(s["align_x"])

    def is_out(extent: int) -> bool:
        return widest(s["out_dtype"], extent, quads=quads) == int(s["align_out"])

    counts = range(1, 2) if depthwise else range(wish.per_group, wish.per_group + ROOM)
    r, s_, channels = next(
        (r, c, count)
        for r, c in filters_to_try(g)
        for count in counts
        if widest(s["dtype"], r * c * count, quads=quads) == s["align_w"] and (depthwise or not last or is_x(count))
    )
    rows, columns = (
        max(wanted, 1 + -(-max(0, 1 - image_extent(g, axis, 1, taps)) // g.stride[axis]))
        for axis, (wanted, taps) in enumerate(((wish.rows, r), (wish.columns, s_)))
    )
    if not last:
        rows, columns = next(
            (p, q)
            for more in range(ROOM)
            for p, q in ((rows, columns + more), (rows + 1, columns + more))
            if is_out(p * q) and (not s["pointwise"] or is_x(p * q))
        )
    groups, filters = wish.groups, wish.filters
    if depthwise:
        counts = range(max(2, filters), filters + ROOM)
        groups, filters = next(count for count in counts if not last or (is_x(count) and is_out(count))), 1
    else:
        if last and widest(s["out_dtype"], wish.unit, quads=quads) > int(s["align_out"]):
            groups = 1  # whole threads in each group are of a wider class
        unit = wish.unit if groups > 1 else 1
        counts = range(-(-filters // unit) * unit, filters + 8 * ROOM, unit)
        filters = next(count for count in counts if not last or is_out(count))
        if filters == channels == 1:
            groups = 1  # else it would be depthwise
    return Conv2dProblem(
        n=wish.images, h=image_extent(g, 0, rows, r), w=image_extent(g, 1, columns, s_), c=groups * channels,
        k=groups * filters, r=r, s=s_, groups=groups, layout=s["layout"], stride=g.stride, dilation=g.dilation,
        padding=g.padding, dtype=s["dtype"], out_dtype=s["out_dtype"], allow_tf32=s["allow_tf32"], epilogue=chain,
    )  # fmt: skip


def image_extent(g: Geometry, axis: int, outputs: int, taps: int) -> int:
    """The image's extent that gives so many outputs; below 1 where there is none."""
    window = g.dilation[axis] * (taps - 1) + 1
    return (outputs - 1) * g.stride[axis] + window - sum(g.padding[axis]) + g.beyond[axis]


def with_channel_bias(chain: Iterable[MatrixNode]) -> tuple[AnyNode, ...]:
    """A bias along an axis of the matrix of outputs is one of the channels."""
    return tuple(ChannelBias() if isinstance(node, Bias) else node for node in chain)


def filters_to_try(geometry: Geometry) -> Iterator[tuple[int, int]]:
    """The geometry's own, then those of any other class."""
    yield from geometry.taps
    if geometry is not POINTWISE:
        yield from ((r, s) for r, s in product(range(1, 9), range(1, 9)) if r * s > 1)
