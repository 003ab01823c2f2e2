"""Masked activations drawn over the whole domain, each with a random schedule that the rules accept: exact on integers
and within the bound on normals, on the CPU and on their own extents; and nvcc compiles them.

CUKILN_TEST_SEED repeats a run's draws.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from codegen.dtypes import dtype
from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.operators.masked_activation.problem import MaskedActivationProblem
from codegen.operators.masked_activation.space import GATHER_SCATTER, VECTORISED
from codegen.rules import Accepted
from codegen.schedule import Schedule
from codegen.targets import target
from tests.drawn import SPREAD, prove, require_right, require_spread, seed_of_this_run
from tests.fixtures_compile import *  # noqa: F403
from tests.masked_kernels import masked
from tests.test_matmul_property import require_compiled
from workers.processes import Processes
from workers.toolchain import Toolchain

BATCH = 50  # kernels of one g++ file and one child
TYPES = ("float32", "float16", "bfloat16")
TARGETS = ("sm_80", "sm_90a", "sm_75")
# Of the second scalars' last bits fp32 and float64 must have all: coefficients are multiples of 1/8.
FUNCTIONS: tuple[dict[str, Any], ...] = (
    {"op": "relu"}, {"op": "gelu"}, {"op": "silu"}, {"op": "identity"}, {"op": "square"},
    {"op": "polynomial", "coefficients": [1.0, -0.5, 0.125]},
    {"op": "polynomial", "coefficients": [-2.0, 0.25, 1.5, -0.125]},
)  # fmt: skip
LOADS = (1, 2, 4, 8)
RANKS = (1, 2, 3, 4, 5, 6)
MOST_ELEMENTS = 20_000
ATTEMPTS = 1000


def draws(count: int, seed: int) -> list[tuple[str, Candidate]]:
    """Targets and candidates."""
    rng = random.Random(seed)
    start = rng.randrange(10_000)
    return [_draw(start + number, random.Random(rng.getrandbits(64))) for number in range(count)]


def _draw(number: int, rng: random.Random) -> tuple[str, Candidate]:
    op, arch = operator("masked_activation"), TARGETS[number // 5 % 3]
    tunables = GATHER_SCATTER if number % 5 == 0 else VECTORISED
    while True:
        problem = _problem(number, rng)
        for _ in range(ATTEMPTS):
            values = {one.name: rng.choice(one.allowed) for one in tunables}
            if "loads" in values:
                values["loads"] = LOADS[number % 5 - 1]
            if "vector" in values and number % 4 == 1:
                values["vector"] = 16 // dtype(problem.dtype).bytes
            schedule = Schedule.of(values)
            if isinstance(op.rules(problem, schedule, target(arch)), Accepted):
                return arch, op.candidate(problem, schedule)


def _problem(number: int, rng: random.Random) -> MaskedActivationProblem:
    rank, left = RANKS[number % 6], rng.choice((40, 1000, MOST_ELEMENTS))
    shape = []
    for axis in range(rank):
        shape.append(rng.randint(1, max(1, left if axis == rank - 1 else round(left ** (1 / (rank - axis))))))
        left //= shape[-1]
    return masked(
        *shape,
        dtype=TYPES[number % 3],
        mask=("bits", "bytes")[number // 2 % 2],
        where_set=FUNCTIONS[number % 7],
        where_clear=rng.choice(FUNCTIONS),
    )


def what_was_drawn(drawn: Sequence[tuple[str, Candidate]]) -> Counter[str]:
    """How often each thing that a draw can be about came up."""
    counts: Counter[str] = Counter()
    for arch, candidate in drawn:
        p, t = candidate.problem, candidate.schedule.as_dict()
        assert isinstance(p, MaskedActivationProblem)
        counts.update([f"target {arch}", f"dtype {p.dtype}", f"mask {p.mask}", f"algorithm {t['algorithm']}"])
        counts.update([f"set {p.where_set.structure}", f"clear {p.where_clear.structure}"])
        counts["whole words" if p.elements % 32 == 0 else "a part of a word"] += 1
        counts["less than a word" if p.elements < 32 else "words"] += 1
        if "vector" in t:
            counts.update([f"vector {t['vector']}", f"loads {t['loads']}"])
            counts["whole vectors" if p.elements % int(t["vector"]) == 0 else "a part of a vector"] += 1
    return counts


# What must have come up, in percent of the draws: at most a third of how often it does, less where that varies more.
WANTED = {
    "target sm_80": 20, "target sm_90a": 20, "target sm_75": 20, "dtype float32": 25, "dtype float16": 25,
    "dtype bfloat16": 25, "mask bits": 40, "mask bytes": 40, "algorithm vectorised": 60, "algorithm gather_scatter": 15,
    "a part of a word": 30, "less than a word": 3, "words": 30, "vector 1": 5, "vector 2": 5, "vector 4": 5,
    "vector 8": 1, "loads 1": 5, "loads 2": 5, "loads 4": 5, "loads 8": 3, "a part of a vector": 2,
    "whole vectors": 10,
    **{f"set {name}": 10 for name in ("relu", "gelu", "silu", "identity", "square", "polynomial2", "polynomial3")},
    **{f"clear {name}": 3 for name in ("relu", "gelu", "silu", "identity", "square", "polynomial2", "polynomial3")},
}  # fmt: skip


def test_draws_are_about_everything() -> None:
    require_spread(what_was_drawn(draws(SPREAD, 1)), WANTED, SPREAD)


def test_a_hundred_draws_are_right(tmp_path: Path) -> None:
    seed = seed_of_this_run()
    proofs = prove(draws(100, seed), tmp_path, seed=seed, batch=BATCH)
    require_right(proofs)


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
def test_five_thousand_draws_are_right(tmp_path: Path) -> None:
    seed = seed_of_this_run()
    drawn: list[tuple[str, Candidate]] = []
    for part in range(20):
        proofs = prove(draws(250, seed + part), tmp_path / str(part), seed=seed, batch=BATCH)
        require_right(proofs)
        drawn += [(proof.arch, proof.candidate) for proof in proofs]
    require_spread(what_was_drawn(drawn), WANTED, len(drawn))


def test_drawn_schedules_compile(toolchain: Toolchain, processes: Processes) -> None:
    require_compiled(draws(12, seed_of_this_run()), toolchain, processes)


def test_a_seed_decides_the_draws() -> None:
    assert [one.id for _, one in draws(20, 5)] == [one.id for _, one in draws(20, 5)]
    assert [one.id for _, one in draws(20, 5)] != [one.id for _, one in draws(20, 6)]
