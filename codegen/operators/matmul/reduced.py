"""Reduced problems of a kernel's signature: the real Config, alignment class and code path on extents a CPU can run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from codegen.epilogue import node_of
from codegen.operators.matmul.problem import MatmulProblem

# Multiply-adds that the even and the ragged problem may cost on the CPU (1 to 2 ns each), so that a candidate stays
# well under 0.25 s.
BUDGET = 1_500_000
# Rows and columns of tiles worth having: 5 rows make a full and a broken band of 4.
WANTED = (("n", 2), ("m", 2), ("batch", 2), ("m", 3), ("n", 3), ("m", 5))
# Elements between rows and between matrices, times 1, 2, 3 in A, B and out: with it no two pitches and no two
# batch strides are equal, whatever the tile (tests/test_matmul_reference.py tries all).
GAP = 20


def reduced_problems(signature: Mapping[str, Any], tunables: Mapping[str, Any]) -> list[MatmulProblem]:
    """Even (whole tiles, more k-steps than stages), ragged (no whole tile, padded rows), smallest, one of many tiles.

    Many steps along k and many tiles at once are too dear for large tiles; so the last one has a single short step.
    Where they can, m, n, k and all pitches differ: a kernel that takes one for another must not be right by chance.
    """
    t, steps = tunables, tunables["stages"] + 1
    k_even = t["tile_k"] * steps
    least = {extent: _least(signature, extent) for extent in "mnk"}
    even = _tiles(t, k_even)
    ragged = _tiles(t, k_even + t["tile_k"])
    return [
        _problem(signature, 1, even["m"] * t["tile_m"], even["n"] * t["tile_n"], k_even, gap=0),
        _problem(
            signature,
            ragged["batch"],
            ragged["m"] * t["tile_m"] - least["m"],
            ragged["n"] * t["tile_n"] - 2 * least["n"],
            k_even + t["tile_k"] - 3 * least["k"] % t["tile_k"],
            gap=GAP,
        ),
        _problem(signature, 3, least["m"], least["n"], least["k"], gap=GAP),
        # 5 x 2 tiles of each of 2 matrices, the last of them barely begun.
        _problem(signature, 2, 4 * t["tile_m"] + least["m"], t["tile_n"] + 2 * least["n"], least["k"], gap=GAP),
    ]


def _tiles(t: Mapping[str, Any], k: int) -> dict[str, int]:
    """How many tiles along m and n and how many matrices, as far as the budget allows."""
    chosen = {"batch": 1, "m": 1, "n": 1}
    for axis, count in WANTED:
        more = {**chosen, axis: count}
        if more["batch"] * more["m"] * more["n"] * t["tile_m"] * t["tile_n"] * k <= BUDGET:
            chosen = more
    return chosen


def _contiguous(layout: str) -> dict[str, str]:
    """The extent along which each operand is contiguous."""
    return {"a": "m" if layout[0] == "t" else "k", "b": "k" if layout[1] == "t" else "n", "c": "n"}


def _least(signature: Mapping[str, Any], extent: str) -> int:
    """The granularity of an extent: what the vectors of the operands that are contiguous along it demand."""
    along = _contiguous(signature["layout"])
    return max(int(signature[f"align_{operand}"]) if along[operand] == extent else 1 for operand in "abc")


def _problem(signature: Mapping[str, Any], batch: int, m: int, n: int, k: int, gap: int) -> MatmulProblem:
    """Rows 1, 2, 3 times `gap` elements apart in A, B, out; of an odd pitch where an access is one element."""
    extents = {"m": m, "n": n, "k": k}
    along = _contiguous(signature["layout"])
    fields: dict[str, Any] = {
        name: signature[name] for name in ("layout", "dtype", "acc_dtype", "out_dtype", "allow_tf32")
    }
    for number, operand in enumerate("abc", 1):
        pitch = extents[along[operand]] + number * gap
        if signature[f"align_{operand}"] == 1 and pitch % 4 == 0:
            pitch += number  # a pitch that no vector divides is what this class is for
        rows = _rows(operand, along[operand], extents)
        fields[f"ld{operand}"] = pitch
        fields[f"stride_{operand}"] = rows * pitch + number * gap
    nodes = tuple(node_of(structure) for structure in signature["epilogue"])
    return MatmulProblem(batch=batch, m=m, n=n, k=k, epilogue=nodes, **fields)


def _rows(operand: str, columns: str, extents: Mapping[str, int]) -> int:
    other = {"a": "mk", "b": "kn", "c": "mn"}[operand].replace(columns, "")
    return extents[other]
