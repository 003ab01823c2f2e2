"""Inputs on which a kernel's output is promised to the bit: what its PTX gives on the CPU, a GPU must give too.

The inputs are the same in every run of a kernel: their seed is fixed. Of a kernel of which some rounding is left open
(`codegen.plan.ptx_plan.Ways.is_settled`) nothing is promised.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from codegen.plan.verification_plan import Inputs, Kind

if TYPE_CHECKING:  # the plan of a recorded kernel is checked where no operator is known
    from codegen.kernel import Kernel
    from codegen.operator import Operator

SEED = 20261127
PROBLEMS = 2  # of those that the plan reduces extents to: even ones, and tails
KINDS: tuple[Kind, ...] = ("integer", "normal")


@dataclass(frozen=True)
class PromisedInputs(Inputs):
    """`launch`: the launch ABI's int32 values."""

    launch: tuple[int, ...]


def promised_inputs(operator: Operator, kernel: Kernel) -> Iterator[PromisedInputs]:
    """None of a kernel that approximates, or whose bits differ from run to run."""
    if not operator.exact(kernel) or not operator.deterministic(kernel):
        return
    for number, problem in enumerate(operator.test_problems(kernel)[:PROBLEMS]):
        launch, *_ = operator.test_launches(kernel, problem)
        for place, kind in enumerate(KINDS):
            (seed,) = np.random.SeedSequence([SEED, number, place]).generate_state(1, np.uint32)
            yield PromisedInputs(problem, kind, kind == "integer", int(seed), tuple(launch))


def digest_of(arrays: Iterable[NDArray[Any]]) -> str:
    """SHA-256 of the elements of the arrays, row by row, one behind the other; gaps between rows do not count."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def digest_of_inputs(inputs: Mapping[str, NDArray[Any]]) -> str:
    """By the names of the operands. What a seed makes depends on NumPy and on the C library's functions, in the last
    bit: outputs are compared where the inputs are the same."""
    return digest_of(inputs[name] for name in sorted(inputs))
