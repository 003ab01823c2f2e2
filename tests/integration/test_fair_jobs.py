"""Jobs of one priority share the workers: a real service, compilers and queues, from end to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from cukiln.types import Job
from storage.database.tables import CandidateRow, GroupRow, JobProblemRow
from tests.integration.clusters import Cluster, probe, started
from tests.support.fixtures.compile import compiled_in_this_run
from tests.support.fixtures.queue import make_world, wait_for
from tests.support.run.each_run import one_each_run
from tests.support.run.places import PROBE
from tests.support.service.chrome_traces import Event, checked, slices
from workers.supervisor.valkey import EmbeddedValkey

KINDS = ("plan", "compile", "compile", "reconcile")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two compile workers, and a file for each kernel. Each test leaves it without work."""
    folder = tmp_path_factory.mktemp("fair")
    valkey = EmbeddedValkey(folder / "valkey")
    valkey.start()
    settings = {"workers": 2, "gpus": "none", "group_kernels": 1, "operator_path": str(PROBE), "verify_ptx": "none"}
    with (
        make_world(folder, valkey.url, **settings) as world,
        started(world, folder / "unused", compiled_in_this_run(tmp_path_factory), KINDS) as running,
    ):
        yield running
    valkey.stop()


def many(count: int, first: int, kernels: int, threads: int) -> list[dict[str, Any]]:
    """Problems with so many kernels of their own. Few problems, as each has a library of its winner compiled, too."""
    starts = range(first, first + count * kernels, kernels)
    return [probe(*range(start, start + kernels), n=1000 + start, threads=threads) for start in starts]


def progress(cluster: Cluster, job: str) -> tuple[int, int]:
    """Kernels compiled, of how many."""
    stage = cluster.job(job).progress.compile
    return stage.done, stage.total


def trace_of(cluster: Cluster, job: str) -> list[Event]:
    """Its events, with their times in seconds since the epoch."""
    trace = httpx.get(f"{cluster.urls[0]}/v1/jobs/{job}/trace", timeout=30).json()
    origin: float = trace["otherData"]["origin"]
    return [{**event, "ts": origin + event.get("ts", 0) / 1e6} for event in checked(trace)]


def compile_starts(cluster: Cluster, job: str) -> list[float]:
    """When each of its files was begun, in seconds since the epoch."""
    return [event["ts"] for event in slices(trace_of(cluster, job), "compile")]


def end_of(cluster: Cluster, job: str) -> Job:
    wait_for(lambda: cluster.has_ended(job), 300, f"job {job} ends")
    return cluster.job(job)


def cancel(cluster: Cluster, job: str) -> None:
    answer = httpx.delete(f"{cluster.urls[0]}/v1/jobs/{job}", timeout=30)
    assert answer.json()["state"] == "cancelled"


@one_each_run("fair jobs", 0)
def test_one_problem_behind_a_large_job_does_not_wait_for_it(cluster: Cluster) -> None:
    large = cluster.submit(0, many(2, 1, kernels=12, threads=64))
    wait_for(lambda: progress(cluster, large)[0] > 0, 120, "the large job's first file")
    small = cluster.submit(1, many(1, 50, kernels=1, threads=64))
    assert end_of(cluster, small).state == "done", cluster.world.logs()[-3000:]
    done, total = progress(cluster, large)
    assert done < total, "the large job was still at its files"
    (planned,), (own,) = slices(trace_of(cluster, small), "plan"), compile_starts(cluster, small)
    between = sum(planned["ts"] < start < own for start in compile_starts(cluster, large))
    assert between <= 2 * cluster.world.settings.workers, "files of the large job were begun instead"
    cancel(cluster, large)


@one_each_run("fair jobs", 1)
def test_two_equal_jobs_are_compiled_side_by_side(cluster: Cluster) -> None:
    first, second = (cluster.submit(number, many(2, 1 + 32 * number, kernels=8, threads=32)) for number in range(2))
    wait_for(lambda: progress(cluster, second)[0] >= 3, 240, "a good part of the second job")
    compiled, total = progress(cluster, first)
    assert 2 <= compiled < total - 3
    for job in (first, second):
        cancel(cluster, job)


def test_of_two_jobs_that_share_builds_one_is_cancelled(cluster: Cluster) -> None:
    first, second = (cluster.submit(number, many(1, 1, kernels=4, threads=128)) for number in range(2))
    wait_for(lambda: cluster.job(second).progress.lower.done == 1, 120, "both jobs are planned")
    wait_for(lambda: progress(cluster, first)[0] > 0, 120, "the first file")
    cancel(cluster, first)
    ended = end_of(cluster, second)
    assert ended.state == "done"
    assert all(set(problem.verdicts) == {"ok"} for problem in ended.problems)
    with cluster.world.database.read() as session:
        problems = select(JobProblemRow.id).where(JobProblemRow.job_id == second)
        own = set(session.scalars(select(CandidateRow.build).where(CandidateRow.job_problem_id.in_(problems))))
        groups = session.scalars(select(GroupRow.kernels))
        kernels = [kernel["build"] for group in groups for kernel in group if kernel["build"] in own]
        assert set(kernels) == own
        assert len(kernels) == len(set(kernels)), "nothing was compiled twice"

        def unverified() -> list[str]:
            of_first = select(JobProblemRow.id).where(JobProblemRow.job_id == first)
            left = (CandidateRow.job_problem_id.in_(of_first)) & CandidateRow.verdict.is_(None)
            return list(session.scalars(select(CandidateRow.candidate).where(left)))

        wait_for(lambda: not unverified(), 10, "what the cancelled job left is skipped")
