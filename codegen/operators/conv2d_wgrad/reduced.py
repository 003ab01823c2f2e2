"""Reduced problems of a kernel's signature: what is wished of them (`codegen/operators/convolution/reduced.py`)."""

import math
from collections.abc import Mapping
from typing import Any

from codegen.epilogue import node_of
from codegen.operators.conv2d_wgrad import direct
from codegen.operators.convolution.problem import Convolution
from codegen.operators.convolution.reduced import GEOMETRIES, POINTWISE, Wish, granted, many_taps, with_channel_bias
from codegen.operators.matmul.problem import MatmulProblem
from codegen.problem import Problem

# Output pixels of the problems in turn: images, and rows of each where that is not the square. So a step of a kernel is
# a part of a row, several rows, several images.
PIXELS = ((1, 0), (2, 0), (7, 1), (3, 2))
# From so many on the last of them are a row, of exactly that number: the last step may have a single pixel.
A_ROW = 64
# Of the problems of `direct` in turn: blocks of filters and what is left over, steps of a sum and how much they lack.
DIRECT = ((1, 0, 3, 0), (2, 3, 3, 5), (0, 1, 2, 1), (1, 1, 1, 3))


def of_product(kind: type[Convolution], s: Mapping[str, Any], number: int, matmul: MatmulProblem) -> Problem:
    geometry = POINTWISE if s["pointwise"] else GEOMETRIES[number]
    channels = max(1, -(-matmul.n // math.prod(geometry.taps[0])))
    images, rows, columns = _pixels(number, matmul.k)
    wish = Wish(images, rows, columns, matmul.batch, channels, matmul.m, geometry)
    return granted(kind, s, wish, with_channel_bias(matmul.epilogue), "dw", "dy")


def directly(kind: type[Convolution], s: Mapping[str, Any], t: Mapping[str, Any]) -> list[Problem]:
    """More elements than a thread has; several blocks of filters; less than a block; a few pixels."""
    as_product, problems = direct.of_product(t), list[Problem]()
    chain = with_channel_bias(node_of(part) for part in s["epilogue"])
    for number, (blocks, more, steps, missing) in enumerate(DIRECT):
        geometry = GEOMETRIES[number] if number else many_taps(int(t["elements"]))
        steps = 7 if steps == 3 and t["split"] != "none" else steps
        images, rows, columns = _pixels(number, max(3, steps * as_product["tile_k"] - missing))
        groups = 1 if s["depthwise"] or number == 2 else 3
        filters = -(-max(1, blocks * as_product["tile_m"] + more) // groups)
        geometry = POINTWISE if s["pointwise"] else geometry
        wish = Wish(images, rows, columns, groups, 1, filters, geometry, int(t["filters"]), room=1, whole=True)
        problems.append(granted(kind, s, wish, chain, "dw", "dy"))
    return problems


def _pixels(number: int, count: int) -> tuple[int, int, int]:
    """Images, rows and columns of so many pixels."""
    images, rows = (1, 1) if number == len(PIXELS) - 1 and count >= A_ROW else PIXELS[number]
    rows = rows or max(1, math.isqrt(-(-count // images)))
    return images, rows, -(-count // (images * rows))
