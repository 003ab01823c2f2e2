"""A kernel is compiled once, however many jobs on however many machines ask for it at the same moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from storage.database.tables import BuildRow, GroupRow, LibraryRow, TaskRow
from tests.integration.clusters import Cluster, probe, start_worker, started
from tests.support.fixtures.compile import compiled_in_this_run
from tests.support.fixtures.queue import QueueWorld, make_world, wait_for
from tests.support.run.each_run import one_each_run
from tests.support.run.places import FAULTY, PROBE
from workers.supervisor.valkey import EmbeddedValkey

RIGHT, DOES_NOT_COMPILE = 0, 26
BROKEN = {"operator": "faulty", "rows": 8, "columns": 256, "pitch": 256}
FAULTS = {"search": {"schedules": [{"fault": RIGHT}, {"fault": DOES_NOT_COMPILE}]}}


# The same job, jobs of the same kernels for other extents, and jobs that share some.
JOBS: list[list[dict[str, Any]]] = [
    [probe(1, 2)],
    [probe(1, 2)],
    [probe(1, 2, n=2000)],
    [probe(1, 2, 3)],
    [probe(1, 2), probe(1, 2, n=3000)],
    [{**BROKEN, **FAULTS}, probe(1, 2)],
    [{**BROKEN, "rows": 16, **FAULTS}],
]


@pytest.fixture
def cluster(counted_world: tuple[QueueWorld, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started(*counted_world, compiled_in_this_run(tmp_path_factory), services=2) as running:
        yield running


@pytest.fixture
def counted_world(tmp_path: Path, valkey: EmbeddedValkey) -> Iterator[tuple[QueueWorld, Path]]:
    """With the file in which its workers write down what nvcc is given."""
    settings = {"workers": 4, "operator_path": f"{FAULTY}:{PROBE}", "gpus": "none", "verify_ptx": "none"}
    with make_world(tmp_path, valkey.url, **settings) as world:
        yield world, tmp_path / "nvcc.txt"


@one_each_run("single flight", 0)
def test_a_kernel_is_compiled_once_for_all_jobs(cluster: Cluster) -> None:
    jobs = cluster.run(JOBS)
    assert [job.state for job in jobs] == ["done"] * len(JOBS), cluster.world.logs()[-3000:]
    with cluster.world.database.read() as session:
        groups = session.scalars(select(GroupRow.kernels).where(GroupRow.source.is_not(None))).all()
        libraries = session.scalars(select(LibraryRow.kernel)).all()
        states = Counter(session.scalars(select(BuildRow.state)))
    # One compile for each kernel in a group, one more for the group of the broken one, and one for each winner's own
    # library.
    planned = Counter(kernel["id"] for kernels in groups for kernel in kernels)
    assert set(planned.values()) == {1}
    assert states == {"ok": len(planned) - 1, "compile_error": 1}
    files = cluster.compiled()
    times = Counter(kernel for file in files for kernel in file)
    expected = Counter(f"kernel_{kernel[:16]}" for kernel in [*planned, *libraries])
    assert times - expected == Counter() or _is_innocent_of_the_broken(times - expected, files), (times, expected)
    before = len(files)

    # What is known is answered without nvcc: winners from their records, and failures by build.
    again = cluster.run([*JOBS, [{**BROKEN, "rows": 24, **FAULTS}]])
    assert [job.state for job in again] == ["done"] * len(again)
    assert again[-1].problems[0].verdicts == {"ok": 1, "compile_error": 1}
    assert len(cluster.compiled()) == before


def _is_innocent_of_the_broken(more: Counter[str], files: list[tuple[str, ...]]) -> bool:
    """Compiled again because nvcc had refused the file for the one kernel that does not compile."""
    return all(times == 1 for times in more.values()) and any(set(more) < set(file) for file in files)


@one_each_run("single flight", 1)
def test_small_jobs_that_wait_are_compiled_in_one_file(
    counted_world: tuple[QueueWorld, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    world, log = counted_world
    compiled = compiled_in_this_run(tmp_path_factory)
    with started(world, log, compiled, ("plan", "reconcile")) as cluster:
        # No kernel in two of them, of two operators, and one that does not compile.
        jobs = [[probe(2 * number + 1, 2 * number + 2)] for number in range(3)]
        ids = [cluster.submit(number, job) for number, job in enumerate([*jobs, [{**BROKEN, **FAULTS}]])]
        wait_for(lambda: not _unplanned(world), 60, "all is planned")
        start_worker(world, log, compiled, "compile", 9)
        wait_for(lambda: all(map(cluster.has_ended, ids)), 240, "jobs end")
        ended = [cluster.job(id) for id in ids]
        assert [job.state for job in ended] == ["done"] * len(ids), world.logs()[-3000:]
        assert ended[-1].problems[0].verdicts == {"ok": 1, "compile_error": 1}
        assert all(set(job.problems[0].verdicts) == {"ok"} for job in ended[:-1])
        with world.database.read() as session:
            groups = session.scalars(select(GroupRow.id)).all()
            libraries = len(session.scalars(select(LibraryRow.kernel)).all())
        assert len(groups) == 1
        # The file, the same without the kernel that does not compile, and the winners' own.
        assert len(cluster.compiled()) == 2 + libraries


def _unplanned(world: QueueWorld) -> int:
    with world.database.read() as session:
        query = select(TaskRow.id).where(TaskRow.kind == "plan", TaskRow.state.in_(("waiting", "leased")))
        return len(session.scalars(query).all())
