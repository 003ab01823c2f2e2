"""Kernels over rings of integers."""

from __future__ import annotations

from typing import Any

from codegen.kernel import Kernel
from codegen.search.schedule import Schedule
from tests.support.kernels.cpu_helpers import SMALL_IMAD, SMALL_LIMBS

RINGS = {"int32": 32, "int64": 64}


def ring_kernel(
    layout: str = "nn", dtype: str = "int64", align: int | tuple[int, int, int] | None = None, bits: int = 0,
    rounding: str = "floor", epilogue: tuple[str, ...] = (), operator: str = "matmul", **tunables: Any,
) -> Kernel:  # fmt: skip
    widest = 16 // (RINGS[dtype] // 8)
    a, b, c = align if isinstance(align, tuple) else (align or widest,) * 3
    signature = {
        "layout": layout, "dtype": dtype, "acc_dtype": dtype, "out_dtype": dtype, "allow_tf32": False,
        "epilogue": list(epilogue), "align_a": a, "align_b": b, "align_c": c, "fraction_bits": bits,
        "rounding": rounding,
    }  # fmt: skip
    small = SMALL_LIMBS if tunables.get("algorithm") == "limbs" else SMALL_IMAD
    return Kernel.of(operator, signature, Schedule.of({**small, **tunables}))
