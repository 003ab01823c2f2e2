"""Reduced problems of a kernel's signature: what is wished of them, and how that is granted: extents are dx's."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from codegen.epilogue import node_of
from codegen.operators.convolution import direct
from codegen.operators.convolution.problem import Convolution
from codegen.operators.convolution.reduced import (
    DIRECT,
    POINTWISE,
    ROOM,
    Geometry,
    Wish,
    class_of,
    multiples_beyond,
    problem_of,
    sizes_beyond,
    strip_columns,
    wish_of,
)
from codegen.operators.matmul.problem import MatmulProblem
from codegen.problem import Problem

# Both axes differ in nearly all of it. None is a product of stored matrices.
GEOMETRIES = (
    Geometry(((2, 2),), padding=((1, 1), (1, 1))),
    Geometry(((3, 2),), (1, 1), (1, 2), ((0, 1), (2, 2))),
    Geometry(((2, 3),), (1, 1), (2, 1), ((3, 3), (0, 2))),
    Geometry(((1, 2),), padding=((0, 0), (1, 0))),
)
# Taps that the stride does not divide, a stride that has a divisor in common with the dilation (some phases then have
# no taps), fewer taps than the stride, windows that lie in the padding altogether, a phase whose only tap is the first
# one and begins with a later row of dy.
STRIDED = (
    Geometry(((3, 3),), (2, 1), (1, 1), ((1, 1), (1, 1))),
    Geometry(((3, 4),), (1, 2), (2, 2), ((0, 1), (2, 2))),
    Geometry(((4, 1),), (3, 2), (2, 1), ((3, 3), (1, 1))),
    Geometry(((3, 3),), (2, 2), (1, 3), ((4, 4), (1, 0))),
)

SHORT = Geometry(((3, 3),), (3, 3), (1, 1), ((1, 1), (1, 1)))


def of_product(kind: type[Convolution], s: Mapping[str, Any], number: int, matmul: MatmulProblem) -> Problem:
    """Of the product what matmul has, of the geometry another each."""
    geometry = _geometry(s, number)
    wish, taps = wish_of(s, number, matmul, geometry), 1
    if number == 0:  # the pixels of a phase, of which the others have as many in all
        down, across = geometry.stride
        wish = replace(wish, rows=wish.rows * down, columns=wish.columns * across)
    for count, step, apart in zip(geometry.taps[0], geometry.stride, geometry.dilation, strict=True):
        taps *= -(-count // (step // math.gcd(step, apart)))
    return _granted(kind, s, replace(wish, channels=wish.filters, filters=max(1, -(-matmul.k // taps))))


def directly(kind: type[Convolution], s: Mapping[str, Any], t: Mapping[str, Any]) -> list[Problem]:
    """More taps than come at once; blocks along both axes; less than a block."""
    pixels, channels = direct.block(t)
    taps, unit, problems = int(t["taps"]), int(t["filters"]), list[Problem]()
    long = max(2, math.isqrt(taps) + 1)
    for number, (images, blocks, more, groups) in enumerate(DIRECT):
        geometry = _geometry(s, number)
        if number == 0 and not s["pointwise"]:
            size = (long * geometry.stride[0], long * geometry.stride[1])
            geometry = Geometry((size,), geometry.stride, padding=((1, 1), (2, 2)))
        if s["pointwise"] and s["layout"] == "nchw":
            groups = 1  # with groups it is no product of stored matrices there
        per_image = max(3, (blocks * pixels + more) // images)
        rows = max(1, math.isqrt(per_image))
        filters = taps // math.prod(geometry.taps[0]) if number == 0 else 2 if number == 1 else 1
        wanted = max(1, blocks * channels + more) if groups == 1 or s["depthwise"] else unit
        columns = -(-per_image // rows) * (geometry.stride[1] if number == 1 else 1)
        if window := int(t["window"]):
            geometry = _of_window(geometry, window, number, strided=s["strided"])
            columns = strip_columns(int(t["pixels"]))[number]
            rows = -(-per_image // columns) * (geometry.stride[0] if number == 1 else 1)
        problems.append(_granted(kind, s, Wish(images, rows, columns, groups, wanted, max(1, filters), geometry, unit)))
    return problems


def short(kind: type[Convolution], s: Mapping[str, Any], t: Mapping[str, Any]) -> Problem:
    """Axes shorter than the stride, so that some phases have no pixel."""
    geometry = SHORT
    if window := int(t.get("window", 0)):
        geometry = _of_window(geometry, window, 0, strided=True)
    return _granted(kind, s, Wish(2, 2, 2, 1, 1, 1, geometry, int(t.get("filters", 1))), every_phase=False)


def _of_window(geometry: Geometry, window: int, number: int, *, strided: bool) -> Geometry:
    """With windows of `window` columns next to each other, and padding that leaves an output to every dx."""
    g, left = geometry, window - 1 if number == 1 else window // 2
    down = max(2 if strided else 1, g.stride[0])
    padding = (g.padding[0], (left, left + (number == 3)))
    return Geometry(((g.taps[0][0], window),), (down, 1), (g.dilation[0], 1), padding)


def _geometry(s: Mapping[str, Any], number: int) -> Geometry:
    return POINTWISE if s["pointwise"] else (STRIDED if s["strided"] else GEOMETRIES)[number]


def _granted(kind: type[Convolution], s: Mapping[str, Any], wish: Wish, *, every_phase: bool = True) -> Problem:
    """The problem nearest to the wish that has the signature's classes; `channels` of a group become a multiple of
    `unit`; `every_phase`: of a strided one has pixels."""
    g, last, width = wish.geometry, s["layout"] == "nhwc", class_of(s)
    chain, (r, s_) = tuple(node_of(part) for part in s["epilogue"]), g.taps[0]

    def fits(tensor: str, extent: int) -> bool:
        return width(tensor, extent) == int(s[f"align_{tensor}"])

    # A window must fit.
    rows, columns = (
        max(wanted, apart * (taps - 1) + 1 - sum(padding), step + 1 if every_phase and step > 1 else 1)
        for wanted, taps, step, apart, padding in zip(
            (wish.rows, wish.columns), (r, s_), g.stride, g.dilation, g.padding, strict=True
        )
    )
    if not last and not s["strided"]:
        rows, columns = next(
            (h, w)
            for h, w in sizes_beyond(rows, columns)
            if fits("out", h * w) and (not s["pointwise"] or fits("x", h * w))
        )
    groups, channels, filters = wish.groups, wish.channels, wish.filters
    if s["depthwise"]:
        counts = range(max(2, channels), channels + ROOM)
        groups, channels, filters = next(c for c in counts if not last or (fits("x", c) and fits("out", c))), 1, 1
    else:
        if last and any(width(tensor, wish.unit) > s[f"align_{tensor}"] for tensor in ("w", "out")):
            groups = 1  # whole threads in each group are of a wider class
        # The classes of the filters and, where they are last, of dx.
        classed = ("w", "out") if last else ("w",) if s["pointwise"] else ()
        counts = multiples_beyond(channels, wish.unit if groups > 1 else 1)
        channels = next(count for count in counts if all(fits(tensor, count) for tensor in classed))
        filters = next(k for k in range(filters, filters + ROOM) if not last or fits("x", k))
        if filters == channels == 1:  # depthwise, if there are groups
            filters, groups = (filters, 1) if last else (2, groups)
    return problem_of(kind, s, wish, chain, (rows, columns), (r, s_), (groups, channels, filters))
