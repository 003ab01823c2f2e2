"""What tests of codegen share: problems by a few fields, and one kernel of a problem."""

from __future__ import annotations

from typing import Any

from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators import operator
from codegen.operators.matmul.problem import MatmulProblem
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.targets import Target, target

EVERY_NODE: list[dict[str, Any]] = [
    {"op": "bias", "axis": "n"}, {"op": "bias", "axis": "m"}, {"op": "residual"}, {"op": "mask"},
    {"op": "scale", "value": 0.5}, {"op": "relu"}, {"op": "leaky_relu", "slope": 0.25},
    {"op": "clip", "lo": -8.0, "hi": 50.0}, {"op": "gelu"}, {"op": "silu"}, {"op": "tanh"}, {"op": "sigmoid"},
    {"op": "cast", "dtype": "float16"}, {"op": "cast", "dtype": "bfloat16"},
    {"op": "masked_activation", "mask": "bytes", "where_set": {"op": "silu"}, "where_clear": {"op": "relu"}},
]  # fmt: skip


def matmul(**fields: Any) -> MatmulProblem:
    """A matmul problem, 64 x 64 x 64 where nothing else is said."""
    problem = operator("matmul").parse({"operator": "matmul", "m": 64, "n": 64, "k": 64, **fields})
    assert isinstance(problem, MatmulProblem)
    return problem


def default_candidate(problem: MatmulProblem, arch: str = "sm_90a", **changes: int | str) -> Candidate:
    """The level-0 candidate, with some tunables changed."""
    space = operator("matmul").space(problem, target(arch), Search(level=0))
    return operator("matmul").candidate(problem, Schedule.of({**space.by_index(0).as_dict(), **changes}))


def kernels(count: int, arch: str = "sm_90a", **fields: Any) -> list[Kernel]:
    """That many distinct kernels of one problem."""
    lowered = lower(
        matmul(**{"m": 1024, "n": 1024, "k": 1024, **fields}), target(arch), Search(level=2, limit=4 * count)
    )
    distinct = {candidate.kernel.id: candidate.kernel for candidate in lowered.candidates}
    return list(distinct.values())[:count]


def fp32_gflops(sheet: Target) -> float:
    """Peak of fused multiply-adds in fp32, 2 operations per lane and clock."""
    return 2e-3 * sheet.sm_count * sheet.fp32_lanes_per_sm * sheet.clock_mhz


def tensor_gflops(sheet: Target, dtype: str) -> float:
    """Published peak of the tensor cores, 2 operations per multiply-add."""
    return 2e-3 * sheet.sm_count * sheet.tensor_macs[dtype] * sheet.tensor_clock_mhz
