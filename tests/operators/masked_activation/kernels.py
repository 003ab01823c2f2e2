"""Kernels of masked activations."""

from __future__ import annotations

from typing import Any

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.operators.masked_activation.problem import MaskedActivationProblem
from codegen.search.schedule import Schedule

NAME = "masked_activation"
WIDEST = {"float32": 4, "float16": 8, "bfloat16": 8, "int32": 4, "int64": 2}
FLOATS, RINGS = list(WIDEST)[:3], list(WIDEST)[3:]
OP = operator(NAME)
DEFAULT: dict[str, Any] = {"shape": (1000,), "where_set": {"op": "relu"}}
FUNCTIONS = ("relu", "gelu", "silu", "identity", "square", "polynomial2", "polynomial3")


def masked(*shape: int, **fields: Any) -> MaskedActivationProblem:
    """A problem of that shape, 1,000 elements where none is said: relu where the mask is set."""
    problem = OP.parse({"operator": NAME, **DEFAULT, **({"shape": shape} if shape else {}), **fields})
    assert isinstance(problem, MaskedActivationProblem)
    return problem


def vectorised(node: str, dtype: str = "float32", name: str = NAME, **tunables: int) -> Kernel:
    """`node`: mask and functions, such as `bits.relu.identity`."""
    chosen = {"algorithm": "vectorised", "threads": 64, "vector": WIDEST[dtype], "loads": 2, **tunables}
    return kernel_of(node, dtype, name, chosen)


def kernel_of(node: str, dtype: str, name: str, chosen: dict[str, Any]) -> Kernel:
    shift = {"fraction_bits": 9, "rounding": "nearest" if dtype == "int32" else "floor"} if dtype in RINGS else {}
    return Kernel.of(name, {"dtype": dtype, "node": f"masked_activation.{node}", **shift}, Schedule.of(chosen))
