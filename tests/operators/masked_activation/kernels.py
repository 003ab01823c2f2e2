"""Kernels of masked activations."""

from __future__ import annotations

from typing import Any

from codegen.kernel import Kernel
from codegen.search.schedule import Schedule

NAME = "masked_activation"
WIDEST = {"float32": 4, "float16": 8, "bfloat16": 8, "int32": 4, "int64": 2}
FLOATS, RINGS = list(WIDEST)[:3], list(WIDEST)[3:]


def vectorised(node: str, dtype: str = "float32", name: str = NAME, **tunables: int) -> Kernel:
    """`node`: mask and functions, such as `bits.relu.identity`."""
    chosen = {"algorithm": "vectorised", "threads": 64, "vector": WIDEST[dtype], "loads": 2, **tunables}
    return kernel_of(node, dtype, name, chosen)


def kernel_of(node: str, dtype: str, name: str, chosen: dict[str, Any]) -> Kernel:
    shift = {"fraction_bits": 9, "rounding": "nearest" if dtype == "int32" else "floor"} if dtype in RINGS else {}
    return Kernel.of(name, {"dtype": dtype, "node": f"masked_activation.{node}", **shift}, Schedule.of(chosen))
