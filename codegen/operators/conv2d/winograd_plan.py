"""What verifies kernels of Winograd: reduced problems of a signature, and inputs whose transforms are exact."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from codegen.alignment import needs_cuda_cores, widest
from codegen.epilogue import node_of
from codegen.operator import Array
from codegen.operators.conv2d import winograd
from codegen.operators.conv2d.problem import Conv2dProblem, Winograd
from codegen.operators.convolution.problem import Padding
from codegen.operators.convolution.reduced import ROOM, with_channel_bias
from codegen.operators.matmul import split
from codegen.operators.matmul.inputs import TYPICAL, kept_products

# Multiply-adds up to which there are several rows of tiles of the products (`MANY_BUDGET` of matmul's).
MANY_BUDGET = 12_000_000
# Whole numbers in x and in w up to these, what those of w are multiples of, and how many channels are not 0, by the
# form that the problem allows: so the operands fit 8 bits, and the sums 24. F(4 x 4) divides those of filters by 9.
LARGEST = {"f2": (8, 4), "f4": (2, 2)}
MULTIPLE_OF = {"f2": 1, "f4": 9}
CHANNELS = {"f2": 256, "f4": 16}


@dataclass(frozen=True)
class Wish:
    """What a problem should be like, up to its signature's classes."""

    images: int
    rows: int
    columns: int
    channels: int
    filters: int
    padding: Padding


def reduced_problems(signature: Mapping[str, Any], tunables: Mapping[str, Any]) -> list[Conv2dProblem]:
    """Whole tiles; nothing whole, with padding of one side; one pixel; several images with more tiles than a row of the
    products' blocks, without padding."""
    form: Winograd = "f2" if tunables["output_tile"] == 2 else "f4"
    return [_granted(signature, wish, form) for wish in _wishes(signature, tunables)]


def _wishes(s: Mapping[str, Any], t: Mapping[str, Any]) -> Iterator[Wish]:
    outputs, last = int(t["output_tile"]), s["layout"] == "nhwc"
    of_tiles, of_filters = (int(t[name]) for name in (("tile_m", "tile_n") if last else ("tile_n", "tile_m")))
    depth, both = int(t["tile_k"]), ((1, 1), (1, 1))
    yield Wish(1, 2 * outputs, outputs * -(-of_tiles // 2), depth * (int(t["stages"]) + 1), of_filters, both)
    half = -(-of_tiles // 4) + 1  # of two images with two rows of tiles each
    yield Wish(2, outputs + 1, outputs * half - 1, depth + 3, of_filters + 5, ((0, 2), (2, 1)))
    yield Wish(1, 1, 1, 1, 1, both)
    # Rows of blocks of the products that are full, beside one that is barely begun; bands are of up to 4.
    cost, rows = winograd.places(outputs) * of_tiles * of_filters * depth, 4
    while rows > 1 and 2 * (rows + 1) * cost > MANY_BUDGET:
        rows //= 2
    of_images, of_rows = (rows, 1) if last else (1, rows)
    across = -(-(of_images * of_tiles + 1) // 6)  # of three images with two rows of tiles each
    yield Wish(3, outputs + 2, outputs * (across - 1) + 1, 2, of_rows * of_filters + 1, ((0, 0), (2, 2)))


def _granted(s: Mapping[str, Any], wish: Wish, form: Winograd) -> Conv2dProblem:
    """The problem nearest to the wish that has the signature's classes."""
    last, quads = s["layout"] == "nhwc", needs_cuda_cores(s["dtype"], s["allow_tf32"])

    def is_of(name: str, element: str, extent: int) -> bool:
        return widest(s[element], extent, quads=quads) == int(s[name])

    channels = next(
        count
        for count in range(wish.channels, wish.channels + ROOM)
        if is_of("align_w", "dtype", 9 * count) and (not last or is_of("align_x", "dtype", count))
    )
    filters = next(
        count
        for count in range(wish.filters, wish.filters + ROOM)
        if not last or is_of("align_out", "out_dtype", count)
    )
    rows, columns = next(
        (rows, columns)
        for more in range(ROOM)
        for rows, columns in ((wish.rows, wish.columns + more), (wish.rows + 1, wish.columns + more))
        if last or is_of("align_out", "out_dtype", rows * columns)
    )
    (top, bottom), (left, right) = wish.padding
    return Conv2dProblem(
        n=wish.images, h=max(1, rows + 2 - top - bottom), w=max(1, columns + 2 - left - right), c=channels, k=filters,
        r=3, s=3, layout=s["layout"], padding=wish.padding, dtype=s["dtype"], out_dtype=s["out_dtype"],
        allow_tf32=s["allow_tf32"], epilogue=with_channel_bias(node_of(part) for part in s["epilogue"]), winograd=form,
    )  # fmt: skip


def launches_to_test(tunables: Mapping[str, Any], problem: Conv2dProblem) -> list[list[int]]:
    outputs = int(tunables["output_tile"])
    return split.launches_to_test(winograd.as_matmul(tunables), winograd.product(problem, outputs))


def integers(problem: Conv2dProblem, like: Mapping[str, Array], rng: np.random.Generator) -> dict[str, Array]:
    """x and w of whole numbers whose transforms are exact in every type: those of x times a power of two that makes
    typical sums as large as matmul's, those of w multiples of 9 where F(4 x 4) is allowed. `like`: arrays of their
    types."""
    p, form = problem, problem.winograd
    (largest_x, largest_w), unit, terms = LARGEST[form], MULTIPLE_OF[form], min(p.c, CHANNELS[form])
    spread = largest_x * largest_w * unit * math.sqrt(9 * terms) / 3.0
    shift = max(0, math.floor(math.log2(spread / TYPICAL)))
    x = rng.integers(-largest_x, largest_x, size=p.shape_of("x"), endpoint=True).astype(np.float32)
    w = (rng.integers(-largest_w, largest_w, size=p.shape_of("w"), endpoint=True) * unit).astype(np.float32)
    kept = kept_products(p.c, terms, np.float32, rng)
    w = w * (kept if p.channels_last else kept[:, None, None])
    return {"x": np.ldexp(x, -shift).astype(like["x"].dtype), "w": w.astype(like["w"].dtype)}
