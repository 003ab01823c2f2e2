"""Random masked activations, with random schedules."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from codegen.dtypes import dtype
from codegen.kernel import Candidate
from codegen.operators.masked_activation import GATHER_SCATTER
from codegen.operators.masked_activation import VECTORISED as KNOBS
from codegen.operators.masked_activation.problem import MaskedActivationProblem
from codegen.search.rules import Accepted
from codegen.search.schedule import Schedule
from codegen.targets import target
from tests.operators.masked_activation.kernels import FLOATS, FUNCTIONS, OP, RINGS, masked

CUBIC = {"op": "polynomial", "coefficients": [-2.0, 0.25, 1.5, -0.125]}

TYPES, TARGETS = (*FLOATS, "int64", "int32"), ("sm_80", "sm_90a", "sm_75")
# Of the second scalars' last bits fp32 and float64 must have all: coefficients are multiples of 1/8.
DRAWN_FUNCTIONS: tuple[dict[str, Any], ...] = (
    {"op": "relu"}, {"op": "gelu"}, {"op": "silu"}, {"op": "identity"}, {"op": "square"},
    {"op": "polynomial", "coefficients": [1.0, -0.5, 0.125]}, CUBIC,
)  # fmt: skip
LOADS = (1, 2, 4, 8)
RANKS = (1, 2, 3, 4, 5, 6)
MOST_ELEMENTS = 20_000
ATTEMPTS = 1000


def random_cases(count: int, seed: int) -> list[tuple[str, Candidate]]:
    """Targets and candidates."""
    rng = random.Random(seed)
    start = rng.randrange(10_000)
    return [_case(start + number, random.Random(rng.getrandbits(64))) for number in range(count)]


def _case(number: int, rng: random.Random) -> tuple[str, Candidate]:
    arch = TARGETS[number // 5 % 3]
    tunables = GATHER_SCATTER if number % 5 == 0 else KNOBS
    while True:
        problem = _problem(number, rng)
        for _ in range(ATTEMPTS):
            values = {tunable.name: rng.choice(tunable.allowed) for tunable in tunables}
            if "loads" in values:
                values["loads"] = LOADS[number % 5 - 1]
            if "vector" in values and number % 4 == 1:
                values["vector"] = 16 // dtype(problem.dtype).bytes
            schedule = Schedule.of(values)
            if isinstance(OP.rules(problem, schedule, target(arch)), Accepted):
                return arch, OP.candidate(problem, schedule)


def _problem(number: int, rng: random.Random) -> MaskedActivationProblem:
    rank, left = RANKS[number % 6], rng.choice((40, 1000, MOST_ELEMENTS))
    element = TYPES[number // 3 % 5]
    ring = element in RINGS
    functions = [f for f in DRAWN_FUNCTIONS if not ring or f["op"] not in ("gelu", "silu")]
    bits = rng.choice((3, 9, 18, 28, *((40, 60) if element == "int64" else ())))
    shape = []
    for axis in range(rank):
        shape.append(rng.randint(1, max(1, left if axis == rank - 1 else round(left ** (1 / (rank - axis))))))
        left //= shape[-1]
    return masked(
        *shape,
        dtype=element,
        mask=("bits", "bytes")[number // 2 % 2],
        where_set=functions[number % len(functions)],
        where_clear=rng.choice(functions),
        **({"fraction_bits": bits, "rounding": rng.choice(("floor", "nearest"))} if ring else {}),
    )


def properties(arch: str, candidate: Candidate) -> Counter[str]:
    p, t = candidate.problem, candidate.schedule.as_dict()
    assert isinstance(p, MaskedActivationProblem)
    counts = Counter([f"target {arch}", f"dtype {p.dtype}", f"mask {p.mask}", f"algorithm {t['algorithm']}"])
    counts.update([f"set {p.where_set.structure}", f"clear {p.where_clear.structure}"])
    counts["whole words" if p.elements % 32 == 0 else "a part of a word"] += 1
    counts["less than a word" if p.elements < 32 else "words"] += 1
    if "vector" in t:
        counts.update([f"vector {t['vector']}", f"loads {t['loads']}"])
        counts["whole vectors" if p.elements % int(t["vector"]) == 0 else "a part of a vector"] += 1
    return counts


# At most a third of how often it comes up, less where that varies more.
SPREAD = {
    "target sm_80": 20, "target sm_90a": 20, "target sm_75": 20, "dtype float32": 12, "dtype float16": 12,
    "dtype bfloat16": 12, "dtype int32": 12, "dtype int64": 12, "mask bits": 40, "mask bytes": 40,
    "algorithm vectorised": 60, "algorithm gather_scatter": 15,
    "a part of a word": 30, "less than a word": 3, "words": 30, "vector 1": 5, "vector 2": 5, "vector 4": 5,
    "vector 8": 1, "loads 1": 5, "loads 2": 5, "loads 4": 5, "loads 8": 3, "a part of a vector": 2,
    "whole vectors": 10, **{f"set {name}": 4 for name in FUNCTIONS}, **{f"clear {name}": 2 for name in FUNCTIONS},
}  # fmt: skip
