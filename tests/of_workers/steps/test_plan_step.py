"""The plan step: what it writes where others are at work on the same kernels, and the wake-ups that follow."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from sqlalchemy import select, update

from codegen.identity import winner_key
from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.predict.compile_cost import FIXED_SECONDS, kernel_seconds
from storage.blobs.blob_store import BlobStore
from storage.database.session import Session
from storage.database.tables import CandidateRow, JobRow, TaskRow
from storage.entities.groups import kernels_of, load_group
from storage.entities.jobs import load_problem
from storage.queue import tasks
from storage.transitions import accept, end_jobs, take_work
from storage.transitions.charge_turns import spend
from storage.transitions.groups import BuildOutcome, GroupFiles, complete_group, record_builds
from tests.support.fixtures.queue import QueueWorld
from tests.support.fixtures.storage import problem_ids
from workers import wake_ups
from workers.processes.processes import Processes
from workers.steps.context import Cancel, Cancelled, GiveUp, HandBack, StepContext, Workplace

step = import_module("workers.steps.plan")  # the package has its function under the same name
MATMUL = {"operator": "matmul", "m": 64, "n": 64, "k": 64}


class Planner:
    """Jobs of one matmul, and the step that plans them."""

    def __init__(self, world: QueueWorld) -> None:
        self.world, self.database = world, world.database
        blobs = BlobStore(world.database, world.settings.blobs_url)
        self.workplace = Workplace(world.settings, world.database, blobs, world.redis, Processes(), "planner")

    def problem(self, limit: int) -> accept.NewProblem:
        parsed = operator("matmul").parse(MATMUL)
        return accept.NewProblem(
            name="p",
            operator="matmul",
            problem=parsed.canonical(),
            target="sm_80",
            device_class="predicted:sm_80",
            key=winner_key(parsed.digest, "sm_80", "predicted:sm_80"),
            search={"level": 1, "limit": limit, "seed": 0},
        )

    def plan(self, limit: int = 3, problems: int = 1, cancel: Cancel | None = None) -> tasks.Lease:
        """A new job of equal problems, planned in one attempt, before any other."""
        with self.database.write() as session:
            new = accept.NewJob([self.problem(limit)] * problems, priority="high" if problems == 1 else "normal")
            self.job = accept.create_jobs(session, [new])[0].id
            for other in session.scalars(select(JobRow).where(JobRow.id != self.job)):
                other.used_seconds = other.turn_seconds = 3.0
            session.flush()
            oldest = update(JobRow).where(JobRow.id == self.job).values(created_at=0.0)
            session.execute(oldest)
        lease = self.take("plan")
        assert lease.jobs == (self.job,)
        step.plan(StepContext(self.workplace, lease, cancel or Cancel()))
        with self.database.write() as session:
            tasks.complete(session, lease)
        return lease

    def take(self, kind: str) -> tasks.Lease:
        with self.database.write() as session:
            lease = take_work.take(session, [kind], None, "planner", 60.0)
        assert lease is not None
        return lease

    def waiting(self) -> dict[tuple[str, str | None], int]:
        with self.database.read() as session:
            return take_work.waiting_counts(session)

    def wake_ups(self) -> int:
        return wake_ups.queued_wake_ups(self.world.redis, "compile", "sm_80")


@pytest.fixture
def planner(queue_world: QueueWorld) -> Planner:
    return Planner(queue_world)


def test_pending_builds_wake_as_many_workers_as_there_are(planner: Planner) -> None:
    planner.plan()
    assert planner.waiting() == {("compile", "sm_80"): 3}
    assert planner.wake_ups() == 1  # as the settings have it, while no worker is known


def test_a_large_search_is_recorded_a_part_at_a_time(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "CANDIDATES_AT_ONCE", 2)
    written: list[int] = []
    record = step.record_candidates

    def counted(session: Session, lease: tasks.Lease, candidates: list[Any], *rest: Any) -> Any:
        written.append(len(candidates))
        with planner.database.read() as reading:
            problem = load_problem(reading, problem_ids(reading, planner.job)[0])
        assert problem is not None and not problem.planned
        return record(session, lease, candidates, *rest)

    monkeypatch.setattr(step, "record_candidates", counted)
    planner.plan(limit=5)
    assert written == [2, 2, 1]
    with planner.database.read() as session:
        problem = load_problem(session, problem_ids(session, planner.job)[0])
    assert problem is not None and (problem.planned, problem.candidate_count) == (True, 5)


def test_a_cancelled_job_is_not_recorded_any_further(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "CANDIDATES_AT_ONCE", 2)
    cancel = Cancel()
    record = step.record_candidates

    def cancelled_after(*arguments: Any) -> Any:
        cancel.because("cancelled")
        return record(*arguments)

    monkeypatch.setattr(step, "record_candidates", cancelled_after)
    with pytest.raises(Cancelled):
        planner.plan(limit=5, cancel=cancel)
    with planner.database.read() as session:
        assert len(session.scalars(select(CandidateRow.candidate)).all()) == 2


def test_a_job_that_was_accepted_for_another_cuda_is_given_up(planner: Planner) -> None:
    planner.workplace.settings = planner.workplace.settings.model_copy(update={"cuda": 12})
    with pytest.raises(GiveUp, match="p: it was accepted for CUDA 13, and this worker compiles by CUDA 12"):
        planner.plan()


def test_a_planner_gives_way_to_another_job_between_two_problems(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(step, "spend", lambda session, job, seconds: spend(session, job, 10.0))
    with planner.database.write() as session:
        other = accept.create_jobs(session, [accept.NewJob([planner.problem(3)])])[0].id
    with pytest.raises(HandBack):
        planner.plan(problems=3)
    with planner.database.read() as session:
        planned = [load_problem(session, id) for id in problem_ids(session, planner.job)]
    assert [each.planned for each in planned if each] == [True, False, False]
    with planner.database.write() as session:
        session.execute(update(TaskRow).where(TaskRow.state == "leased").values(state="waiting"))
    assert planner.take("plan").jobs == (other,)


def test_kernels_that_only_need_a_verdict_get_a_wake_up_for_it(planner: Planner) -> None:
    planner.plan()
    compiled(planner)
    with planner.database.write() as session:  # the job goes before they are verified, its compiled kernels stay
        end_jobs.cancel_job(session, planner.job)
    before = planner.wake_ups()
    planner.plan()
    assert planner.waiting() == {("verify", "sm_80"): 1}
    assert planner.wake_ups() == before + 1


def compiled(planner: Planner) -> None:
    """What is pending, recorded as if nvcc had done it."""
    lease = planner.take("compile")
    with planner.database.write() as session:
        group = load_group(session, lease.ref)
        assert group is not None
        outcomes = [BuildOutcome(kernel.build, "ok", "c" * 64, {}, library="d" * 64) for kernel in kernels_of(group)]
        record_builds(session, lease, outcomes)
        complete_group(session, lease, GroupFiles())


def test_builds_are_predicted_by_their_operators_estimates(planner: Planner) -> None:
    planner.plan()
    lease = planner.take("compile")
    with planner.database.read() as session:
        group = load_group(session, lease.ref)
    assert group is not None
    estimates = [kernel_seconds(Kernel.from_json(kernel.kernel_json)) for kernel in kernels_of(group)]
    assert group.predicted_seconds == pytest.approx(FIXED_SECONDS + sum(estimates))
    parts = [kernel.predicted_seconds for kernel in kernels_of(group)]
    assert parts == pytest.approx(estimates), "what a file's times go by"


@pytest.mark.parametrize(("most", "groups"), [(48, 1), (2, 2), (1, 3)])
def test_a_file_has_no_more_kernels_than_the_settings_say(planner: Planner, most: int, groups: int) -> None:
    planner.workplace.settings = planner.world.settings.model_copy(update={"group_kernels": most})
    planner.plan()
    limits = planner.workplace.file_limits("sm_80")
    with planner.database.write() as session:
        for _ in range(groups):
            assert take_work.take(session, ["compile"], None, "w", 5.0, limits) is not None
        assert take_work.take(session, ["compile"], None, "w", 5.0, limits) is None
