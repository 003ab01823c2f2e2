"""What tests of reduce share: problems by a few fields, kernels by a few words."""

from __future__ import annotations

from typing import Any

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.operators.reduce.problem import OF_TWO, ReduceProblem, allowed_outs
from codegen.search.schedule import Schedule

SCHEDULE: dict[str, int | str] = {
    "algorithm": "row", "threads": 64, "lanes": 32, "vector": 1, "unroll": 2, "split": "none"
}  # fmt: skip


def reduction(**fields: Any) -> ReduceProblem:
    """A problem; the columns of a matrix of 60 x 48 are summed where nothing else is said."""
    problem = operator("reduce").parse({"operator": "reduce", "shape": [60, 48], "axes": [0], **fields})
    assert isinstance(problem, ReduceProblem)
    return problem


def kernel(words: dict[str, Any], operator: str = "reduce", **tunables: Any) -> Kernel:
    """`words`: what differs from the sum of rows of fp32, read one element at a time."""
    signature: dict[str, Any] = {
        "dtype": "float32", "fn": "sum", "map": "identity", "write_map": False, "epilogue": [],
        "inner": "reduced", "align": 1, "scattered": False, "kept_axes": 1, "reduced_axes": 1, **words,
    }  # fmt: skip
    signature["two_inputs"] = signature["map"] in OF_TWO
    signature.setdefault("out_dtype", allowed_outs(signature["dtype"], signature["fn"])[0])
    return Kernel.of(operator, signature, Schedule.of({**SCHEDULE, **tunables}))
