"""What a run of a reduction's schedule does, by launch and primitive."""

from collections.abc import Mapping
from typing import Any

from codegen.counts import LaunchCounts, Primitive, load, merged, multiply, store
from codegen.dtypes import dtype
from codegen.epilogue import tensor_nodes
from codegen.operators.reduce.axes import WIDEST_BYTES
from codegen.operators.reduce.problem import ReduceProblem, size_of
from codegen.operators.reduce.space import form, geometry

WORD = 4  # bytes, of a state


def state_words(fn: str, element: str) -> int:
    """4-byte words of a state, as those of the folds in device/reduce.cuh."""
    if element == "int64":
        return 2
    if fn == "variance":
        return 3
    if fn in ("argmax", "logsumexp"):
        return 2
    return 2 if element == "int32" and fn in ("sum", "mean", "sum_of_squares") else 1


def launches(problem: ReduceProblem, t: Mapping[str, Any], products: int) -> tuple[LaunchCounts, ...]:
    """Each element is read once, in vectors. Slices leave their states, which `combine` reads."""
    p, size, vector = problem, size_of(problem), int(t["vector"])
    elements, beside = p.outputs * p.count, 1 if t["algorithm"] == "row" else vector
    reads = [
        multiply(products),
        load(size * elements * (2 if p.two_inputs else 1), size * vector),
        *([store(size * elements, size * vector)] if p.write_map else []),
    ]
    if t["split"] == "none":
        return (LaunchCounts("run", merged([*reads, *_outputs(p, beside)]), products),)
    states = WORD * state_words(p.fn, p.dtype) * geometry(p, t).slices * p.outputs
    run = LaunchCounts("run", merged([*reads, store(states, WORD * min(4, beside))]), products)
    return run, LaunchCounts("combine", merged([load(states, WORD), *_outputs(p, 1)]))


def _outputs(p: ReduceProblem, beside: int) -> list[Primitive]:
    """With their epilogue. `beside`: neighbours that a thread has."""
    size = dtype(p.out_dtype).bytes
    width = 1 if form(p).scattered else min(beside, WIDEST_BYTES // size)
    operands = [dtype(element).bytes for _, _, element in tensor_nodes(p.epilogue, p.out_dtype)]
    return [store(size * p.outputs, size * width), *(load(each * p.outputs, each * width) for each in operands)]
