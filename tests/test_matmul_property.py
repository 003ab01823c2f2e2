"""Problems drawn over the whole domain, each with a random schedule that the rules accept: exact on integers and within
the bound on normals, on the CPU and on their own extents; and nvcc compiles them.

CUKILN_TEST_SEED repeats a run's draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators.matmul.problem import MatmulProblem
from codegen.search import Search
from codegen.targets import target
from tests.drawn import (
    AMPERE_ONLY,
    KINDS,
    LAYOUTS,
    MOST,
    SPREAD,
    TARGETS,
    draw_problems,
    draws,
    prove,
    require_right,
    require_spread,
    seed_of_this_run,
)
from tests.fixtures_codegen import matmul
from tests.fixtures_compile import *  # noqa: F403
from tests.fixtures_compile import LIMITS
from workers.compile_group import compile_to_the_end
from workers.processes import Processes
from workers.toolchain import Toolchain

BATCH = 25  # kernels of one g++ file and one child


def what_was_drawn(drawn: Sequence[tuple[str, Candidate]]) -> Counter[str]:
    """How often each thing that a draw can be about came up."""
    counts: Counter[str] = Counter()
    for arch, candidate in drawn:
        p, t, s = candidate.problem, candidate.schedule.as_dict(), candidate.kernel.signature_dict
        assert isinstance(p, MatmulProblem)
        tensor = "mma_k" in t
        for extent in (p.m, p.n, p.k):
            counts[
                "extent up to 16" if extent <= 16 else "extent up to 200" if extent <= MOST else "longer extent"
            ] += 1
        padded = (p.lda, p.ldb, p.ldc) != (p.stored("a")[1], p.stored("b")[1], p.stored("c")[1])
        counts.update([f"target {arch}", f"layout {p.layout}", f"inputs {p.dtype}", f"out {p.out_dtype}"])
        counts.update(["tensor cores" if tensor else "CUDA cores", f"split {t['split']}"])
        counts.update(["another raster" if t["raster"] else "raster 0", "padded rows" if padded else "packed"])
        counts.update(["batch" if p.batch > 1 else "one matrix", f"{min(len(p.epilogue), 2)} or more nodes"])
        if p.batch > 1 and 0 in (p.stride_a, p.stride_b):
            counts["a shared operand"] += 1
        for operand in "abc":
            counts[f"align_{operand} {s[f'align_{operand}']}"] += 1
        if tensor:
            counts.update([f"copy {t['copy']}", f"fragments {t['fragments']}", f"epilogue {t['epilogue_path']}"])
            counts.update([f"stages {min(t['stages'], 3)}", "constant k" if t["static_k"] else "k at run time"])
            if s["allow_tf32"]:
                counts["tf32"] += 1
    return counts


# What must have come up, in percent of the draws: what is decided by a draw's number alone nearly as often as it goes
# round, the rest well below its frequency in 9,900 draws.
WANTED = {
    "extent up to 16": 20, "extent up to 200": 60, "longer extent": 10, "target sm_75": 8, "target sm_80": 20,
    "target sm_90a": 20, "layout nn": 20, "layout nt": 20, "layout tn": 20, "layout tt": 20, "inputs float32": 30,
    "inputs float16": 15, "inputs bfloat16": 15, "inputs int8": 15, "out float32": 9, "out float16": 6,
    "out bfloat16": 6, "out int32": 3, "tensor cores": 60, "tf32": 8, "CUDA cores": 15, "split none": 19,
    "split workspace": 8, "split atomic": 8, "split stream": 4, "raster 0": 30, "another raster": 4, "batch": 20,
    "one matrix": 20, "padded rows": 30, "packed": 10, "a shared operand": 10, "0 or more nodes": 15,
    "1 or more nodes": 10, "2 or more nodes": 20, "align_a 1": 5, "align_b 1": 5, "align_c 1": 4, "align_a 4": 4,
    "align_b 4": 4, "align_c 4": 4, "align_a 8": 2, "align_b 8": 2, "align_c 8": 1, "copy cp_async": 7,
    "copy registers": 20, "fragments 1": 15, "fragments 2": 3, "epilogue direct": 11, "epilogue shared": 11,
    "stages 1": 7, "stages 2": 7, "stages 3": 2, "constant k": 8, "k at run time": 12,
}  # fmt: skip


def test_draws_are_about_everything() -> None:
    require_spread(what_was_drawn(draws(SPREAD, 1)), WANTED, SPREAD)


def test_a_hundred_draws_are_right(tmp_path: Path) -> None:
    seed = seed_of_this_run()
    proofs = prove(draws(100, seed), tmp_path, seed=seed, batch=BATCH)
    require_right(proofs, extents=4)


def test_every_problem_has_a_schedule_to_begin_with() -> None:
    """Level 0, for what was drawn and for extents that no vector divides, large and small."""
    problems = draw_problems(300, seed_of_this_run())
    for (dtype, tf32), layout, arch in product(KINDS, LAYOUTS, TARGETS):
        if arch == "sm_75" and dtype in AMPERE_ONLY:
            continue
        for m, n, k in ((1023, 1023, 1023), (17, 5001, 4099), (4096, 4096, 4096), (1, 1, 1)):
            problems.append((arch, matmul(m=m, n=n, k=k, dtype=dtype, layout=layout, allow_tf32=tf32)))
    empty = [(arch, problem, lower(problem, target(arch), Search(level=0)).why_empty) for arch, problem in problems]
    assert [one for one in empty if one[2] is not None] == [], f"of {len(problems)}"


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
def test_five_thousand_draws_are_right(tmp_path: Path) -> None:
    seed = seed_of_this_run()
    drawn: list[tuple[str, Candidate]] = []
    for part in range(20):
        proofs = prove(draws(250, seed + part), tmp_path / str(part), seed=seed, batch=BATCH)
        require_right(proofs, extents=4)
        drawn += [(proof.arch, proof.candidate) for proof in proofs]
    require_spread(what_was_drawn(drawn), WANTED, len(drawn))


def require_compiled(drawn: Sequence[tuple[str, Candidate]], toolchain: Toolchain, processes: Processes) -> None:
    by_target: dict[str, list[Kernel]] = {}
    for arch, candidate in drawn:
        kernels = by_target.setdefault(arch, [])
        if candidate.kernel not in kernels:
            kernels.append(candidate.kernel)
    groups = [
        (arch, part) for arch, ks in by_target.items() for part in (ks[i : i + 16] for i in range(0, len(ks), 16))
    ]
    with ThreadPoolExecutor(2) as pool:
        compiled = pool.map(
            lambda job: list(compile_to_the_end(job[1], target(job[0]), toolchain, processes, LIMITS)), groups
        )
        found = {kernel: one for outcomes in compiled for made in outcomes for kernel, one in made.outcomes.items()}
    assert len(found) >= 0.9 * len(drawn)
    assert {kernel: one.log for kernel, one in found.items() if one.status != "ok"} == {}


def test_drawn_schedules_compile(toolchain: Toolchain, processes: Processes) -> None:
    require_compiled(draws(16, seed_of_this_run()), toolchain, processes)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_five_hundred_drawn_schedules_compile(toolchain: Toolchain, processes: Processes) -> None:
    require_compiled(draws(500, seed_of_this_run()), toolchain, processes)


def test_a_seed_decides_the_draws() -> None:
    assert [one.id for _, one in draws(20, 5)] == [one.id for _, one in draws(20, 5)]
    assert [one.id for _, one in draws(20, 5)] != [one.id for _, one in draws(20, 6)]
