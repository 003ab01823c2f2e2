"""Softmax and norms drawn over the whole domain, each with a random schedule that the rules accept: exact on integers
and within the bound on normals, on the CPU and on their own extents; and nvcc compiles them.

CUKILN_TEST_SEED repeats a run's draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from codegen.kernel import Candidate
from codegen.row_problem import RowProblem
from tests.drawn import SPREAD, prove, require_right, require_spread, seed_of_this_run
from tests.drawn_rows import draws
from tests.fixtures_compile import *  # noqa: F403
from tests.row_kernels import OPERATORS
from tests.test_matmul_property import require_compiled
from workers.processes import Processes
from workers.toolchain import Toolchain

BATCH = 50  # kernels of one g++ file and one child


def what_was_drawn(drawn: Sequence[tuple[str, Candidate]]) -> Counter[str]:
    """How often each thing that a draw can be about came up."""
    counts: Counter[str] = Counter()
    for arch, candidate in drawn:
        p, t, s = candidate.problem, candidate.schedule.as_dict(), candidate.kernel.signature_dict
        assert isinstance(p, RowProblem)
        lanes = int(t["row_threads"])
        counts.update([f"target {arch}", f"x {p.dtype}", f"out {p.out_dtype}", f"algorithm {t['algorithm']}"])
        counts["less than a warp" if lanes < 32 else "a warp" if lanes == 32 else "several warps"] += 1
        counts["one row of a block" if t["rows"] == 1 else "several rows of a block"] += 1
        counts["a part of a block's rows" if p.rows % int(t["rows"]) else "whole blocks"] += 1
        counts["whole steps" if p.columns % (lanes * int(t["vector"])) == 0 else "a part of a step"] += 1
        counts[f"vector {t['vector']}"] += 1
        counts["narrower than the class" if int(t["vector"]) < int(s["align"]) else "as the class"] += 1
        counts["one row" if p.rows == 1 else "several rows"] += 1
        counts["over 1000 columns" if p.columns > 1000 else "up to 8 columns" if p.columns <= 8 else "columns"] += 1
    return counts


# What must have come up, in percent of the draws: at about a third of how often it does.
WANTED = {
    "target sm_80": 20, "target sm_90a": 20, "target sm_75": 20, "x float32": 25, "x float16": 25, "x bfloat16": 12,
    "out float32": 12, "out float16": 12, "out bfloat16": 10, "algorithm registers": 25, "algorithm shared": 25,
    "algorithm online": 25, "less than a warp": 10, "a warp": 3, "several warps": 8, "one row of a block": 5,
    "several rows of a block": 15, "a part of a block's rows": 10, "whole blocks": 10, "a part of a step": 20,
    "whole steps": 2, "vector 1": 15, "vector 2": 4, "vector 4": 3, "vector 8": 1, "narrower than the class": 5,
    "as the class": 15, "one row": 5, "several rows": 20, "over 1000 columns": 5, "up to 8 columns": 5,
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_draws_are_about_everything(name: str) -> None:
    require_spread(what_was_drawn(draws(name, SPREAD, 1)), WANTED, SPREAD)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_hundred_draws_are_right(name: str, tmp_path: Path) -> None:
    seed = seed_of_this_run()
    proofs = prove(draws(name, 100, seed), tmp_path, seed=seed, batch=BATCH)
    require_right(proofs)


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("name", OPERATORS)
def test_five_thousand_draws_are_right(name: str, tmp_path: Path) -> None:
    seed = seed_of_this_run()
    drawn: list[tuple[str, Candidate]] = []
    for part in range(20):
        proofs = prove(draws(name, 250, seed + part), tmp_path / str(part), seed=seed, batch=BATCH)
        require_right(proofs)
        drawn += [(proof.arch, proof.candidate) for proof in proofs]
    require_spread(what_was_drawn(drawn), WANTED, len(drawn))


def test_drawn_schedules_compile(toolchain: Toolchain, processes: Processes) -> None:
    seed = seed_of_this_run()
    require_compiled([one for name in OPERATORS for one in draws(name, 6, seed)], toolchain, processes)


def test_a_seed_decides_the_draws() -> None:
    assert [one.id for _, one in draws("softmax", 20, 5)] == [one.id for _, one in draws("softmax", 20, 5)]
    assert [one.id for _, one in draws("softmax", 20, 5)] != [one.id for _, one in draws("softmax", 20, 6)]
