"""Reduced problems of a kernel's signature: the real Config, alignment class and code path on extents a CPU can run."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

from codegen.alignment import needs_cuda_cores, widest
from codegen.epilogue import AnyNode as MatrixNode
from codegen.epilogue import Bias
from codegen.fixed_point import FIELDS
from codegen.operators.convolution.problem import AnyNode, ChannelBias, Convolution, Padding
from codegen.operators.matmul.problem import MatmulProblem
from codegen.problem import Problem

# Extents beyond the wished one among which one of the right class is searched.
ROOM = 128
# Of the problems of `direct` in turn: images, whole blocks of them, what is left over, groups.
DIRECT = ((1, 1, 0, 1), (2, 2, 3, 3), (1, 0, 0, 2), (3, 1, 1, 1))


class Reduced(Protocol):
    """A module with test problems: one that is about as a reduced problem of the product, and those of `direct`."""

    def of_product(self, kind: type[Any], s: Mapping[str, Any], number: int, matmul: MatmulProblem, /) -> Problem: ...
    def directly(self, kind: type[Any], s: Mapping[str, Any], t: Mapping[str, Any], /) -> list[Problem]: ...


@dataclass(frozen=True)
class Geometry:
    """How windows lie: (along h, along w). `taps` are the filters worth trying, the best first; `beyond` are elements
    at the end of the image that no window reaches."""

    taps: tuple[tuple[int, int], ...]
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    padding: Padding = ((0, 0), (0, 0))
    beyond: tuple[int, int] = (0, 0)


# Both axes differ in all of it. None is a product of stored matrices, not even with a filter of one element.
GEOMETRIES = (
    Geometry(((2, 2), (3, 3), (1, 2), (1, 3), (1, 1)), padding=((1, 1), (1, 1))),
    Geometry(((3, 2), (3, 3), (2, 1), (1, 3), (1, 1)), (2, 1), (1, 2), ((0, 1), (2, 2)), (1, 0)),
    Geometry(((2, 3), (1, 3), (4, 1), (3, 3), (1, 1)), (3, 2), (2, 1), ((3, 3), (0, 2)), (2, 1)),
    Geometry(((1, 2), (3, 1), (2, 2), (1, 1)), (1, 2), (1, 1), ((0, 0), (1, 0)), (0, 1)),
)
POINTWISE = Geometry(((1, 1),))


@dataclass(frozen=True)
class Wish:
    """What a problem should be like, up to its signature's classes: rows and columns of what the kernel writes or sums
    over, channels and filters of a group, these a multiple of `unit` (of a single group only where `whole`). `room`:
    among how many counts of channels."""

    images: int
    rows: int
    columns: int
    groups: int
    channels: int
    filters: int
    geometry: Geometry
    unit: int = 1
    room: int = ROOM
    whole: bool = False


def as_matmul(s: Mapping[str, Any], layout: str, aligns: tuple[int, int, int]) -> dict[str, Any]:
    """The signature of the product, as matmul has it."""
    names = ("dtype", "acc_dtype", "out_dtype", "allow_tf32", "epilogue", *(name for name in FIELDS if name in s))
    classes = dict(zip(("align_a", "align_b", "align_c"), aligns, strict=True))
    return {**{name: s[name] for name in names}, "layout": layout, **classes}


def wish_of(s: Mapping[str, Any], number: int, matmul: MatmulProblem, geometry: Geometry) -> Wish:
    """As many pixels, filters and groups as a reduced problem of the product has rows, columns and matrices."""
    if s["layout"] == "nhwc":
        images = 1 if number == 0 else 2
        groups, pixels, filters = matmul.batch, -(-matmul.m // images), matmul.n
    else:
        images, groups = (matmul.batch, 1) if s["pointwise"] else (1 if number == 0 else 2, matmul.batch)
        pixels, filters = matmul.n, matmul.m
    rows = max(1, math.isqrt(pixels) if number else pixels // 8)
    channels = max(1, -(-matmul.k // math.prod(geometry.taps[0])))
    return Wish(images, rows, -(-pixels // rows), groups, channels, filters, geometry)


def many_taps(least: int) -> Geometry:
    """With filters of more elements than `least`."""
    long = max(2, math.isqrt(least) + 1)
    sizes = ((long, long), (long, long + 1), (long + 1, long + 1), *GEOMETRIES[0].taps)
    return Geometry(sizes, padding=((1, 1), (2, 2)))


def strip_columns(pixels: int) -> tuple[int, int, int, int]:
    """Columns of the outputs where so many neighbouring pixels are of a thread: one whole strip, a second of one
    pixel, and strips that are not full."""
    return pixels, pixels + 1, 1, max(1, pixels - 1)


def class_of(s: Mapping[str, Any]) -> Callable[[str, int], int]:
    """The class of a tensor whose rows have that extent."""
    quads = needs_cuda_cores(s["dtype"], s["allow_tf32"])

    def width(tensor: str, extent: int) -> int:
        return widest(s["out_dtype" if tensor in ("out", "dw") else "dtype"], extent, quads=quads)

    return width


def granted(
    kind: type[Convolution], s: Mapping[str, Any], wish: Wish, chain: tuple[AnyNode, ...], filter: str, output: str
) -> Convolution:
    """The problem nearest to the wish that has the signature's classes. `filter`, `output`: tensors of those shapes."""
    g, last, depthwise, width = wish.geometry, s["layout"] == "nhwc", bool(s["depthwise"]), class_of(s)

    def fits(tensor: str, extent: int) -> bool:
        return width(tensor, extent) == int(s[f"align_{tensor}"])

    counts = range(1, 2) if depthwise else range(wish.channels, wish.channels + wish.room)
    r, s_, channels = next(
        (r, c, count)
        for r, c in _filters_to_try(g)
        for count in counts
        if fits(filter, r * c * count) and (depthwise or not last or fits("x", count))
    )
    rows, columns = (
        max(wanted, 1 + -(-max(0, 1 - _image_extent(g, axis, 1, taps)) // g.stride[axis]))
        for axis, (wanted, taps) in enumerate(((wish.rows, r), (wish.columns, s_)))
    )
    if not last:
        rows, columns = next(
            (p, q)
            for p, q in sizes_beyond(rows, columns)
            if fits(output, p * q) and (not s["pointwise"] or fits("x", p * q))
        )
    groups, filters = wish.groups, wish.filters
    if depthwise:
        counts = range(max(2, filters), filters + ROOM)
        groups, filters = next(count for count in counts if not last or (fits("x", count) and fits(output, count))), 1
    else:
        if last and not wish.whole and width(output, wish.unit) > s[f"align_{output}"]:
            groups = 1  # whole threads in each group are of a wider class
        counts = multiples_beyond(filters, wish.unit if groups > 1 or wish.whole else 1)
        filters = next(count for count in counts if not last or fits(output, count))
        if filters == channels == 1:  # depthwise, if there are groups
            filters, groups = (filters, 1) if last else (2, groups)
    h, w = _image_extent(g, 0, rows, r), _image_extent(g, 1, columns, s_)
    return problem_of(kind, s, wish, chain, (h, w), (r, s_), (groups, channels, filters))


def problem_of(
    kind: type[Convolution],
    s: Mapping[str, Any],
    wish: Wish,
    chain: tuple[Any, ...],
    image: tuple[int, int],
    taps: tuple[int, int],
    of_groups: tuple[int, int, int],
) -> Convolution:
    """`of_groups`: their number, and the channels and filters of each."""
    g, (groups, channels, filters) = wish.geometry, of_groups
    return kind.model_validate({
        **{name: s[name] for name in ("layout", "dtype", "out_dtype", "allow_tf32", *FIELDS) if name in s},
        "n": wish.images, "h": image[0], "w": image[1], "c": groups * channels, "k": groups * filters, "r": taps[0],
        "s": taps[1], "groups": groups, "stride": g.stride, "dilation": g.dilation, "padding": g.padding,
        "epilogue": chain,
    })  # fmt: skip


def sizes_beyond(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    for more in range(ROOM):
        yield from ((rows, columns + more), (rows + 1, columns + more))


def multiples_beyond(count: int, unit: int) -> range:
    return range(-(-count // unit) * unit, count + 8 * ROOM, unit)


def with_channel_bias(chain: Iterable[MatrixNode]) -> tuple[AnyNode, ...]:
    """A bias along an axis of the matrix of outputs is one of the channels."""
    return tuple(ChannelBias() if isinstance(node, Bias) else node for node in chain)


def _image_extent(g: Geometry, axis: int, outputs: int, taps: int) -> int:
    """The image's extent that gives so many outputs; below 1 where there is none."""
    window = g.dilation[axis] * (taps - 1) + 1
    return (outputs - 1) * g.stride[axis] + window - sum(g.padding[axis]) + g.beyond[axis]


def _filters_to_try(geometry: Geometry) -> Iterator[tuple[int, int]]:
    """The geometry's own, then those of any other class."""
    yield from geometry.taps
    if geometry is not POINTWISE:
        yield from ((r, s) for r, s in product(range(1, 9), range(1, 9)) if r * s > 1)
