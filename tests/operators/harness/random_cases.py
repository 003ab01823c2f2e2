"""Random problems over the whole domain, each with a random schedule that the rules accept: exact on integers and
within the bound on normals, on the CPU and on their own extents; and nvcc compiles them.

CUKILN_TEST_SEED repeats a run's random cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from codegen.kernel import Candidate, Kernel
from codegen.targets import target
from tests.operators.harness.declarations import Declarations, RandomCases
from tests.support.fixtures.compile import LIMITS
from tests.support.kernels.compile_to_the_end import compile_to_the_end
from tests.support.kernels.random_cases import (
    SPREAD,
    SPREAD_SEEDS,
    require_right,
    seed_of_this_run,
    too_seldom,
    verify_cases,
)
from tests.support.run.each_run import turn
from workers.compile.toolchain import Toolchain
from workers.processes.processes import Processes

TABLES = {"run_seed": lambda declared: {"some": seed_of_this_run()}}
TURNS = 3
"""Of so many runs of `make test`, one on average compiles a random case of a set of declarations for a GPU."""
Cases = Sequence[tuple[str, Candidate]]
FEW, OFTEN = 12, 20
"""In `make test`: cases of a fixed seed, and of how many percent what must be among them is."""


def not_in_turn(having: Sequence[Declarations]) -> set[tuple[str, str]]:
    left = set()
    for declared in having:
        own = f"{declared.operator} {sorted(of(declared).spread)}"  # of a module of an operator
        left |= set() if turn(own, TURNS) == 0 else {(declared.operator, "some")}
    return left


LONG = {"run_seed": not_in_turn}


def of(declared: Declarations) -> RandomCases:
    assert declared.random_cases is not None
    return declared.random_cases


def properties_of(declared: Declarations, cases: Cases) -> Counter[str]:
    """How often each thing that a case can be about came up."""
    counts: Counter[str] = Counter()
    for arch, candidate in cases:
        counts += of(declared).properties(arch, candidate)
    return counts


@pytest.fixture(scope="module")
def cases_of_this_run(request: pytest.FixtureRequest) -> Mapping[str, Cases]:
    """By operator, those of this run's seed: all are verified, some compiled."""
    seed = seed_of_this_run()
    having = [declared for declared in request.module.DECLARED if declared.random_cases is not None]
    return {declared.operator: of(declared).cases(of(declared).each_run, seed) for declared in having}


def test_random_cases_are_about_what_they_often_are(declared: Declarations) -> None:
    often = {name for name, percent in of(declared).spread.items() if percent >= OFTEN}
    for seed in SPREAD_SEEDS:
        counts = properties_of(declared, of(declared).cases(FEW, seed))
        if not (missing := sorted(often - {name for name, count in counts.items() if count})):
            return
    raise AssertionError(missing)


@pytest.mark.long  # in `make test`: what they often are about, above
def test_random_cases_are_about_everything(declared: Declarations) -> None:
    for seed in SPREAD_SEEDS:
        counts = properties_of(declared, of(declared).cases(SPREAD, seed))
        if not (missing := too_seldom(counts, of(declared).spread, SPREAD)):
            return
    raise AssertionError(f"fewer than wanted: {missing}")


def test_random_cases_are_right(declared: Declarations, cases_of_this_run: Mapping[str, Cases], tmp_path: Path) -> None:
    cases = verify_cases(cases_of_this_run[declared.operator], tmp_path, seed=seed_of_this_run())
    require_right(cases, of(declared).extents)


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
def test_five_thousand_random_cases_are_right(declared: Declarations, tmp_path: Path) -> None:
    seed = seed_of_this_run()
    cases = [case for part in range(20) for case in of(declared).cases(250, seed + part)]
    cases.sort(key=lambda case: case[1].kernel.id)  # g++ compiles a kernel once for all its problems in a file
    for first in range(0, len(cases), 250):
        verified = verify_cases(cases[first : first + 250], tmp_path / str(first), seed=seed)
        require_right(verified, of(declared).extents)
    counts = properties_of(declared, cases)
    assert too_seldom(counts, of(declared).spread, len(cases)) == {}, "fewer than wanted"
    assert all(counts[name] >= least for name, least in of(declared).in_5000.items()), counts


def test_a_random_schedule_compiles(
    declared: Declarations,
    run_seed: int,
    cases_of_this_run: Mapping[str, Cases],
    toolchain: Toolchain,
    processes: Processes,
) -> None:
    require_compiled(
        [cases_of_this_run[declared.operator][run_seed % len(cases_of_this_run[declared.operator])]],
        toolchain,
        processes,
    )


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_five_hundred_random_schedules_compile(
    declared: Declarations, toolchain: Toolchain, processes: Processes
) -> None:
    require_compiled(of(declared).cases(500, seed_of_this_run()), toolchain, processes)


def test_reduced_problems_have_the_kernel_of_a_random_case(
    declared: Declarations, cases_of_this_run: Mapping[str, Cases]
) -> None:
    for _, candidate in cases_of_this_run[declared.operator]:
        reduced = declared.op.test_problems(candidate.kernel)
        kernels = {declared.op.candidate(problem, candidate.schedule).kernel for problem in reduced}
        assert kernels == {candidate.kernel}, candidate.problem


def test_a_seed_decides_the_random_cases(declared: Declarations) -> None:
    first, again, other = ([case.id for _, case in of(declared).cases(2, seed)] for seed in (5, 5, 6))
    assert first == again != other


def require_compiled(cases: Cases, toolchain: Toolchain, processes: Processes) -> None:
    by_target: dict[str, list[Kernel]] = {}
    for arch, candidate in cases:
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
        by_kernel = {
            kernel: outcome for outcomes in compiled for made in outcomes for kernel, outcome in made.outcomes.items()
        }
    assert by_kernel.keys() == {candidate.kernel.id for _, candidate in cases}
    assert {kernel: outcome.log for kernel, outcome in by_kernel.items() if outcome.status != "ok"} == {}
