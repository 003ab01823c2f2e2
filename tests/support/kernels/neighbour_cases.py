"""Random pairs of problems of one signature: what is tuned, by a random schedule, and neighbours that it answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from pydantic import ValidationError

from codegen.canonical import canonical_json
from codegen.errors import CodegenError
from codegen.kernel import Candidate
from codegen.lower import lower
from codegen.neighbours import place_of
from codegen.operand import Operand
from codegen.operators import operator
from codegen.problem import Problem
from codegen.search.search import Search
from codegen.targets import target
from tests.operators.attention import random_cases as attention
from tests.operators.conv2d import random_cases as convolutions
from tests.operators.conv2d import ring_cases as ring_convolutions
from tests.operators.conv2d import winograd_cases
from tests.operators.masked_activation import random_cases as masked_activation
from tests.operators.matmul import ring_cases as ring_matmul
from tests.operators.mla import random_cases as mla
from tests.operators.reduce import random_cases as reduce
from tests.operators.rows import random_cases as rows
from tests.support.kernels import random_cases as matmul

MakeCases = Callable[[int, int], list[tuple[str, Candidate]]]
CONVOLUTIONS = ("conv2d", "conv2d_dgrad", "conv2d_wgrad")
KINDS: Mapping[str, MakeCases] = {
    "matmul": matmul.random_cases,
    "matmul over a ring": ring_matmul.random_cases,
    **{name: partial(convolutions.random_cases, name=name) for name in CONVOLUTIONS},
    **{f"{name} over a ring": partial(ring_convolutions.random_cases, name=name) for name in CONVOLUTIONS},
    **{f"{name} by winograd": partial(winograd_cases.random_cases, name=name) for name in CONVOLUTIONS[:2]},
    **{name: partial(rows.random_cases, name) for name in ("softmax", "layer_norm", "rms_norm")},
    "reduce": reduce.random_cases,
    "masked_activation": masked_activation.random_cases,
    **{
        f"attention, {lengths}": partial(attention.random_cases, lengths=lengths)
        for lengths in ("dense", "ragged", "paged")
    },
    "mla": mla.random_cases,
}
CPU = target("cpu")
DERIVED = ("strides", "ld", "stride_", "mask_length")
"""Fields, by how they begin or end, that follow of the extents where nothing else is said."""
WORDS: Mapping[str, tuple[Any, ...]] = {
    "winograd": (None, "f2", "f4"),
    "window_left": (None, 0, 3, 40),
    "window_right": (None, 0, 5),
    "truncation": ({"policy": "exact_once"}, {"policy": "tolerance", "ulp": 2}, {"policy": "tolerance", "ulp": 500}),
}
MOST_ELEMENTS, MOST_FLOPS = 60_000, 4e6
ATTEMPTS = 300


def random_case(kind: str, rng: random.Random, neighbours: int) -> tuple[Candidate, list[Problem]]:
    """What is tuned for target cpu, and so many others or fewer that it is right for, at least one."""
    while True:
        for _, candidate in KINDS[kind](3, rng.randrange(2**31)):
            if kernel_of(candidate.problem, candidate) is None:  # it is of another architecture
                continue
            if problems := list(islice(_neighbours(candidate, rng), neighbours)):
                return candidate, problems


def kernel_of(problem: Problem, tuned: Candidate) -> Candidate | None:
    """The problem's candidate of the tuned one's schedule and kernel."""
    try:
        lowered = lower(problem, CPU, Search(schedules=[tuned.schedule.as_dict()]))
    except CodegenError:
        return None
    return next((made for made in lowered.candidates if made.kernel == tuned.kernel), None)


def _neighbours(tuned: Candidate, rng: random.Random) -> Iterator[Problem]:
    own = operator(tuned.problem.operator)
    # By what they are stored as: a window of 0 on the right is causal.
    place, seen = place_of(own, tuned.problem), {canonical_json(tuned.problem.canonical())}
    for _ in range(ATTEMPTS):
        problem = _varied(tuned.problem, rng)
        if problem is None or place_of(own, problem).signature != place.signature:
            continue
        if (stored := canonical_json(problem.canonical())) in seen:
            continue
        seen.add(stored)
        operands = own.operands(problem)
        if sum(operand.elements for operand in operands) > MOST_ELEMENTS or not all(map(_is_apart, operands)):
            continue
        candidate = kernel_of(problem, tuned)
        if candidate is not None and own.cost(problem, candidate.schedule).flops <= MOST_FLOPS:
            yield problem


def _is_apart(operand: Operand) -> bool:
    """Whether no two of its elements are one in memory, but for a whole axis that repeats: a test could not fill it."""
    reached = 0
    for stride, extent in sorted(zip(operand.strides, operand.shape, strict=True)):
        if stride and extent > 1:
            if stride <= reached:
                return False
            reached += stride * (extent - 1)
    return True


def _varied(problem: Problem, rng: random.Random) -> Problem | None:
    """Some of its fields are others; None: it is no problem."""
    fields = problem.canonical()
    derived = {name for name in fields if name.endswith(DERIVED[0]) or name.startswith(DERIVED)}
    names = [name for name in fields if name not in derived]
    chosen = {*rng.sample(names, rng.randint(1, 4))}
    kept = {name: value for name, value in fields.items() if name not in derived or rng.random() < 0.1}
    for name in sorted(chosen & kept.keys()):
        kept[name] = rng.choice(WORDS[name]) if name in WORDS else _other(kept[name], rng)
    try:
        return operator(problem.operator).parse(kept)
    except (ValidationError, CodegenError):
        return None


def _other(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        other = rng.choice((value * 2, value // 2, value + 1, value - 1, value + 8, value - 8, value * 3, 1, value))
        return max(min(value, 1), other + rng.choice((0, 0, 0, 13)))
    if isinstance(value, float):
        return value * rng.choice((0.5, 2.0))
    if isinstance(value, list):
        return [_other(part, rng) for part in value]
    if isinstance(value, dict):  # a node of an epilogue: its numbers are scalars of a call
        return {name: _other(part, rng) if isinstance(part, float | list) else part for name, part in value.items()}
    return value
