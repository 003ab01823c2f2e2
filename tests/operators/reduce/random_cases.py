"""Random reductions over the whole domain, each with one accepted schedule.

What a case is about (dtype, rank, function, layout, split) goes round in steps that share no factor, so that a hundred
random cases have all of it; the extents, the axes and the rest are chance.
"""

from __future__ import annotations

import math
import random
from itertools import islice
from typing import Any

from codegen.epilogue import MAX_NODES
from codegen.kernel import Candidate
from codegen.operand import packed_strides
from codegen.operators import operator
from codegen.operators.reduce.problem import FLOATS, FUNCTIONS, MAPS, OF_INT64, ReduceProblem, allowed_outs
from codegen.operators.reduce.space import POWERS
from codegen.search.rules import Accepted
from codegen.search.schedule import Schedule
from codegen.targets import target

DTYPES = ("float32", "float16", "bfloat16", "float32", "int32")
RANKS = (1, 2, 3, 4, 5, 6)
LAYOUTS = ("packed", "packed", "rows apart", "permuted", "packed", "every other", "permuted")
AXES = ("any", "last", "first", "all", "every other", "middle", "any", "every other", "last", "first", "any")
TARGETS = ("sm_90a", "sm_80", "sm_75")
NODES = (0, 1, 0, 2, MAX_NODES)
EVERY_NODE: list[dict[str, Any]] = [
    {"op": "residual"}, {"op": "mask"}, {"op": "scale", "value": 0.5}, {"op": "relu"}, {"op": "gelu"}, {"op": "silu"},
    {"op": "leaky_relu", "slope": 0.25}, {"op": "clip", "lo": -8.0, "hi": 50.0}, {"op": "tanh"}, {"op": "sigmoid"},
    {"op": "cast", "dtype": "float16"}, {"op": "cast", "dtype": "bfloat16"},
]  # fmt: skip
MOST_ELEMENTS = 20_000
ATTEMPTS = 4000


def random_cases(count: int, seed: int) -> list[tuple[str, Candidate]]:
    """Targets and candidates."""
    rng = random.Random(seed)
    start = rng.randrange(10_000)
    return [_case(start + number, random.Random(rng.getrandbits(64))) for number in range(count)]


def _case(number: int, rng: random.Random) -> tuple[str, Candidate]:
    arch = TARGETS[number % 3]
    while True:
        candidate = _candidate(random_problem(number, rng), arch, ("none", "workspace")[number // 3 % 2], rng)
        if candidate is not None:
            return arch, candidate


def random_problem(number: int, rng: random.Random) -> ReduceProblem:
    element, rank, fn = DTYPES[number % 5], RANKS[number % 6], FUNCTIONS[number // 2 % 8]
    if element == "int32" and fn in OF_INT64 and rng.random() < 0.6:
        element = "int64"
    chosen = "identity" if element in ("int32", "int64") or fn == "argmax" else rng.choice(MAPS)
    shape = _shape(rank, rng)
    axes = _axes(AXES[number % 11], rank, rng)
    out = rng.choice(allowed_outs(element, fn))
    nodes = rng.choices(EVERY_NODE, k=NODES[number // 7 % 5]) if out in FLOATS else []
    fields: dict[str, Any] = {
        "shape": shape, "axes": axes, "strides": _strides(LAYOUTS[number % 7], shape, rng), "dtype": element, "fn": fn,
        "map": chosen, "write_map": chosen != "identity" and rng.random() < 0.5, "out_dtype": out, "epilogue": nodes,
    }  # fmt: skip
    problem = operator("reduce").parse({"operator": "reduce", **fields})
    assert isinstance(problem, ReduceProblem)
    return problem


def _shape(rank: int, rng: random.Random) -> list[int]:
    while True:
        most = round(MOST_ELEMENTS ** (1.0 / rank))
        grain = rng.choice((1, 1, 2, 4, 8))
        shape = [1 if rng.random() < 0.1 else rng.randint(2, max(2, 2 * most)) for _ in range(rank)]
        shape[-1] = max(grain, shape[-1] // grain * grain)
        if math.prod(shape) <= MOST_ELEMENTS:
            return shape


def _axes(kind: str, rank: int, rng: random.Random) -> list[int]:
    if kind == "all":
        return list(range(rank))
    if kind == "last":
        return [rng.choice((-1, rank - 1))]
    if kind == "first":
        return list(range(rng.randint(1, max(1, rank - 1))))
    if kind == "every other":
        return list(range(rng.randrange(2) if rank > 1 else 0, rank, 2))
    if kind == "middle" and rank > 2:
        return [rng.randint(1, rank - 2)]
    return rng.sample(range(rank), rng.randint(1, rank))


def _strides(kind: str, shape: list[int], rng: random.Random) -> list[int] | None:
    if kind == "packed":
        return None
    order = list(range(len(shape)))
    if kind == "permuted":
        rng.shuffle(order)
    packed = packed_strides([shape[axis] for axis in order])
    values = [0] * len(shape)
    gap = rng.choice((1, 2, 3))
    for place, axis in enumerate(order):
        apart = {"permuted": 1, "every other": 2}.get(kind, gap if place + 1 < len(shape) else 1)
        values[axis] = packed[place] * apart
    return values


def _candidate(problem: ReduceProblem, arch: str, split: str, rng: random.Random) -> Candidate | None:
    """A random schedule that the rules accept, in slices or not where there is something to divide."""
    op, where = operator("reduce"), target(arch)
    steps = problem.count
    split = "none" if steps < 2 else split

    def random_schedule() -> Schedule:
        threads = rng.choice((64, 64, 128, 256, 512))
        return Schedule.of({
            "algorithm": rng.choice(("row", "column")), "threads": threads, "lanes": rng.choice(POWERS[:10]),
            "vector": rng.choice((8, 4, 2, 1)), "unroll": rng.choice((1, 2, 4, 8)), "split": split,
            "slices": 1 if split == "none" else rng.choice((2, 3, 5, rng.randint(2, max(2, steps)))),
        })  # fmt: skip

    accepted = (
        schedule
        for schedule in (random_schedule() for _ in range(ATTEMPTS))
        if isinstance(op.rules(problem, schedule, where), Accepted)
    )
    # What loads whole vectors is the rarer, and comes first.
    several = list(islice(accepted, 4))
    several.sort(key=lambda schedule: -int(schedule.get("vector")))
    return op.candidate(problem, several[0]) if several else None
