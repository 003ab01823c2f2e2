"""Reductions drawn over the whole domain, any axes of ranks 1 to 6, each with a random schedule that the rules accept:
exact on integers and within the bound on normals, on the CPU and on their own extents; and nvcc compiles them.

CUKILN_TEST_SEED repeats a run's draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.operators.reduce.problem import FUNCTIONS, MAPS, ReduceProblem
from tests.drawn import SPREAD, prove, require_right, require_spread, seed_of_this_run
from tests.drawn_reduce import draws
from tests.fixtures_compile import *  # noqa: F403
from tests.test_matmul_property import require_compiled
from workers.processes import Processes
from workers.toolchain import Toolchain

BATCH = 25  # kernels of one g++ file and one child


def what_was_drawn(drawn: Sequence[tuple[str, Candidate]]) -> Counter[str]:
    """How often each thing that a draw can be about came up."""
    counts: Counter[str] = Counter()
    for arch, candidate in drawn:
        p, t, s = candidate.problem, candidate.schedule.as_dict(), candidate.kernel.signature_dict
        assert isinstance(p, ReduceProblem)
        counts.update(
            [f"target {arch}", f"rank {len(p.shape)}", f"inputs {p.dtype}", f"out {p.out_dtype}", f"fn {p.fn}"]
        )
        counts.update([f"map {p.map}", f"algorithm {t['algorithm']}", f"split {t['split']}", f"vector {t['vector']}"])
        counts.update([f"inner {s['inner']}", f"{s['kept_axes']} kept lists", f"{s['reduced_axes']} reduced lists"])
        counts["written maps"] += p.write_map
        counts["scattered"] += bool(s["scattered"])
        counts["scattered vectors"] += bool(s["scattered"]) and s["inner"] == "kept" and int(t["vector"]) > 1
        counts["all axes"] += not p.kept
        counts["apart"] += not operator("reduce").operands(p)[0].contiguous
        counts["rows of several warps"] += t["algorithm"] == "row" and int(t["lanes"]) > 32
        counts["several rows of threads"] += t["algorithm"] == "column" and int(t["lanes"]) < int(t["threads"])
        counts["an epilogue"] += bool(p.epilogue)
    return counts


# What must have come up, in percent of the draws: what their numbers decide nearly as often as it goes round, the rest
# at about a third of how often it comes up.
WANTED = {
    **{f"target {one}": 25 for one in ("sm_90a", "sm_80", "sm_75")},
    **{f"rank {rank}": 13 for rank in range(1, 7)},
    "inputs float32": 35, "inputs float16": 15, "inputs bfloat16": 15, "inputs int32": 15,
    **{f"fn {fn}": 8 for fn in FUNCTIONS}, **{f"map {one}": 1 for one in MAPS},
    "algorithm row": 20, "algorithm column": 20, "split none": 30, "split workspace": 20, "vector 1": 25, "vector 2": 2,
    "vector 4": 3, "vector 8": 1, "inner kept": 15, "inner reduced": 15, "inner none": 5, "1 kept lists": 30,
    "2 kept lists": 5, "1 reduced lists": 25, "2 reduced lists": 5, "scattered": 3, "scattered vectors": 1,
    "written maps": 5, "all axes": 8, "apart": 25, "rows of several warps": 2, "several rows of threads": 15,
    "an epilogue": 15, "out float32": 15, "out float16": 5, "out bfloat16": 5, "out int32": 3, "out int64": 3,
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
    counts = what_was_drawn(drawn)
    assert min(counts[f"3 {kind} lists"] for kind in ("kept", "reduced")) >= 10


def test_drawn_schedules_compile(toolchain: Toolchain, processes: Processes) -> None:
    require_compiled(draws(16, seed_of_this_run()), toolchain, processes)


def test_a_seed_decides_the_draws() -> None:
    assert [one.id for _, one in draws(20, 5)] == [one.id for _, one in draws(20, 5)]
    assert [one.id for _, one in draws(20, 5)] != [one.id for _, one in draws(20, 6)]
