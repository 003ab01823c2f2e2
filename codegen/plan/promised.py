"""Inputs on which a kernel's output is promised to the bit: what its PTX gives on the CPU, a GPU must give too.

The inputs are the same in every run of a kernel: their seed is fixed. Of a kernel of which some rounding is left open
(`codegen.plan.ptx_plan.Ways.is_settled`) nothing is promised.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codegen.kernel import Kernel
from codegen.operator import Operator
from codegen.plan.verification_plan import Inputs, Kind

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


def digest_of(outputs: Iterable[NDArray[Any]]) -> str:
    """SHA-256 of the elements of the outputs, row by row, one behind the other; gaps between rows do not count."""
    digest = hashlib.sha256()
    for output in outputs:
        digest.update(np.ascontiguousarray(output).tobytes())
    return digest.hexdigest()
