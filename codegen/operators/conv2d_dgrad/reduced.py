"""Reduced problems of a kernel's signature: the real Config, alignment class and code path on extents a CPU can run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from codegen.alignment import needs_cuda_cores, widest
from codegen.epilogue import node_of
from codegen.operators.conv2d import direct
from codegen.operators.conv2d.problem import Padding
from codegen.operators.conv2d.product import aligns_of, of_product
from codegen.operators.conv2d.reduced import ROOM, strip_columns
from codegen.operators.conv2d_dgrad.problem import AnyNode, Conv2dDgradProblem
from codegen.operators.conv2d_dgrad.product import layout_of
from codegen.operators.convolution import matmul_tunables
from codegen.operators.matmul.reduced import reduced_problems as reduced_products


@dataclass(frozen=True)
class Geometry:
    """How windows lie: (along h, along w)."""

    taps: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    padding: Padding


# Both axes differ in nearly all of it. None is a product of stored matrices.
GEOMETRIES = (
    Geometry((2, 2), (1, 1), (1, 1), ((1, 1), (1, 1))),
    Geometry((3, 2), (1, 1), (1, 2), ((0, 1), (2, 2))),
    Geometry((2, 3), (1, 1), (2, 1), ((3, 3), (0, 2))),
    Geometry((1, 2), (1, 1), (1, 1), ((0, 0), (1, 0))),
)
# Taps that the stride does not divide, a stride that has a divisor in common with the dilation (some phases then have
# no taps), fewer taps than the stride, windows that lie in the padding altogether.
STRIDED = (
    Geometry((3, 3), (2, 1), (1, 1), ((1, 1), (1, 1))),
    Geometry((3, 4), (1, 2), (2, 2), ((0, 1), (2, 2))),
    Geometry((4, 1), (3, 2), (2, 1), ((3, 3), (0, 2))),
    Geometry((3, 3), (2, 2), (1, 3), ((4, 4), (1, 0))),
)
POINTWISE = Geometry((1, 1), (1, 1), (1, 1), ((0, 0), (0, 0)))


@dataclass(frozen=True)
class Wish:
    """What a problem should be like, up to its signature's classes: extents of dx, channels and filters of a group.
    `channels` become a multiple of `unit`."""

    images: int
    rows: int
    columns: int
    groups: int
    channels: int
    filters: int
    geometry: Geometry
    unit: int = 1


def reduced_problems(signature: Mapping[str, Any], tunables: Mapping[str, Any]) -> list[Conv2dDgradProblem]:
    """Even, tail tiles, smallest, many tiles: of the product what matmul has, of the geometry another each."""
    wishes = _direct(signature, tunables) if tunables["algorithm"] == "direct" else _implicit(signature, tunables)
    chain = tuple(node_of(part) for part in signature["epilogue"])
    return [_granted(signature, wish, chain) for wish in wishes]  # type: ignore[arg-type]


def _implicit(s: Mapping[str, Any], t: Mapping[str, Any]) -> Iterator[Wish]:
    last, (align_a, align_b) = s["layout"] == "nhwc", of_product(s["layout"] == "nhwc", aligns_of(s))
    as_matmul = {
        **{name: s[name] for name in ("dtype", "acc_dtype", "out_dtype", "allow_tf32", "epilogue")},
        "layout": layout_of(s["layout"], pointwise=s["pointwise"]),
        "align_a": align_a, "align_b": align_b, "align_c": s["align_out"],
    }  # fmt: skip
    for number, matmul in enumerate(reduced_products(as_matmul, matmul_tunables(t))):
        geometry = _geometry(s, number)
        images = 1 if number == 0 else 2
        if last:
            groups, pixels, channels = matmul.batch, -(-matmul.m // images), matmul.n
        else:
            images = matmul.batch if s["pointwise"] else images
            groups, pixels, channels = (
                (1 if s["pointwise"] else matmul.batch),
                matmul.n,
                matmul.m,
            )
        # The pixels of a phase, of which even kernels have as many as matmul's and the others as many in all.
        rows = max(1, math.isqrt(pixels) if number else pixels // 8)
        columns = -(-pixels // rows)
        if number == 0:
            rows, columns = rows * geometry.stride[0], columns * geometry.stride[1]
        taps_h, taps_w = (
            -(-taps // (step // math.gcd(step, apart)))
            for taps, step, apart in zip(geometry.taps, geometry.stride, geometry.dilation, strict=True)
        )
        yield Wish(images, rows, columns, groups, channels, max(1, -(-matmul.k // (taps_h * taps_w))), geometry)


def _direct(s: Mapping[str, Any], t: Mapping[str, Any]) -> Iterator[Wish]:
    pixels, channels = direct.block(t)
    taps, unit = int(t["taps"]), int(t["filters"])
    # More taps than come at once; blocks along both axes; less than a block.
    long = max(2, math.isqrt(taps) + 1)
    for number, (images, blocks, more, groups) in enumerate(((1, 1, 0, 1), (2, 2, 3, 3), (1, 0, 0, 2), (3, 1, 1, 1))):
        geometry = _geometry(s, number)
        if number == 0 and not s["pointwise"]:
            size = (long * geometry.stride[0], long * geometry.stride[1])
            geometry = Geometry(size, geometry.stride, (1, 1), ((1, 1), (2, 2)))
        if s["pointwise"] and s["layout"] == "nchw":
            groups = 1  # with groups it is no product of stored matrices there
        per_image = max(3, (blocks * pixels + more) // images)
        rows = max(1, math.isqrt(per_image))
        filters = taps // math.prod(geometry.taps) if number == 0 else 2 if number == 1 else 1
        wanted = max(1, blocks * channels + more) if groups == 1 or s["depthwise"] else unit
        columns = -(-per_image // rows) * (geometry.stride[1] if number == 1 else 1)
        if window := int(t["window"]):
            geometry = _of_window(geometry, window, number, strided=s["strided"])
            columns = strip_columns(int(t["pixels"]))[number]
            rows = -(-per_image // columns) * (geometry.stride[0] if number == 1 else 1)
        yield Wish(images, rows, columns, groups, wanted, max(1, filters), geometry, unit)


def _of_window(geometry: Geometry, window: int, number: int, *, strided: bool) -> Geometry:
    """With windows of `window` columns next to each other, and padding that leaves an output to every dx."""
    g = geometry
    left = window - 1 if number == 1 else window // 2
    return Geometry(
        (g.taps[0], window),
        (max(2 if strided else 1, g.stride[0]), 1),
        (g.dilation[0], 1),
        (g.padding[0], (left, left + (number == 3))),
    )


def _geometry(s: Mapping[str, Any], number: int) -> Geometry:
    return POINTWISE if s["pointwise"] else (STRIDED if s["strided"] else GEOMETRIES)[number]


def _granted(s: Mapping[str, Any], wish: Wish, chain: tuple[AnyNode, ...]) -> Conv2dDgradProblem:
    """The problem nearest to the wish that has the signature's classes."""
    g, last, depthwise = wish.geometry, s["layout"] == "nhwc", bool(s["depthwise"])
    quads = needs_cuda_cores(s["dtype"], s["allow_tf32"])

    def width(operand: str, extent: int) -> int:
        return widest(s["out_dtype" if operand == "out" else "dtype"], extent, quads=quads)

    def is_of(operand: str, extent: int) -> bool:
        return width(operand, extent) == int(s[f"align_{operand}"])

    # A window must fit, and no phase be left out.
    rows, columns = (
        max(wanted, apart * (taps - 1) + 1 - sum(padding), step + 1 if step > 1 else 1)
        for wanted, taps, step, apart, padding in zip(
            (wish.rows, wish.columns), g.taps, g.stride, g.dilation, g.padding, strict=True
        )
    )
    if not last and not s["strided"]:
        rows, columns = next(
            (h, w)
            for more in range(ROOM)
            for h, w in ((rows, columns + more), (rows + 1, columns + more))
            if is_of("out", h * w) and (not s["pointwise"] or is_of("x", h * w))
        )
    groups, channels, filters = wish.groups, wish.channels, wish.filters
    if depthwise:
        counts = range(max(2, channels), channels + ROOM)
        groups, channels, filters = next(c for c in counts if not last or (is_of("x", c) and is_of("out", c))), 1, 1
    else:
        if last and any(width(operand, wish.unit) > int(s[f"align_{operand}"]) for operand in ("w", "out")):
            groups = 1  # whole threads in each group are of a wider class
        unit = wish.unit if groups > 1 else 1
        counts = range(-(-channels // unit) * unit, channels + 8 * ROOM, unit)
        channels = next(c for c in counts if _has_channels(s, c, is_of))
        filters = next(k for k in range(filters, filters + ROOM) if not last or is_of("x", k))
        if filters == channels == 1:
            groups = 1  # else it would be depthwise
    return Conv2dDgradProblem(
        n=wish.images, h=rows, w=columns, c=groups * channels, k=groups * filters, r=g.taps[0], s=g.taps[1],
        groups=groups, layout=s["layout"], stride=g.stride, dilation=g.dilation, padding=g.padding, dtype=s["dtype"],
        out_dtype=s["out_dtype"], allow_tf32=s["allow_tf32"], epilogue=chain,
    )  # fmt: skip


def _has_channels(s: Mapping[str, Any], channels: int, is_of: Any) -> bool:
    """Whether so many channels of a group have the classes of the filters and, where they are last, of dx."""
    if s["layout"] == "nhwc":
        return bool(is_of("w", channels) and is_of("out", channels))
    return not s["pointwise"] or bool(is_of("w", channels))
