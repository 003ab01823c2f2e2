"""What tests of masked_activation share: problems by a few fields, kernels by a few words."""

from __future__ import annotations

from typing import Any

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.operators.masked_activation.problem import MaskedActivationProblem
from codegen.schedule import Schedule

WIDEST = {"float32": 4, "float16": 8, "bfloat16": 8}
POLYNOMIAL = {"op": "polynomial", "coefficients": [0.5, -1.0, 0.25, 0.125]}


def masked(*shape: int, **fields: Any) -> MaskedActivationProblem:
    """A problem of that shape, 1,000 elements where none is said: relu where the mask is set."""
    given = {"operator": "masked_activation", "shape": shape or (1000,), "where_set": {"op": "relu"}, **fields}
    found = operator("masked_activation").parse(given)
    assert isinstance(found, MaskedActivationProblem)
    return found


def vectorised(node: str, dtype: str = "float32", name: str = "masked_activation", **tunables: int) -> Kernel:
    """`node`: mask and functions, such as `bits.relu.identity`."""
    chosen = {"algorithm": "vectorised", "threads": 64, "vector": WIDEST[dtype], "loads": 2, **tunables}
    return _kernel(node, dtype, name, chosen)


def gather_scatter(node: str, dtype: str = "float32", name: str = "masked_activation", threads: int = 64) -> Kernel:
    return _kernel(node, dtype, name, {"algorithm": "gather_scatter", "threads": threads})


def _kernel(node: str, dtype: str, name: str, chosen: dict[str, Any]) -> Kernel:
    return Kernel.of(name, {"dtype": dtype, "node": f"masked_activation.{node}"}, Schedule.of(chosen))
