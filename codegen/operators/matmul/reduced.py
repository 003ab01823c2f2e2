"""Reduced problems of a kernel's signature: the real Config, alignment class and code path on extents a CPU can run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from codegen.epilogue import node_of
from codegen.operators.matmul.problem import MatmulProblem

# Multiply-adds that a test problem may cost on the CPU (about 1 ns each), so that a candidate stays under 0.25 s.
BUDGET = 1_500_000
# Rows and columns of tiles worth having: 5 rows make a full and a broken band of 4.
WANTED = (("n", 2), ("m", 2), ("batch", 2), ("m", 3), ("n", 3), ("m", 5))


def reduced_problems(signature: Mapping[str, Any], tunables: Mapping[str, Any]) -> list[MatmulProblem]:
    """Even (whole tiles, more k-steps than stages), ragged (no whole tile, padded rows), smallest (batched).

    The smallest is batched because it is cheap for every tile; the ragged one only where its budget allows.
    """
    t, steps = tunables, tunables["stages"] + 1
    k_even = t["tile_k"] * steps
    even = _tiles(t, k_even)
    ragged = _tiles(t, k_even + t["tile_k"])
    return [
        _problem(signature, 1, even["m"] * t["tile_m"], even["n"] * t["tile_n"], k_even, gap=0),
        _problem(
            signature,
            ragged["batch"],
            _ragged(signature, "m", ragged["m"] * t["tile_m"]),
            _ragged(signature, "n", ragged["n"] * t["tile_n"]),
            _ragged(signature, "k", k_even + t["tile_k"]),
            gap=4,
        ),
        _problem(signature, 3, _least(signature, "m"), _least(signature, "n"), _least(signature, "k"), gap=4),
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


def _ragged(signature: Mapping[str, Any], extent: str, whole: int) -> int:
    """Some way into the last tile."""
    least = _least(signature, extent)
    return whole - least if least == 1 or whole > least else whole


def _problem(signature: Mapping[str, Any], batch: int, m: int, n: int, k: int, gap: int) -> MatmulProblem:
    """Rows `gap` elements apart, and of an odd pitch where the signature's access is one element."""
    extents = {"m": m, "n": n, "k": k}
    along = _contiguous(signature["layout"])
    fields: dict[str, Any] = {
        name: signature[name] for name in ("layout", "dtype", "acc_dtype", "out_dtype", "allow_tf32")
    }
    for operand in "abc":
        columns = extents[along[operand]]
        if signature[f"align_{operand}"] == 1:
            # A pitch that no vector divides is what this class is for.
            pitch = columns + gap if (columns + gap) % 4 else columns + gap + 1
        else:
            pitch = columns + gap
        rows = _rows(operand, along[operand], extents)
        fields[f"ld{operand}"] = pitch
        fields[f"stride_{operand}"] = rows * pitch + gap
    nodes = tuple(node_of(structure) for structure in signature["epilogue"])
    return MatmulProblem(batch=batch, m=m, n=n, k=k, epilogue=nodes, **fields)


def _rows(operand: str, columns: str, extents: Mapping[str, int]) -> int:
    other = {"a": "mk", "b": "kn", "c": "mn"}[operand].replace(columns, "")
    return extents[other]
