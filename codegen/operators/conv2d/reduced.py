"""Reduced problems of a kernel's signature: what is wished of them (`codegen/operators/convolution/reduced.py`)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from codegen.epilogue import node_of
from codegen.operators.convolution import direct
from codegen.operators.convolution.problem import Convolution
from codegen.operators.convolution.reduced import (
    DIRECT,
    GEOMETRIES,
    POINTWISE,
    Geometry,
    Wish,
    granted,
    many_taps,
    strip_columns,
    wish_of,
    with_channel_bias,
)
from codegen.operators.matmul.problem import MatmulProblem
from codegen.problem import Problem


def of_product(kind: type[Convolution], s: Mapping[str, Any], number: int, matmul: MatmulProblem) -> Problem:
    wish = wish_of(s, number, matmul, POINTWISE if s["pointwise"] else GEOMETRIES[number])
    return granted(kind, s, wish, with_channel_bias(matmul.epilogue), "w", "out")


def directly(kind: type[Convolution], s: Mapping[str, Any], t: Mapping[str, Any]) -> list[Problem]:
    """More taps than come at once; blocks along both axes; less than a block."""
    pixels, filters = direct.block(t)
    taps, unit, problems = int(t["taps"]), int(t["filters"]), list[Problem]()
    chain = with_channel_bias(node_of(part) for part in s["epilogue"])
    for number, (images, blocks, more, groups) in enumerate(DIRECT):
        geometry = GEOMETRIES[number] if number else many_taps(taps)
        if s["pointwise"]:
            geometry = POINTWISE
            groups = 1 if s["layout"] == "nchw" else groups  # with groups it is no product of stored matrices there
        per_image = max(3, (blocks * pixels + more) // images)
        rows = max(1, math.isqrt(per_image))
        columns = -(-per_image // rows)
        if window := int(t["window"]):
            of_filter = taps // window + 1 if number == 0 else geometry.taps[0][0]
            geometry = _of_window(GEOMETRIES[number], window, of_filter)
            columns = strip_columns(int(t["pixels"]))[number]
            rows = -(-per_image // columns)
        channels = 1 if number else max(1, taps // math.prod(geometry.taps[0]))
        wanted = max(1, blocks * filters + more) if groups == 1 or s["depthwise"] else unit
        wish = Wish(images, rows, columns, groups, channels, wanted, geometry, unit)
        problems.append(granted(kind, s, wish, chain, "w", "out"))
    return problems


def _of_window(geometry: Geometry, window: int, rows: int) -> Geometry:
    """With windows of `window` columns next to each other, and of `rows` rows, or as many more as the class takes."""
    g, taps = geometry, tuple((count, window) for count in range(rows, rows + 8))
    return replace(g, taps=taps, stride=(g.stride[0], 1), dilation=(g.dilation[0], 1), beyond=(g.beyond[0], 0))
