"""Random softmax and norm problems over the whole domain, each with one accepted schedule.

What a case is about (types, target, algorithm, length of the rows) goes round in steps that share no factor; the
extents and the rest are chance.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.rows.operator import KNOBS
from codegen.rows.problem import RowProblem
from codegen.search.rules import Accepted
from codegen.search.schedule import Schedule, Value
from codegen.targets import target

TYPES = ("float32", "float16", "bfloat16", "float16", "float32")
TARGETS = ("sm_80", "sm_90a", "sm_75")
# Up to how many elements a row has, and what it is a multiple of.
LENGTHS = (8, 100, 1000, 6000)
GRAINS = (1, 8, 2, 4, 3, 16, 1)
# All of them leave results exact (`codegen/rows/reference.py`), and each in its own way.
EPSILONS = (12.0, 1e-5, 3.0, 0.1, 1e-6, 0.0)
MOST_ELEMENTS = 40_000
ATTEMPTS = 3000


def random_cases(name: str, count: int, seed: int) -> list[tuple[str, Candidate]]:
    """Targets and candidates of one operator."""
    rng = random.Random(seed)
    start = rng.randrange(10_000)
    return [_case(name, start + number, random.Random(rng.getrandbits(64))) for number in range(count)]


def _case(name: str, number: int, rng: random.Random) -> tuple[str, Candidate]:
    arch = TARGETS[number // 5 % 3]
    while True:
        problem = _problem(name, number, rng)
        candidate = _candidate(problem, arch, [*KNOBS][number % 3], rng)
        if candidate is not None:
            return arch, candidate


def _problem(name: str, number: int, rng: random.Random) -> RowProblem:
    grain, most = GRAINS[number % 7], LENGTHS[number // 2 % 4]
    columns = max(grain, rng.randint(most // 4, most) // grain * grain)
    leading = [rng.randint(1, 5) for _ in range(rng.randint(0, 5))]
    while math.prod(leading) * columns > MOST_ELEMENTS:
        leading.pop()
    fields: dict[str, Any] = {"shape": [*leading, columns], "dtype": TYPES[number % 5]}
    fields["out_dtype"] = rng.choice(("float32", "float16", "bfloat16", fields["dtype"]))
    if name != "softmax":
        epsilon = EPSILONS[number // 3 % 6]
        # A row of equal elements has no distance to divide by: without epsilon the result is NaN.
        fields["epsilon"] = epsilon if epsilon or columns > 3 else 12.0
        fields |= {"scale": rng.random() < 0.5, "shift": rng.random() < 0.5}
    problem = operator(name).parse({"operator": name, **fields})
    assert isinstance(problem, RowProblem)
    return problem


def _candidate(problem: RowProblem, arch: str, algorithm: str, rng: random.Random) -> Candidate | None:
    """A random accepted schedule of that algorithm."""
    own, where = operator(problem.operator), target(arch)
    lists: dict[str, Sequence[Value]] = {knob.name: knob.allowed for knob in KNOBS[algorithm]}
    wide = rng.random() < 0.4  # few rows have so wide a class: chance alone would hardly ever meet one
    for attempt in range(ATTEMPTS):
        chosen = {name: rng.choice(values) for name, values in lists.items()}
        if wide and attempt < ATTEMPTS // 4:
            chosen["vector"] = 8
        if "steps" in chosen:
            per_step = int(chosen["row_threads"]) * int(chosen["vector"])
            chosen["steps"] = -(-problem.columns // per_step) + rng.choice((0, 0, 1))
        schedule = Schedule.of(chosen)
        if isinstance(own.rules(problem, schedule, where), Accepted):
            return own.candidate(problem, schedule)
    return None
