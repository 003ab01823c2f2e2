"""Each bound on the lowering of a job's problem, with both outcomes; the other problems of the job continue."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
from sqlalchemy import select

from codegen.identity import winner_key
from codegen.lower import CHECK_EVERY
from codegen.operators import operator
from codegen.operators.matmul import tensor_space
from codegen.search.search import Search
from codegen.targets import target
from storage.blobs.blob_store import BlobStore
from storage.database.tables import JobProblemRow, TaskRow
from storage.entities.jobs import candidates_of_job
from storage.transitions import accept, end_jobs, take_work
from tests.support.fixtures.queue import QueueWorld, wait_for
from workers import wake_ups
from workers.processes.processes import Processes
from workers.steps.context import Cancel, Cancelled, StepContext, Workplace

step = import_module("workers.steps.plan")  # the package has its function under the same name
MATMUL = {"operator": "matmul", "m": 512, "n": 512, "k": 512}
CUBE = {"operator": "matmul", "m": 4096, "n": 4096, "k": 4096, "dtype": "float16"}
# No schedule of these is accepted: a warp's tile needs whole fragments, and eight by eight warps are too many.
NOTHING: dict[str, Any] = {
    "tunables": {
        **{
            tunable.name: list(tunable.allowed)[:64]
            for tunable in tensor_space.TUNABLES
            if tunable.name in ("stages", "maxnreg")
        },
        "tile_m": [16],
        "tile_n": [16],
        "tile_k": [16, 32, 64],
        "warps_m": [8],
        "warps_n": [8],
        "split_k": list(range(1, 65)),
        "static_k": list(range(64)),
    },
    "limit": 20_000,
}


class Planner:
    """Jobs, and the step that plans them under some settings."""

    def __init__(self, world: QueueWorld) -> None:
        self.world, self.database = world, world.database
        blobs = BlobStore(world.database, world.settings.blobs_url)
        self.workplace = Workplace(world.settings, world.database, blobs, world.redis, Processes(), "planner")

    def bounds(self, **settings: Any) -> None:
        self.workplace.settings = self.world.settings.model_copy(update=settings)

    def submit(self, *problems: tuple[dict[str, Any], dict[str, Any]]) -> str:
        """A job of problems, each with its search; returns its id."""
        new = []
        for number, (fields, search) in enumerate(problems):
            parsed = operator(fields["operator"]).parse(fields)
            key = winner_key(parsed.digest, "sm_80", "predicted:sm_80")
            new.append(
                accept.NewProblem(
                    name=f"p{number}",
                    operator="matmul",
                    problem=parsed.canonical(),
                    target="sm_80",
                    device_class="predicted:sm_80",
                    key=key,
                    search=search,
                )
            )
        with self.database.write() as session:
            return accept.create_jobs(session, [accept.NewJob(new)])[0].id

    def context(self, cancel: Cancel | None = None) -> StepContext:
        with self.database.write() as session:
            lease = take_work.take(session, ["plan"], None, "planner", 60.0)
        assert lease is not None
        return StepContext(self.workplace, lease, cancel or Cancel())

    def planned(self, *problems: tuple[dict[str, Any], dict[str, Any]]) -> list[tuple[int, str | None]]:
        """Of each problem of a new job that was planned: how many candidates, and why it will fail."""
        job = self.submit(*problems)
        step.plan(self.context())
        rows = select(JobProblemRow.candidate_count, JobProblemRow.error).where(JobProblemRow.job_id == job)
        with self.database.read() as session:
            found = [(row.candidate_count, row.error) for row in session.execute(rows.order_by(JobProblemRow.position))]
            assert candidates_of_job(session, job) == sum(count for count, _ in found)
        return found


@pytest.fixture
def planner(queue_world: QueueWorld) -> Planner:
    return Planner(queue_world)


LEVEL_0 = (MATMUL, {"level": 0})


def test_a_problem_with_too_many_schedules_fails_and_the_others_continue(planner: Planner) -> None:
    planner.bounds(max_space=200)
    (_, too_large), other, sampled = planner.planned(
        (MATMUL, {"level": 2}), LEVEL_0, (MATMUL, {"level": 2, "limit": 3, "seed": 0})
    )
    assert too_large is not None
    assert "at most 200 are looked at without a limit" in too_large
    assert (other, sampled) == ((1, None), (3, None))


def test_a_problem_with_too_many_candidates_fails_as_soon_as_it_has_them(planner: Planner) -> None:
    planner.bounds(max_candidates_per_problem=30)
    (none, too_many), other, some, as_many = planner.planned(
        (MATMUL, {"level": 2}),
        LEVEL_0,
        (MATMUL, {"level": 1, "keep": 30}),
        (MATMUL, {"level": 2, "limit": 30, "seed": 0}),
    )
    assert none == 0
    assert too_many is not None
    assert too_many.startswith("more than 30 candidates (CUKILN_MAX_CANDIDATES_PER_PROBLEM) among the first ")
    looked_at, size = (int(word.replace(",", "")) for word in re.findall(r"first ([\d,]+) of ([\d,]+)", too_many)[0])
    assert looked_at % CHECK_EVERY == 0
    assert looked_at < size / 2, "it did not go through the rest of the space"
    assert too_many.endswith("give a limit, keep, or shorter lists")
    assert (other, some, as_many) == ((1, None), (30, None), (30, None))


@pytest.mark.parametrize(("most", "refused"), [(4, True), (5, False)])
def test_a_limit_over_what_a_problem_may_have_fails_at_the_very_next(
    planner: Planner, most: int, refused: bool
) -> None:
    planner.bounds(max_candidates_per_problem=most)
    ((count, error),) = planner.planned((MATMUL, {"level": 2, "limit": 5, "seed": 0}))
    assert (count, error is not None) == (0 if refused else 5, refused)


def test_the_problem_with_which_a_job_gets_too_many_candidates_fails(planner: Planner) -> None:
    planner.bounds(max_candidates_per_job=10)
    three: dict[str, Any] = {"level": 2, "limit": 3, "seed": 0}
    planned = planner.planned(*[(MATMUL, three)] * 3, (MATMUL, {"level": 2, "limit": 2, "seed": 0}), LEVEL_0, LEVEL_0)
    assert [count for count, _ in planned] == [3, 3, 3, 0, 1, 0]
    for number, before in ((3, 9), (5, 10)):
        error = planned[number][1]
        assert error is not None
        assert error.startswith("the job would have more than 10 candidates (CUKILN_MAX_CANDIDATES_PER_JOB), ")
        assert f" {before} of them of the problems before this one: " in error
        assert error.endswith("or send fewer problems in a job")


def test_candidates_of_a_job_s_earlier_tasks_count(planner: Planner) -> None:
    planner.bounds(max_candidates_per_job=accept.PLAN_CHUNK)
    job = planner.submit(*[LEVEL_0] * (accept.PLAN_CHUNK + 1))
    for _ in range(2):
        step.plan(planner.context())
    with planner.database.read() as session:
        assert candidates_of_job(session, job) == accept.PLAN_CHUNK
        columns = select(JobProblemRow.error, JobProblemRow.space_size)
        last = session.execute(columns.where(JobProblemRow.position == accept.PLAN_CHUNK)).one()
    assert "CUKILN_MAX_CANDIDATES_PER_JOB" in str(last.error)
    assert last.space_size == 0, "its space was not made"


@pytest.mark.parametrize(("seconds", "ends"), [(0.2, False), (60.0, True)])
def test_the_cpu_budget_of_a_problem_ends_its_lowering_and_says_how_far_it_came(
    planner: Planner, seconds: float, ends: bool
) -> None:
    planner.bounds(lower_cpu_seconds=seconds)
    search: dict[str, Any] = {"level": 2} if ends else NOTHING
    (count, error), other = planner.planned((MATMUL if ends else CUBE, search), LEVEL_0)
    assert other == (1, None)
    if ends:
        assert (count > 100, error) == (True, None)
        return
    assert count == 0
    assert error is not None
    assert error.startswith("the search did not end in 0.2 s of CPU time (CUKILN_LOWER_CPU_SECONDS): ")
    parsed, search_model = operator("matmul").parse(CUBE), Search.model_validate(NOTHING)
    size = operator("matmul").space(parsed, target("sm_80"), search_model).size
    assert f" of {size:,} schedules were looked at, and 0 accepted; give a smaller limit or shorter lists" in error


def test_a_search_that_this_problem_cannot_have_fails_it_and_not_the_task(planner: Planner) -> None:
    (none, error), other = planner.planned((MATMUL, {"tunables": {"magic": [1]}}), LEVEL_0)
    assert (none, other) == (0, (1, None))
    assert error is not None
    assert "magic" in error


def test_a_cancelled_job_ends_its_lowering_on_the_way(planner: Planner) -> None:
    class CancelledLater(Cancel):
        """Set when it was asked the tenth time."""

        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            if self.asked == 10:
                self.because("cancelled")
            return super().is_set()

    cancel = CancelledLater()
    job = planner.submit((CUBE, NOTHING))
    with pytest.raises(Cancelled) as stopped:
        step.plan(planner.context(cancel))
    assert (stopped.value.reason, cancel.asked) == ("cancelled", 10)
    with planner.database.read() as session:
        assert session.scalar(select(JobProblemRow.planned).where(JobProblemRow.job_id == job)) is False


def test_the_planner_leaves_a_cancelled_lowering_for_the_next_job(planner: Planner) -> None:
    """A real planner, which the CPU budget would hold for a minute."""
    world = planner.world
    with (world.folder / "planner.log").open("wb") as log:
        command = [sys.executable, "-m", "workers.worker.main", "plan"]
        world.workers.append(subprocess.Popen(command, env=world.environment(), stdout=log, stderr=log))
    hostile = planner.submit((CUBE, NOTHING))
    wake_ups.add_wake_ups(world.redis, "plan", None)
    wait_for(lambda: leased(planner, hostile), 60.0, "the hostile job is planned")
    other = planner.submit(LEVEL_0)
    wake_ups.add_wake_ups(world.redis, "plan", None)
    with planner.database.write() as session:
        end_jobs.cancel_job(session, hostile)
    wait_for(lambda: has_candidates(planner, other), 15.0, "the other job is planned")
    assert "stopped: cancelled" in (world.folder / "planner.log").read_text()
    assert not has_candidates(planner, hostile)


def leased(planner: Planner, job: str) -> bool:
    with planner.database.read() as session:
        own = TaskRow.ref.startswith(job) & (TaskRow.kind == "plan")
        return session.scalar(select(TaskRow.state).where(own)) == "leased"


def has_candidates(planner: Planner, job: str) -> bool:
    with planner.database.read() as session:
        return candidates_of_job(session, job) > 0
