"""A neighbour's library, called as a framework calls it, computes the very problem that was looked up: random pairs of
each operator, by libraries of target `cpu`. CUKILN_TEST_SEED repeats a run's."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import cukiln
from codegen.kernel import Candidate
from codegen.problem import Problem
from tests.support.kernels.compile_cache import CachingProcesses
from tests.support.kernels.cpu_calls import checked_call
from tests.support.kernels.neighbour_cases import KINDS, random_case
from tests.support.kernels.random_cases import seed_of_this_run
from tests.support.run.each_run import one_each_run
from tests.support.service.worked_api import WorkedApi
from workers.compile.toolchain import Toolchain

EACH_RUN = 2
"""Kernels in `make test`, each of another kind; `make test-long` has three of each."""
Pair = tuple[Candidate, Sequence[Problem]]


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, caching_processes: CachingProcesses, toolchain: Toolchain
) -> Iterator[WorkedApi]:
    with WorkedApi.over(tmp_path_factory.mktemp("computes"), caching_processes, toolchain) as service:
        yield service


@pytest.fixture
def client(service: WorkedApi, tmp_path: Path) -> Iterator[cukiln.Client]:
    with cukiln.Client(service.api.url, cache_dir=tmp_path, lookup_budget=60) as client:
        yield client


@one_each_run("nearest", 1)
def test_a_neighbours_library_computes_the_problem(service: WorkedApi, client: cukiln.Client) -> None:
    rng = random.Random(seed_of_this_run())
    require_right([random_case(kind, rng, 6) for kind in rng.sample([*KINDS], EACH_RUN)], service, client)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_of_every_kind(kind: str, service: WorkedApi, client: cukiln.Client) -> None:
    rng = random.Random(seed_of_this_run())
    require_right([random_case(kind, rng, 12) for _ in range(3)], service, client)


def require_right(pairs: Sequence[Pair], service: WorkedApi, client: cukiln.Client) -> None:
    pytest.importorskip("torch")  # NumPy's arrays of bfloat16 have no DLPack
    job = client.submit({"target": "cpu", "problems": [_tuned(candidate) for candidate, _ in pairs]})
    service.work()
    problems = client.wait(job, timeout=1).problems
    assert [problem.error for problem in problems] == [None] * len(pairs), problems
    for candidate, others in pairs:
        answers = client.lookup([other.canonical() for other in others], target="cpu", on_miss="nearest")  # type: ignore[misc]
        for other, answer in zip(others, answers, strict=True):
            said = f"{other.canonical()} by {candidate.schedule.as_dict()} of {candidate.problem.canonical()}"
            assert answer.record is not None, f"no neighbour for {said}"
            assert (answer.record.emulates, answer.is_of_neighbour) == ("sm_80", True)
            kernel = cukiln.load(answer.record, client=client)
            for kind in ("integer", "normal"):
                checked = checked_call(kernel, other, kind)  # type: ignore[arg-type]
                assert checked.ok, f"{kind}: {checked.sentence()}: {said}"
    for job_of_misses in client.jobs():
        client.cancel(job_of_misses.job)


def _tuned(candidate: Candidate) -> dict[str, Any]:
    return {**candidate.problem.canonical(), "search": {"schedules": [candidate.schedule.as_dict()]}}
