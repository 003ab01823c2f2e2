"""What verifies kernels of Winograd: reduced problems of a signature, and inputs whose transforms are exact."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from codegen.epilogue import node_of
from codegen.fixed_point import FIELDS, as_ring_node
from codegen.operator import Array
from codegen.operators.convolution import winograd, winograd_fused
from codegen.operators.convolution.problem import WINOGRAD, AllowsWinograd, Padding
from codegen.operators.convolution.reduced import ROOM, class_of, sizes_beyond, with_channel_bias
from codegen.operators.matmul import split
from codegen.operators.matmul.inputs import TYPICAL, kept_products
from codegen.operators.matmul.kernel_family import is_limbs
from codegen.operators.matmul.reduced import LIMBS_MANY
from codegen.special_inputs import NO_NUMBERS

# Multiply-adds up to which there are several rows of tiles of the products (`MANY_BUDGET` of matmul's).
MANY_BUDGET = 12_000_000
# Whole numbers in x and in w up to these, what those of w are multiples of, and how many channels are not 0, by the
# form that the problem allows: so the operands fit 8 bits, and the sums 24. F(4 x 4) divides those of filters by 9.
LARGEST = {"f2": (8, 4), "f4": (2, 2)}
MULTIPLE_OF = {"f2": 1, "f4": 9}
CHANNELS = {"f2": 256, "f4": 16}
# Of `special` inputs: the tiles of which one has an element that is no number.
TILES_OF_ONE = 12

Layer = TypeVar("Layer", bound=AllowsWinograd)


@dataclass(frozen=True)
class Wish:
    """What a problem should be like, up to its signature's classes."""

    images: int
    rows: int
    columns: int
    channels: int
    filters: int
    padding: Padding


RowOfFilters = Callable[[int, int], int]
"""Of channels and filters of the convolution: how many elements of w lie along one row."""


def reduced_problems(
    kind: type[Layer], signature: Mapping[str, Any], tunables: Mapping[str, Any], row: RowOfFilters
) -> list[Layer]:
    """Whole tiles; nothing whole, with padding of one side; one pixel; several images with more tiles than a row of the
    products' blocks, without padding."""
    return [
        kind.model_validate({**_granted(signature, wish, row), "winograd": f"f{tunables['output_tile']}"})
        for wish in _wishes(signature, tunables)
    ]


def _wishes(s: Mapping[str, Any], t: Mapping[str, Any]) -> Iterator[Wish]:
    outputs, last = int(t["output_tile"]), s["layout"] == "nhwc" or winograd_fused.computes(t)
    of_tiles, of_filters = (int(t[name]) for name in (("tile_m", "tile_n") if last else ("tile_n", "tile_m")))
    depth, both = int(t["tile_k"]), ((1, 1), (1, 1))
    long = 2 * int(t.get("chain_k", 0)) + depth * (int(t.get("stages", 1)) + 1)
    yield Wish(1, 2 * outputs, outputs * -(-of_tiles // 2), long, of_filters, both)
    half = -(-of_tiles // 4) + 1  # of two images with two rows of tiles each
    yield Wish(2, outputs + 1, outputs * half - 1, depth + 3, of_filters + 5, ((0, 2), (2, 1)))
    yield Wish(1, 1, 1, 1, 1, both)
    # Rows of blocks of the products that are full, beside one that is barely begun; bands are of up to 4.
    cost, rows = winograd.places(outputs) * of_tiles * of_filters * depth, 4
    budget = LIMBS_MANY if is_limbs(t) else MANY_BUDGET
    while rows > 1 and 2 * (rows + 1) * cost > budget:
        rows //= 2
    of_images, of_rows = (rows, 1) if last else (1, rows)
    across = -(-(of_images * of_tiles + 1) // 6)  # of three images with two rows of tiles each
    yield Wish(3, outputs + 2, outputs * (across - 1) + 1, 2, of_rows * of_filters + 1, ((0, 0), (2, 2)))


def _granted(s: Mapping[str, Any], wish: Wish, row: RowOfFilters) -> dict[str, Any]:
    """The fields of the problem nearest to the wish that has the signature's classes."""
    last, width = s["layout"] == "nhwc", class_of(s)

    def fits(tensor: str, extent: int) -> bool:
        return width(tensor, extent) == int(s[f"align_{tensor}"])

    channels, filters = next(
        (channels, filters)
        for channels in range(wish.channels, wish.channels + ROOM)
        if not last or fits("x", channels)
        for filters in range(wish.filters, wish.filters + ROOM)
        if (not last or fits("out", filters)) and fits("w", row(channels, filters))
    )
    rows, columns = next(
        (rows, columns)
        for rows, columns in sizes_beyond(wish.rows, wish.columns)
        if last or fits("out", rows * columns)
    )
    (top, bottom), (left, right) = wish.padding
    nodes = (node_of(part) for part in s["epilogue"])
    chain = with_channel_bias(as_ring_node(node, s["fraction_bits"]) if "rounding" in s else node for node in nodes)
    return {
        **{name: s[name] for name in ("layout", "dtype", "out_dtype", "allow_tf32", *FIELDS) if name in s},
        "n": wish.images,
        "h": max(1, rows + 2 - top - bottom), "w": max(1, columns + 2 - left - right), "c": channels, "k": filters,
        "r": 3, "s": 3, "padding": wish.padding, "epilogue": [node.model_dump() for node in chain],
    }  # fmt: skip


def launches_to_test(tunables: Mapping[str, Any], problem: AllowsWinograd) -> list[list[int]]:
    outputs = int(tunables["output_tile"])
    return split.launches_to_test(winograd.as_matmul(tunables), winograd.product(problem, outputs))


def integers(
    layer: AllowsWinograd, image: tuple[int, ...], filters: tuple[int, ...], rng: np.random.Generator
) -> tuple[Array, Array]:
    """An image and filters of those shapes: whole numbers whose transforms are exact in every type, those of the image
    times a power of two that makes typical sums as large as matmul's, those of the filters multiples of 9 where
    F(4 x 4) is allowed."""
    form = layer.winograd
    (largest_x, largest_w), unit = LARGEST[form], MULTIPLE_OF[form]
    spread = largest_x * largest_w * unit * math.sqrt(9 * min(layer.c, CHANNELS[form])) / 3.0
    shift = max(0, math.floor(math.log2(spread / TYPICAL)))
    x = rng.integers(-largest_x, largest_x, size=image, endpoint=True).astype(np.float32)
    w = rng.integers(-largest_w, largest_w, size=filters, endpoint=True).astype(np.float32)
    return np.ldexp(x, -shift), w * unit


def with_few_special(
    layer: AllowsWinograd, drawn: Mapping[str, Array], image: str, rng: np.random.Generator
) -> dict[str, Array]:
    """What is no number in the image alone, in one of TILES_OF_ONE tiles: each reaches four at most. What an epilogue
    makes of it is left to other algorithms, as it may be one thing or another here."""
    made = {name: _of_numbers(array) for name, array in drawn.items()}
    outputs, x = min(WINOGRAD[layer.winograd]), made[image]
    count = min(x.size, max(1, layer.n * (layer.p // outputs) * (layer.q // outputs) // TILES_OF_ONE))
    x.reshape(-1)[rng.choice(x.size, count, replace=False)] = np.resize(rng.permutation(NO_NUMBERS), count)
    return made


def _of_numbers(array: Array) -> Array:
    """A copy with 1 in place of what is none."""
    if array.dtype.kind in "iub":
        return array
    return np.where(np.isfinite(array.astype(np.float32)), array, np.ones((), array.dtype))


def kept_channels(layer: AllowsWinograd, rng: np.random.Generator) -> Array:
    """1 for the channels that are summed, 0 for those that exactness has no room for."""
    return kept_products(layer.c, min(layer.c, CHANNELS[layer.winograd]), np.float32, rng)
