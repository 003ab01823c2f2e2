"""Small groups of several jobs share a file, and each job gets its kernels, its seconds and its end as if it were
alone."""

from __future__ import annotations

from collections import Counter

import pytest
from sqlalchemy import select, update

from cukiln.types import Timeline
from storage import items, jobs
from storage.builds import known_builds
from storage.candidates import candidates_of_problem
from storage.clock import FakeClock
from storage.database import Database
from storage.errors import LostClaim
from storage.groups import group_report, load_group
from storage.items import Claim, Renewal
from storage.jobs import CreatedJob
from storage.join_groups import groups_to_join, join_groups
from storage.judging_work import measure_ref
from storage.problems import load_problem
from storage.report_trace import job_trace
from storage.tables import GroupRow, ItemRow, JobRow
from storage.timeline import timeline
from storage.verdicts import builds_to_verify
from tests.fixtures_storage import *  # noqa: F403 - fixtures
from tests.fixtures_storage import (
    CPU_PLAN,
    GPU_CLASS,
    add_job,
    claim_one,
    compile_claimed,
    new_problem,
    plan_next,
    problem_ids,
    verify_next,
)


def planned(database: Database, *builds: str, **changes: object) -> CreatedJob:
    """A job of one problem, whose builds that nobody makes yet wait in a group."""
    job = add_job(database, **changes)
    plan_next(database, *builds)
    return job


def group_of(database: Database, job: CreatedJob) -> str:
    with database.read() as session:
        return session.scalars(select(GroupRow.id).where(GroupRow.job_id == job.id)).one()


def compile_item(database: Database, group: str) -> ItemRow:
    with database.read() as session:
        return session.scalars(select(ItemRow).where(ItemRow.kind == "compile", ItemRow.ref == group)).one()


def share(database: Database, lease: float = 5.0) -> Claim:
    """Claim the next group and take all along that may share its file."""
    claim = claim_one(database, "compile", lease=lease)
    with database.write() as session:
        join_groups(session, claim, [one.id for one in groups_to_join(session, claim)])
    return claim


def predict(database: Database, seconds: float) -> None:
    """Of every group there is."""
    with database.write() as session:
        session.execute(update(GroupRow).values(predicted_seconds=seconds))
        session.execute(update(ItemRow).where(ItemRow.kind == "compile").values(predicted_seconds=seconds))


def builds_of(database: Database, group: str) -> list[str]:
    with database.read() as session:
        found = load_group(session, group)
    assert found is not None
    return [kernel.build for kernel in found.kernels]


def makers(database: Database, *builds: str) -> list[str | None]:
    with database.read() as session:
        known = known_builds(session, builds)
    return [known[build].group_id if build in known else None for build in builds]


def spent(database: Database, job: CreatedJob) -> dict[str, dict[str, float]]:
    with database.read() as session:
        (problem,) = (load_problem(session, one) for one in problem_ids(session, job.id))
    assert problem is not None
    return problem.seconds


def verdicts(database: Database, job: CreatedJob) -> dict[str | None, int]:
    with database.read() as session:
        (problem,) = problem_ids(session, job.id)
        return Counter(one.verdict for one in candidates_of_problem(session, problem))


# ---- one file


def test_jobs_share_a_file_and_one_proof_of_it(database: Database) -> None:
    first, second = planned(database, "a"), planned(database, "b")
    mine, other = group_of(database, first), group_of(database, second)
    claim = share(database)
    assert (claim.ref, builds_of(database, mine)) == (mine, ["a", "b"])
    assert makers(database, "a", "b") == [mine, mine]
    assert compile_item(database, other).state == "joined"
    compile_claimed(database, claim)
    with database.read() as session:
        assert [one.build for one in builds_to_verify(session, mine, **CPU_PLAN)] == ["a", "b"]
    assert len(verify_next(database)) == 2
    assert verdicts(database, first) == verdicts(database, second) == {"ok": 1}
    with database.read() as session:
        assert items.waiting_counts(session) == {("finish", "sm_80"): 2}


def test_a_group_that_joined_leads_to_its_file(database: Database, clock: FakeClock) -> None:
    first = planned(database, "a")
    clock.advance(1)
    second = planned(database, "b")
    clock.advance(2)
    mine, other = group_of(database, first), group_of(database, second)
    claim = share(database)
    clock.advance(4)
    compile_claimed(database, claim)
    with database.read() as session:
        file, joined = group_report(session, mine), group_report(session, other)
        shown, trace = timeline(session, second.id), job_trace(session, second.id)
    assert file is not None and joined is not None and shown is not None and trace is not None
    assert (file.state, file.joined_to, len(file.kernels)) == ("compiled", None, 2)
    assert (joined.state, joined.joined_to, joined.phases) == ("joined", mine, [])
    assert (joined.source_sha256, joined.log_sha256, joined.library_sha256) == ("a" * 64, "b" * 64, "c" * 64)
    assert [kernel.state for kernel in joined.kernels] == ["ok"]
    # Its own wait, then the file's compile, in the lane of the file; the other job's plan is not its own.
    assert lanes(shown) == {
        "plan": [("plan", "done", 0.0, 0.0)],
        f"group {mine[:8]}": [
            ("compile", "done", -1.0, 6.0),
            ("compile", "joined", 0.0, 2.0),
            ("verify", "waiting", 6.0, None),
        ],
    }
    assert {(item.kind, item.ref) for item in trace.items} >= {("compile", mine), ("verify", mine)}


def test_a_file_that_ended_with_its_jobs_stays_on_their_lanes(database: Database, clock: FakeClock) -> None:
    first, second = planned(database, "a"), planned(database, "b")
    claim = share(database)
    clock.advance(4)
    with database.write() as session:
        for job in (second, first):
            jobs.cancel_job(session, job.id)
        shown = timeline(session, second.id)
    assert makers(database, "b") == [None]
    assert shown is not None
    wanted = [("compile", "cancelled", 0.0, 4.0), ("compile", "joined", 0.0, 0.0)]
    assert lanes(shown)[f"group {claim.ref[:8]}"] == wanted


def lanes(found: Timeline) -> dict[str, list[tuple[str, str, float, float | None]]]:
    return {
        lane.name.removesuffix(" 1 to 1"): [
            (
                step.kind,
                step.state,
                step.queued_at - found.created_at,
                None if step.finished_at is None else step.finished_at - found.created_at,
            )
            for step in lane.steps
        ]
        for lane in found.lanes
    }


def test_each_job_pays_for_its_kernels_and_for_its_own_wait(database: Database, clock: FakeClock) -> None:
    first = planned(database, "a")
    clock.advance(3)
    second = planned(database, "b", "c", "d")
    predict(database, 1.0)
    clock.advance(1)
    claim = share(database)
    compile_claimed(database, claim, wall=8.0)
    verify_next(database)  # 4 s
    mine, theirs = spent(database, first), spent(database, second)
    assert [one["compile"]["wall"] for one in (mine, theirs)] == [pytest.approx(2), pytest.approx(6)]
    assert [one["codegen"]["cpu"] for one in (mine, theirs)] == [pytest.approx(0.25), pytest.approx(0.75)]
    assert [one["verify"]["wall"] for one in (mine, theirs)] == [pytest.approx(1), pytest.approx(3)]
    assert [one["queue"]["wall"] for one in (mine, theirs)] == [pytest.approx(4), pytest.approx(1)]


def test_jobs_on_a_gpu_are_measured_out_of_the_shared_file(database: Database) -> None:
    with database.write() as session:
        for name in "pq":
            jobs.create_job(session, jobs.NewJob([new_problem(name, device_class=GPU_CLASS)]))
    plan_next(database, "a")
    plan_next(database, "b")
    claim = share(database)
    compile_claimed(database, claim)
    with database.read() as session:
        measuring = session.scalars(select(ItemRow.ref).where(ItemRow.kind == "measure")).all()
    assert measuring == [measure_ref(claim.ref, GPU_CLASS)]


def test_only_the_kernel_that_does_not_compile_fails(database: Database) -> None:
    first, second = planned(database, "a"), planned(database, "b")
    compile_claimed(database, share(database), bad=["a"])
    verify_next(database)
    assert (verdicts(database, first), verdicts(database, second)) == ({"compile_error": 1}, {"ok": 1})


# ---- who shares


@pytest.mark.parametrize(
    "change",
    [
        {"priority": -1},
        {"predicted_seconds": 2.5},
        {"attempt": 1},
        {"target": "sm_90a"},
        {"state": "cancelled"},
    ],
)
def test_a_group_is_left_alone_that_is_less_urgent_large_tried_or_not_for_this_worker(
    database: Database, change: dict[str, object]
) -> None:
    planned(database, "a")
    other = group_of(database, planned(database, "b"))
    claim = claim_one(database, "compile")
    with database.write() as session:
        assert [one.id for one in groups_to_join(session, claim)] == [other]
        session.execute(update(ItemRow).where(ItemRow.kind == "compile", ItemRow.ref == other).values(**change))
        assert groups_to_join(session, claim) == []


def test_a_group_of_another_toolchain_and_one_whose_job_has_no_time_left_are_left_alone(
    database: Database, clock: FakeClock
) -> None:
    planned(database, "a")
    late = planned(database, "b", budget_seconds=10.0)
    claim = claim_one(database, "compile")
    clock.advance(11)
    with database.write() as session:
        assert groups_to_join(session, claim) == []
        session.execute(update(JobRow).where(JobRow.id == late.id).values(deadline=None))
        assert len(groups_to_join(session, claim)) == 1
        session.execute(update(GroupRow).where(GroupRow.job_id == late.id).values(toolchain="other"))
        assert groups_to_join(session, claim) == []


def test_a_large_group_takes_nothing_along(database: Database) -> None:
    planned(database, "a", "b")  # predicted as 4 s
    planned(database, "c")
    with database.read() as session:
        claim = claim_one(database, "compile")
        assert groups_to_join(session, claim) == []


def test_what_was_claimed_meanwhile_does_not_join(database: Database) -> None:
    planned(database, "a")
    other = group_of(database, planned(database, "b"))
    claim = claim_one(database, "compile")
    claim_one(database, "compile")
    with database.write() as session:
        assert [kernel.build for kernel in join_groups(session, claim, [other]).kernels] == ["a"]
    assert makers(database, "b") == [other]


def test_what_was_handed_back_meanwhile_with_others_does_not_join(database: Database) -> None:
    groups = [group_of(database, planned(database, build)) for build in "abc"]
    claim = claim_one(database, "compile")
    with database.read() as session:
        chosen = [one.id for one in groups_to_join(session, claim)]
    assert (claim.ref, chosen) == (groups[0], groups[1:])
    other = share(database)
    assert makers(database, "b", "c") == [other.ref] * 2
    with database.write() as session:
        items.release(session, other)
        join_groups(session, claim, chosen)
    assert makers(database, "a", "b", "c") == [claim.ref, other.ref, other.ref]
    assert [compile_item(database, one).state for one in groups] == ["claimed", "waiting", "joined"]


def test_a_claim_that_was_lost_takes_nothing_along(database: Database, clock: FakeClock) -> None:
    planned(database, "a")
    other = group_of(database, planned(database, "b"))
    claim = claim_one(database, "compile")
    clock.advance(6)
    with database.write() as session:
        items.expire_leases(session)
    with pytest.raises(LostClaim), database.write() as session:
        join_groups(session, claim, [other])
    assert makers(database, "b") == [other]


# ---- ends before the time


def test_a_cancelled_job_leaves_the_file_to_the_jobs_that_share_it(database: Database) -> None:
    first, second = planned(database, "a"), planned(database, "b")
    claim = share(database)
    with database.write() as session:
        jobs.cancel_job(session, first.id)
        assert items.renew(session, claim, 5) is Renewal.HELD
    compile_claimed(database, claim)
    assert len(verify_next(database)) == 1
    assert verdicts(database, second) == {"ok": 1}
    assert spent(database, second)["compile"]["wall"] == pytest.approx(8)  # nobody else is left to pay


def test_a_cancelled_job_whose_group_joined_stops_nobody(database: Database) -> None:
    first, second = planned(database, "a"), planned(database, "b")
    claim = share(database)
    with database.write() as session:
        jobs.cancel_job(session, second.id)
        assert items.renew(session, claim, 5) is Renewal.HELD
    compile_claimed(database, claim)
    with database.read() as session:
        assert [one.build for one in builds_to_verify(session, claim.ref, **CPU_PLAN)] == ["a"]
    verify_next(database)
    assert verdicts(database, first) == {"ok": 1}


def test_the_last_job_that_is_cancelled_ends_the_file(database: Database) -> None:
    first, second = planned(database, "a"), planned(database, "b")
    claim = share(database)
    with database.write() as session:
        jobs.cancel_job(session, first.id)
        jobs.cancel_job(session, second.id)
        assert items.renew(session, claim, 5) is Renewal.CANCELLED
    assert makers(database, "a", "b") == [None, None], "the next job that needs them owns them"


@pytest.mark.parametrize("worker_looks_first", [False, True])
def test_a_spent_budget_leaves_the_file_to_the_jobs_that_share_it(
    database: Database, clock: FakeClock, worker_looks_first: bool
) -> None:
    first, second = planned(database, "a", budget_seconds=10.0), planned(database, "b")
    claim = share(database, lease=60)
    clock.advance(11)
    with database.write() as session:
        if worker_looks_first:
            assert items.renew(session, claim, 60) is Renewal.HELD
        clock.advance(1)
        assert jobs.expire_budgets(session) == [first.id]
        clock.advance(1)
        assert items.renew(session, claim, 5) is Renewal.HELD
    compile_claimed(database, claim)
    verify_next(database)
    assert (verdicts(database, first), verdicts(database, second)) == ({"skipped": 1}, {"ok": 1})


def test_a_worker_stops_where_nobody_ends_the_budget(database: Database, clock: FakeClock) -> None:
    planned(database, "a", budget_seconds=10.0)
    claim = share(database, lease=60)
    clock.advance(10 + items.SHARED_GRACE_SECONDS)
    with database.write() as session:
        assert items.renew(session, claim, 60) is Renewal.DEADLINE


# ---- attempts that come to nothing


def test_a_file_that_is_handed_back_keeps_its_kernels_and_joins_no_other(database: Database) -> None:
    planned(database, "a")
    second = planned(database, "b")
    predict(database, 0.5)
    claim = share(database)
    with database.write() as session:
        items.release(session, claim)
    assert makers(database, "a", "b") == [claim.ref] * 2
    third = planned(database, "c")
    other = claim_one(database, "compile")  # predicted to take longer
    assert other.ref == group_of(database, third)
    with database.read() as session:
        assert groups_to_join(session, other) == []
    again = share(database)
    assert (again.ref, again.attempt, builds_of(database, again.ref)) == (claim.ref, 1, ["a", "b"])
    compile_claimed(database, again)
    verify_next(database)
    assert verdicts(database, second) == {"ok": 1}


@pytest.mark.parametrize("how", ["fails", "is lost"])
def test_after_an_attempt_that_came_to_nothing_each_group_is_tried_alone(
    database: Database, clock: FakeClock, how: str
) -> None:
    first, second = planned(database, "a"), planned(database, "b")
    mine, other = group_of(database, first), group_of(database, second)
    claim = share(database)
    clock.advance(6)
    with database.write() as session:
        if how == "fails":
            assert items.fail(session, claim, "no memory", retry=True) == "waiting"
        else:
            assert [one.state for one in items.expire_leases(session)] == ["waiting"]
    assert makers(database, "a", "b") == [mine, other]
    assert (builds_of(database, mine), builds_of(database, other)) == (["a"], ["b"])
    with database.read() as session:
        found = [load_group(session, one) for one in (mine, other)]
    assert [(one.state, one.joined_to, one.predicted_seconds) for one in found if one] == [("waiting", None, 2.0)] * 2
    assert [compile_item(database, one).predicted_seconds for one in (mine, other)] == [2.0, 2.0]
    again = [share(database), share(database)]  # neither takes the other along
    assert sorted((one.ref, one.attempt) for one in again) == sorted([(mine, 2), (other, 2)])
    for one in again:
        compile_claimed(database, one)
    assert len(verify_next(database)) == len(verify_next(database)) == 1


@pytest.mark.parametrize("how", ["failed", "lost"])
def test_a_job_keeps_the_attempt_that_its_group_shared(database: Database, clock: FakeClock, how: str) -> None:
    planned(database, "a")
    clock.advance(1)
    second = planned(database, "b")
    other = group_of(database, second)
    clock.advance(2)
    claim = share(database)
    clock.advance(6)
    with database.write() as session:
        if how == "failed":
            items.fail(session, claim, "no memory", retry=True)
        else:
            items.expire_leases(session)
    with database.read() as session:
        shown, trace = timeline(session, second.id), job_trace(session, second.id)
    assert shown is not None and trace is not None
    assert lanes(shown)[f"group {other[:8]}"] == [("compile", how, 0.0, 8.0), ("compile", "waiting", 8.0, None)]
    (compiled,) = (item for item in trace.items if item.ref == other)
    tried = compiled.attempts[0]
    assert (tried.how, tried.started_at, tried.ended_at) == (how, trace.job.created_at + 2, trace.job.created_at + 8)


def test_a_group_that_fails_for_good_takes_none_with_it(database: Database) -> None:
    first, second = planned(database, "a"), planned(database, "b")
    claim = share(database)
    with database.write() as session:
        assert items.fail(session, claim, "no luck", retry=False) == "failed"
    assert (verdicts(database, first), verdicts(database, second)) == ({"skipped": 1}, {None: 1})
    compile_claimed(database, claim_one(database, "compile"))
    verify_next(database)
    assert verdicts(database, second) == {"ok": 1}


def test_parted_groups_of_a_job_that_has_ended_go_to_who_waits_for_them_or_end(database: Database) -> None:
    first, second, third = planned(database, "a"), planned(database, "b"), planned(database, "c")
    heir = planned(database, "b")
    other, last = group_of(database, second), group_of(database, third)
    claim = share(database)
    with database.write() as session:
        jobs.cancel_job(session, second.id)
        jobs.cancel_job(session, third.id)
        items.fail(session, claim, "no luck", retry=True)
    assert makers(database, "a", "b", "c") == [group_of(database, first), other, None]
    assert compile_item(database, other).job_id == heir.id
    assert compile_item(database, last).state == "cancelled"


def test_a_parted_group_of_a_job_that_is_out_of_time_ends(database: Database, clock: FakeClock) -> None:
    planned(database, "a")
    late = planned(database, "b", budget_seconds=10.0)
    other = group_of(database, late)
    share(database)
    clock.advance(11)
    with database.write() as session:
        assert jobs.expire_budgets(session) == [late.id]  # it goes on: it is to be finished
        items.expire_leases(session)
    assert compile_item(database, other).state == "cancelled"
    assert makers(database, "b") == [None]


def test_a_more_urgent_job_hurries_the_file_and_what_was_parted_from_it(database: Database) -> None:
    first, second = planned(database, "a"), planned(database, "b")
    claim = share(database)
    planned(database, "b", priority="high")
    assert compile_item(database, group_of(database, first)).priority == 10
    with database.write() as session:
        items.fail(session, claim, "no luck", retry=True)
    assert compile_item(database, group_of(database, second)).priority == 10
