"""Reduced problems of a kernel's signature: the real Config, alignment class and lists of axes on extents that a CPU
can run."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from codegen.dtypes import dtype
from codegen.epilogue import node_of
from codegen.operators.reduce.axes import MAX_AXES, WIDEST_BYTES, form_of
from codegen.operators.reduce.problem import ReduceProblem
from codegen.problem import LARGEST_ELEMENTS
from codegen.run_once import FAR

Level = tuple[str, int]  # list, extent
# Outputs side by side of a block of `combine` that has as many rows of threads as it can, and more slices than those.
COMBINE_COLUMNS, MANY_SLICES = 8, 70
# Rows, or vectors of columns, of which some have what is no number.
SPECIAL_UNITS = 12
# Of the problem that is run once.
MOST_LONG_SLICES, LONG_THREADS = 4096, 2**17


def reduced_problems(signature: Mapping[str, Any], tunables: Mapping[str, Any]) -> list[ReduceProblem]:
    """Whole blocks with more trips than one, of as many axes as there may be; tails in units and in steps; the
    smallest; few steps of many units; more slices than a block of `combine` takes at once."""
    t = tunables
    by_rows, vector = t["algorithm"] == "row", int(t["vector"])
    depth = t["threads"] // t["lanes"]
    units, apart = (depth, t["lanes"]) if by_rows else (t["lanes"], depth)
    trip = apart * t["unroll"]
    wishes = [(units, trip + apart), (units + 1 + units // 3, trip + trip // 2 + 1), (1, 1), (2 * units + 1, 3)]
    if t["split"] != "none":
        wishes.append((COMBINE_COLUMNS if by_rows else max(1, COMBINE_COLUMNS // vector), MANY_SLICES))
    problems = []
    for number, (outer, steps) in enumerate(wishes):
        outputs, count = (outer, steps * vector) if by_rows else (outer * vector, steps)
        problems.append(_granted(signature, outputs, count, number % 2 == 1))
    return [_of_all_axes(problems[0]), *problems[1:]]


def special_problem(signature: Mapping[str, Any], tunables: Mapping[str, Any]) -> ReduceProblem:
    """So many outputs that each kind of what is no number is in some of them, also where a block has a single one."""
    t = tunables
    by_rows, vector, depth = t["algorithm"] == "row", int(t["vector"]), t["threads"] // t["lanes"]
    units, apart = (depth, t["lanes"]) if by_rows else (t["lanes"], depth)
    outer, steps = max(units + 1 + units // 3, SPECIAL_UNITS), apart * t["unroll"] + apart // 2 + 1
    outputs, count = (outer, steps * vector) if by_rows else (outer * vector, steps)
    return _granted(signature, outputs, count, apart=True)


def long_problem(signature: Mapping[str, Any], tunables: Mapping[str, Any]) -> tuple[ReduceProblem, list[int]]:
    """A few outputs with a step for each slice, and the slices; with few threads in a block there are more of them."""
    slices = min(MOST_LONG_SLICES, LONG_THREADS // int(tunables["threads"]))
    by_rows, vector = tunables["algorithm"] == "row", int(tunables["vector"])
    outputs, count = (1, slices * vector) if by_rows else (vector, slices)
    return _granted(signature, outputs, count, apart=False), [slices]


def far_problem(signature: Mapping[str, Any], tunables: Mapping[str, Any]) -> ReduceProblem | None:
    """Three outputs (or vectors of them) of more steps than one trip, or of as few as address space allows, and FAR
    apart what has no neighbours; none where that is nothing."""
    t = tunables
    by_rows, vector = t["algorithm"] == "row", int(t["vector"])
    trip = int(t["lanes"]) if by_rows else int(t["threads"]) // int(t["lanes"])
    for steps in (trip + 1, 17, 3):
        near = _granted(signature, *((3, steps * vector) if by_rows else (3 * vector, steps)), apart=True)
        longest = sum((extent - 1) * stride for extent, stride in zip(near.shape, near.strides, strict=True))
        nearest = min((s for e, s in zip(near.shape, near.strides, strict=True) if s > 1 and e > 1), default=0)
        # An odd factor leaves the class as it is.
        factor = (FAR // nearest + 1) | 1 if nearest else 0
        if nearest and longest * factor < LARGEST_ELEMENTS:
            strides = tuple(stride * factor if stride > 1 else 1 for stride in near.strides)
            return ReduceProblem.model_validate({**near.canonical(), "strides": strides})
    return None


def _granted(s: Mapping[str, Any], outputs: int, count: int, apart: bool) -> ReduceProblem:
    """The problem nearest to the wish that has the signature's class; `apart`: with gaps between the levels."""
    kept = _extents(s, "kept", outputs)
    reduced = _extents(s, "reduced", count)
    order = list(_interleaved(s, kept, reduced))
    size = dtype(s["dtype"]).bytes
    for gaps in (apart, True):
        fields = _laid_out(s, order, gaps)
        own = form_of(fields["shape"], fields["strides"], fields["axes"], s["fn"], size)
        lists = (len(own.kept.extents), len(own.reduced.extents))
        wanted = (s["inner"], s["align"], s["scattered"], s["kept_axes"], s["reduced_axes"])
        if (own.inner, own.align, own.scattered, *lists) == wanted:
            break
    names = ("dtype", "out_dtype", "fn", "map", "write_map")
    chain = [node_of(part).model_dump() for part in s["epilogue"]]
    return ReduceProblem.model_validate({**fields, **{name: s[name] for name in names}, "epilogue": chain})


def _of_all_axes(problem: ReduceProblem) -> ReduceProblem:
    """The same elements: axes of extent 1 behind the outermost."""
    more = MAX_AXES - len(problem.shape)

    def filled(values: tuple[int, ...]) -> tuple[int, ...]:
        return (values[0], *[1] * more, *values[1:])

    axes = tuple(axis + more if axis else 0 for axis in problem.axes)
    changed = {"shape": filled(problem.shape), "strides": filled(problem.strides), "axes": axes}
    return ReduceProblem.model_validate({**problem.canonical(), **changed})


def _extents(s: Mapping[str, Any], kind: str, wish: int) -> list[int]:
    """Of a list, outermost first: small ones, and the innermost as large as the wish leaves it."""
    outer = [2 + (i == 0) for i in range(s[f"{kind}_axes"] - 1)]
    inner = max(2 if outer else 1, -(-wish // math.prod(outer)))
    if s["inner"] == kind:
        align, widest = s["align"], WIDEST_BYTES // dtype(s["dtype"]).bytes
        times = max(1, -(-inner // align))
        # An odd number of the class, so that no wider one divides it; of one element there are no neighbours.
        inner = align * (times if align == widest else times | 1)
        inner = max(inner, 3) if align == 1 else inner
    return [*outer, inner]


def _interleaved(s: Mapping[str, Any], kept: list[int], reduced: list[int]) -> Iterator[Level]:
    """Levels from the innermost to the outermost, the lists in turn."""
    left = {"kept": list(kept), "reduced": list(reduced)}
    kind = "kept" if s["inner"] == "kept" else "reduced"
    while left["kept"] or left["reduced"]:
        if not left[kind]:
            kind = "reduced" if kind == "kept" else "kept"
        yield kind, left[kind].pop()
        kind = "reduced" if kind == "kept" else "kept"


def _laid_out(s: Mapping[str, Any], order: list[Level], gaps: bool) -> dict[str, Any]:
    """Shape, strides and axes. Where no list has neighbours, elements lie two apart; where outputs are scattered, the
    innermost of the kept axes comes first."""
    align = s["align"]
    stride = 2 if s["inner"] == "none" else 1
    shape, strides, axes = [], [], []
    for place, (kind, extent) in enumerate(order):
        shape.append(extent)
        strides.append(stride)
        if kind == "reduced":
            axes.append(len(order) - 1 - place)
        stride *= extent
        if gaps:
            stride = -(-stride // align) * align + align
    shape.reverse()
    strides.reverse()
    if s["scattered"]:
        kept = [axis for axis in range(len(order)) if axis not in axes]
        turned = [(shape[axis], strides[axis]) for axis in reversed(kept)]
        for axis, (extent, stride) in zip(kept, turned, strict=True):
            shape[axis], strides[axis] = extent, stride
    return {"shape": tuple(shape), "strides": tuple(strides), "axes": tuple(sorted(axes))}
