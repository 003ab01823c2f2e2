"""What tests of softmax and the norms share: problems by a few fields, kernels by a few words."""

from __future__ import annotations

from typing import Any

from codegen.alignment import classes
from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.rows.problem import NormProblem, RowProblem
from codegen.search.schedule import Schedule

OPERATORS = ("softmax", "layer_norm", "rms_norm")
# Small ones: rows of a warp, of half of one, of the whole block, of two warps, and of a single thread.
SCHEDULES: dict[str, dict[str, int | str]] = {
    "registers, a warp": {"algorithm": "registers", "row_threads": 32, "rows": 2, "steps": 3},
    "registers, half a warp": {"algorithm": "registers", "row_threads": 16, "rows": 4, "steps": 1},
    "registers, a block": {"algorithm": "registers", "row_threads": 128, "rows": 1, "steps": 2},
    "registers, a thread": {"algorithm": "registers", "row_threads": 1, "rows": 32, "steps": 5},
    "shared, a warp": {"algorithm": "shared", "row_threads": 32, "rows": 2, "steps": 5, "loads": 2},
    "shared, two warps of four": {"algorithm": "shared", "row_threads": 64, "rows": 2, "steps": 3, "loads": 4},
    "online, a warp": {"algorithm": "online", "row_threads": 32, "rows": 2, "loads": 2},
    "online, a block": {"algorithm": "online", "row_threads": 128, "rows": 1, "loads": 1},
}


def problem(name: str, *shape: int, **fields: Any) -> Any:
    """A problem of that shape, 6 rows of 40 elements where none is said."""
    problem = operator(name).parse({"operator": name, "shape": shape or (6, 40), **fields})
    assert isinstance(problem, RowProblem)
    return problem


def kernel(
    name: str,
    schedule: str,
    dtype: str = "float32",
    out_dtype: str = "",
    align: int = 0,
    *,
    scale: bool = True,
    shift: bool = True,
    operator_name: str = "",
    **tunables: int | str,
) -> Kernel:
    """`align`: default the widest access of the dtype, which is then the kernel's vector, too."""
    norm = issubclass(operator(name).problem_type, NormProblem)
    align = align or classes(dtype, quads=False)[0]
    signature = {
        "dtype": dtype, "out_dtype": out_dtype or dtype, "align": align,
        "scale": norm and scale, "shift": norm and shift,
    }  # fmt: skip
    chosen = {"vector": align, **SCHEDULES[schedule], **tunables}
    return Kernel.of(operator_name or name, signature, Schedule.of(chosen))
