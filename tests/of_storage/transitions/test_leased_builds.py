"""A free compile worker leases pending builds: whose, how many, and what becomes of those that it could not compile."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

from codegen.predict.compile_cost import FIXED_SECONDS, MAX_SECONDS, WORTHWHILE_SECONDS
from cukiln.types import StageSeconds
from storage.database.session import Database
from storage.database.tables import JobRow, PendingBuildRow, TaskRow
from storage.entities.groups import compiled_for, kernels_of, known_builds, load_group
from storage.entities.jobs import load_problem
from storage.entities.stage_times import add_seconds
from storage.errors import LostLease
from storage.queue import losses, tasks
from storage.queue.tasks import Lease
from storage.reports.times import job_trace
from storage.transitions import accept, end_attempt, end_jobs, take_work
from storage.transitions.end_jobs import find_ended
from storage.transitions.groups import BuildOutcome, GroupFiles, complete_group, record_builds, what_follows
from storage.transitions.pending_builds import pending_counts, want_builds
from storage.transitions.take_work import BUDGET_SHARE, FileLimits, longest_group
from tests.support.fixtures.storage import (
    TARGET,
    TOOLCHAIN,
    add_job,
    cancel,
    candidates_of,
    clear_all,
    compile_leased,
    compile_next,
    new_build,
    new_problem,
    plan_next,
    problem_ids,
    take_one,
    verify_next,
)
from tests.support.run.fake_clock import FakeClock


def wanted(
    database: Database, *names: str, seconds: float = 1.0, build: dict[str, Any] | None = None, **job: Any
) -> str:
    """A job that needs these builds, planned for nothing else."""
    created = add_job(database, **job)
    lease = take_one(database, "plan")
    builds = [new_build(name, predicted_seconds=seconds, **(build or {})) for name in names]
    with database.write() as session:
        want_builds(session, created.id, builds, ())
        tasks.complete(session, lease)
        session.get_one(JobRow, created.id).used_seconds = 0.0
    return created.id


def take_file(database: Database, **limits: Any) -> Lease | None:
    with database.write() as session:
        return take_work.take(session, ["compile"], None, "w", 5.0, FileLimits(**limits))


def members(database: Database, lease: Lease | None) -> list[str]:
    assert lease is not None, "nothing is pending"
    with database.read() as session:
        group = load_group(session, lease.ref)
    assert group is not None
    return sorted(kernel.build for kernel in kernels_of(group))


def states(database: Database, *names: str) -> list[str | None]:
    with database.read() as session:
        builds = known_builds(session, names)
    return [builds[name].state if name in builds else None for name in names]


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number:02}" for number in range(count)]


def give_back(database: Database, lease: Lease | None, error: str = "the compiler crashed", attempts: int = 3) -> None:
    """As a worker does whose file failed without naming a kernel."""
    assert lease is not None
    with database.write() as session:
        complete_group(session, lease, GroupFiles(), (), error, attempts)
        clear_all(session)


# Whose builds, and how many.


def test_small_jobs_share_a_file(database: Database) -> None:
    jobs_of_file = [wanted(database, name, seconds=0.1) for name in ("a", "b", "c")]
    lease = take_file(database)
    assert members(database, lease) == ["a", "b", "c"]
    assert lease is not None and set(lease.jobs) == set(jobs_of_file)
    assert take_file(database) is None


def test_small_jobs_share_no_more_than_a_file_may_hold(database: Database) -> None:
    for prefix in "ab":
        wanted(database, *names(prefix, 2), seconds=0.1)
    assert [len(members(database, take_file(database, workers=4, kernels=3))) for _ in range(2)] == [3, 1]


def test_a_newcomer_is_next_though_a_large_job_came_first(database: Database, clock: FakeClock) -> None:
    large = wanted(database, *names("a", 40), seconds=2.0)
    running = take_file(database)
    clock.advance(1)
    small = wanted(database, "b", seconds=2.0)
    following = take_file(database)
    assert running is not None and running.jobs == (large,)
    assert following is not None and small in following.jobs
    assert "b" in members(database, following)


def test_equal_jobs_take_turns_by_predicted_seconds(database: Database) -> None:
    first, second = wanted(database, *names("a", 60), seconds=4.0), wanted(database, *names("b", 60), seconds=4.0)
    served: Counter[str] = Counter()
    for _ in range(12):
        lease = take_file(database, kernels=2)
        assert lease is not None
        served.update({job: len(members(database, lease)) for job in lease.jobs})
        compile_leased(database, lease)
    assert served == {first: 12, second: 12}


def test_a_job_is_charged_for_what_it_shares_by_its_part(database: Database) -> None:
    first = wanted(database, "a", "shared", seconds=2.0)
    second = wanted(database, "shared", "b", "c", seconds=2.0)
    lease = take_file(database)
    assert members(database, lease) == ["a", "b", "c", "shared"]
    with database.read() as session:
        used = {job: session.get_one(JobRow, job).used_seconds for job in (first, second)}
    assert used[first] == pytest.approx(3.0 + FIXED_SECONDS * 1.5 / 4)
    assert used[second] == pytest.approx(5.0 + FIXED_SECONDS * 2.5 / 4)


def test_an_urgent_job_is_served_alone_and_first(database: Database) -> None:
    wanted(database, "a", seconds=0.1)
    urgent = wanted(database, "b", seconds=0.1, priority="high")
    lease = take_file(database)
    assert lease is not None and lease.jobs == (urgent,)
    assert members(database, lease) == ["b"]
    assert members(database, take_file(database)) == ["a"]


def test_the_longest_builds_go_first(database: Database) -> None:
    job = add_job(database)
    with database.write() as session:
        some = [new_build(name, predicted_seconds=seconds) for name, seconds in (("a", 1.0), ("b", 3.0), ("c", 2.0))]
        want_builds(session, job.id, some, ())
    assert [members(database, take_file(database, kernels=1)) for _ in range(3)] == [["b"], ["c"], ["a"]]


def test_the_last_files_end_together_and_none_is_too_short_to_be_worthwhile(
    database: Database, clock: FakeClock
) -> None:
    """Four workers, each as fast as predicted."""
    wanted(database, *names("a", 200), seconds=0.4)
    ends: dict[float, Lease] = {}
    sizes = []
    began = clock.now()
    while True:
        while len(ends) < 4 and (lease := take_file(database, workers=4)) is not None:
            sizes.append(0.4 * len(members(database, lease)))
            ends[clock.now() - began + FIXED_SECONDS + sizes[-1] + 1e-4 * len(ends)] = lease
        if not ends:
            break
        end = min(ends)
        clock.advance(max(0.0, end - (clock.now() - began)))
        compile_leased(database, ends.pop(end))
        if not ends:
            break
        last = max(ends)
    assert sum(sizes) == pytest.approx(80.0)
    assert all(WORTHWHILE_SECONDS - 0.4 <= size <= MAX_SECONDS for size in sizes)
    assert last - end < 0.5
    assert clock.now() - began < 80.0 / 4 + 3 * FIXED_SECONDS + 0.5


def test_no_file_is_predicted_to_take_longer_than_the_longest(database: Database) -> None:
    wanted(database, *names("a", 100), seconds=1.0)
    lease = take_file(database, workers=1)
    assert len(members(database, lease)) == int(MAX_SECONDS - FIXED_SECONDS)


def test_a_few_kernels_are_divided_among_idle_workers_where_that_pays(database: Database) -> None:
    wanted(database, *names("a", 4), seconds=1.0)
    assert [len(members(database, take_file(database, workers=2))) for _ in range(2)] == [2, 2]


def test_a_few_kernels_stay_together_where_another_file_would_cost_more_than_it_saves(database: Database) -> None:
    wanted(database, *names("a", 4), seconds=0.1)
    assert len(members(database, take_file(database, workers=4))) == 4


@pytest.mark.parametrize("limit", [{"kernels": 3}, {"bytes": 400 * 2**20}], ids=["kernels", "memory"])
def test_a_file_has_no_more_kernels_than_its_limits_allow(database: Database, limit: dict[str, Any]) -> None:
    wanted(database, *names("a", 8), seconds=0.01, build={"predicted_bytes": 100 * 2**20})
    assert len(members(database, take_file(database, **limit))) == 3


def test_a_kernel_that_is_over_a_limit_alone_is_compiled_alone(database: Database) -> None:
    wanted(database, "a", "b", seconds=99.0, build={"predicted_bytes": 2**40})
    assert [len(members(database, take_file(database))) for _ in range(2)] == [1, 1]


@pytest.mark.parametrize("own", [3, 20])
def test_a_budget_keeps_the_file_short_for_all_that_are_in_it(database: Database, own: int) -> None:
    wanted(database, *names("a", own), seconds=0.1, budget_seconds=12.0)
    wanted(database, *names("b", 20), seconds=0.1)
    lease = take_file(database)
    assert len(members(database, lease)) == round((longest_group(12.0) - FIXED_SECONDS) / 0.1)


@given(st.floats(0.0, 1e6))
def test_no_budget_makes_files_longer_or_so_short_that_most_of_one_is_its_fixed_cost(budget: float) -> None:
    assert longest_group(None) == MAX_SECONDS
    assert longest_group(10.0) == 10.0 / BUDGET_SHARE < MAX_SECONDS
    assert 2 * FIXED_SECONDS <= longest_group(budget) <= longest_group(budget + 1.0) <= MAX_SECONDS


@pytest.mark.parametrize("other", [{"toolchain": "u" * 64}, {"target": "sm_90a"}], ids=["toolchain", "target"])
def test_a_file_is_for_one_target_and_one_toolchain(database: Database, other: dict[str, Any]) -> None:
    wanted(database, "a", seconds=0.1)
    wanted(database, "b", seconds=0.1, build=other)
    assert [members(database, take_file(database)) for _ in range(2)] == [["a"], ["b"]]


def test_a_worker_takes_only_what_its_toolchain_and_targets_allow(database: Database) -> None:
    wanted(database, "a", build={"toolchain": "u" * 64})
    assert take_file(database, toolchain=TOOLCHAIN) is None
    with database.write() as session:
        assert take_work.take(session, ["compile"], ["sm_90a"], "w", 5.0) is None
    assert members(database, take_file(database, toolchain="u" * 64)) == ["a"]


def test_one_kernel_of_two_texts_is_not_twice_in_a_file(database: Database) -> None:
    wanted(database, "a", seconds=0.1, build={"kernel": "k" * 64})
    wanted(database, "b", seconds=0.1, build={"kernel": "k" * 64})
    assert [members(database, take_file(database)) for _ in range(2)] == [["a"], ["b"]]


def test_a_build_is_leased_once(database: Database) -> None:
    wanted(database, "a")
    assert members(database, take_file(database)) == ["a"]
    later = wanted(database, "a", "b")
    lease = take_file(database)
    assert members(database, lease) == ["b"]
    assert lease is not None and lease.jobs == (later,)


def test_a_job_that_came_while_its_build_was_compiling_has_the_file_too(database: Database) -> None:
    first = wanted(database, "a")
    lease = take_file(database)
    second = wanted(database, "a")
    cancel(database, first)
    with database.write() as session:
        assert lease is not None and tasks.renew(session, lease, 5.0, 0.0) is tasks.Renewal.HELD
        assert set(compiled_for(session, lease.ref)) == {first, second}


# What could not be compiled.


def test_a_file_that_fails_is_tried_in_halves_and_then_alone(database: Database) -> None:
    job = wanted(database, *names("a", 8), seconds=0.1)
    give_back(database, take_file(database))
    assert set(states(database, *names("a", 8))) == {"pending"}
    halves = [take_file(database), take_file(database)]
    parts = [members(database, half) for half in halves]
    assert sorted([*parts[0], *parts[1]]) == names("a", 8)
    assert [len(part) for part in parts] == [4, 4]
    compile_leased(database, halves[0])  # type: ignore[arg-type]
    give_back(database, halves[1])
    alone = [members(database, take_file(database)) for _ in range(4)]
    assert sorted(alone) == [[name] for name in parts[1]]
    assert take_file(database) is None
    with database.read() as session:
        assert session.scalars(select(PendingBuildRow.build).where(PendingBuildRow.job_id == job)).all() == parts[1]


def test_a_file_that_a_limit_of_time_ended_is_tried_alone_at_once(database: Database) -> None:
    wanted(database, *names("a", 8), seconds=0.1)
    lease = take_file(database)
    assert lease is not None
    with database.write() as session:
        complete_group(session, lease, GroupFiles(), (), "it ran longer than 300 s", alone=True)
    files = [members(database, take_file(database)) for _ in range(8)]
    assert sorted(files) == [[name] for name in names("a", 8)]


def test_innocents_that_are_pending_do_not_join_suspects(database: Database) -> None:
    wanted(database, *names("a", 4), seconds=0.1)
    give_back(database, take_file(database))
    wanted(database, "b", seconds=0.1)
    assert sorted(members(database, take_file(database)) for _ in range(3)) == [["a00", "a02"], ["a01", "a03"], ["b"]]


def test_only_failures_alone_use_up_attempts(database: Database) -> None:
    job = add_job(database)
    plan_next(database, *names("a", 4))
    (problem_id,) = ids(database, job.id)
    files: list[tuple[str, ...]] = []
    while (lease := take_file(database)) is not None:
        files.append(tuple(members(database, lease)))
        give_back(database, lease)
    assert Counter(files) == {
        tuple(names("a", 4)): 1,
        ("a00", "a02"): 1,
        ("a01", "a03"): 1,
        **{(name,): 3 for name in names("a", 4)},
    }
    assert candidates_of(database, problem_id) == {f"c-{name}": "skipped" for name in names("a", 4)}
    assert states(database, *names("a", 4)) == [None] * 4
    with database.read() as session:
        assert session.scalars(select(PendingBuildRow.build)).all() == []
        assert session.scalars(select(TaskRow.kind).where(TaskRow.state == "waiting")).all() == ["finish"]
    # Nothing is stored of them: the next job tries anew.
    plan_next_of(database, "a00")
    compile_next(database)
    assert states(database, "a00") == ["ok"]


def expire(database: Database, clock: FakeClock) -> end_attempt.Expired:
    clock.advance(6)
    with database.write() as session:
        (expired,) = end_attempt.expire_leases(session)
    return expired


def lose(database: Database, lease: Lease | None) -> None:
    assert lease is not None
    with database.write() as session:
        assert end_attempt.lose(session, lease, "No space left on device") == "paused"


def test_a_pause_ends_where_the_machines_clock_is_set_back_behind_its_beginning(
    database: Database, clock: FakeClock
) -> None:
    wanted(database, "a")
    assert take_file(database) is not None
    expire(database, clock)
    assert take_file(database) is None, "not before the pause"
    clock.set_by(-86_400)
    assert members(database, take_file(database)) == ["a"]


def test_what_is_lost_comes_back_after_a_pause_then_alone_and_is_skipped_in_the_end(
    database: Database, clock: FakeClock
) -> None:
    wanted(database, "a", "b", seconds=0.1)
    lease = take_file(database)
    assert lease is not None
    expired = expire(database, clock)
    assert (expired.state, expired.jobs) == ("lost", lease.jobs)
    with pytest.raises(LostLease):
        compile_leased(database, lease)
    assert take_file(database) is None, "not before the pause"
    clock.advance(losses.pause_after(1))
    again = take_file(database)
    assert members(database, again) == ["a", "b"]
    lose(database, again)
    clock.advance(losses.pause_after(2))
    alone = [take_file(database), take_file(database)]
    assert [members(database, lease) for lease in alone] == [["a"], ["b"]]
    assert alone[1] is not None
    compile_leased(database, alone[1])
    lose(database, alone[0])
    for many in (3, 4):
        clock.advance(losses.pause_after(many))
        again = take_file(database)
        assert members(database, again) == ["a"]
        lose(database, again)
    clock.advance(60)
    assert take_file(database) is None
    with database.read() as session:
        (lost,) = known_builds(session, ["a"]).values()
    assert (lost.state, lost.attempts, lost.losses) == ("given_up", 0, losses.MOST)
    assert "No space left on device" in str(lost.log)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # other losses have the SQL of both
def test_a_loss_among_many_counts_for_little_and_still_comes_to_an_end(database: Database, clock: FakeClock) -> None:
    """Five builds that no compiler survives, each in a file of its own."""
    builds = names("a", 5)
    for name in builds:
        wanted(database, name, seconds=20.0)
    lost = 0
    for _ in range(250):
        while (lease := take_file(database)) is not None:
            assert len(members(database, lease)) == 1
            lose(database, lease)
            lost += 1
        clock.advance(2)
    with database.read() as session:
        states = {build.state for build in known_builds(session, builds).values()}
    assert states == {"given_up"}
    assert lost > 2 * len(builds) * losses.MOST


def test_a_build_that_is_wanted_after_it_was_given_up_starts_anew(database: Database, clock: FakeClock) -> None:
    wanted(database, "a", seconds=0.1)
    for _ in range(losses.MOST):
        lease = take_file(database)
        assert lease is not None
        with database.write() as session:
            end_attempt.lose(session, lease, "killed")
        clock.advance(60)
    wanted(database, "a", seconds=0.1)
    with database.read() as session:
        (again,) = known_builds(session, ["a"]).values()
    assert (again.state, again.losses, again.not_before, again.suspect) == ("pending", 0, None, None)
    assert members(database, take_file(database)) == ["a"]


@pytest.mark.parametrize(("limit", "again"), [(1.0, False), (1.5, False), (300.0, True)])
def test_what_a_limit_ended_is_compiled_again_under_a_larger_one(database: Database, limit: float, again: bool) -> None:
    wanted(database, "a", "b", seconds=0.1)
    lease = take_file(database)
    assert lease is not None
    failed = [
        BuildOutcome("a", "compile_timeout", log="it ran longer than 1.5 s", reached={"wall": 1.5}),
        BuildOutcome("b", "compile_error", log="x.cu(1): error: no"),
    ]
    with database.write() as session:
        record_builds(session, lease, failed)
        tasks.complete(session, lease)
    with database.write() as session:
        job = accept.create_jobs(session, [accept.NewJob([new_problem()])])[0].id
        both = [new_build("a"), new_build("b")]
        for _ in range(2):  # twice is once
            pending = want_builds(session, job, both, (), {"wall": limit, "cpu": 0.1})
            assert pending == ({TARGET: 1} if again else {})
        states = {
            build.id: (build.state, build.reached, build.log) for build in known_builds(session, ["a", "b"]).values()
        }
    assert states["b"] == ("compile_error", None, "x.cu(1): error: no")
    assert states["a"] == (
        ("pending", None, None) if again else ("compile_timeout", {"wall": 1.5}, "it ran longer than 1.5 s")
    )


def test_suspects_that_only_jobs_out_of_time_need_are_left_out(database: Database, clock: FakeClock) -> None:
    wanted(database, "a", "b", "c", "d", seconds=0.1, budget_seconds=9.0)
    second = wanted(database, "a", seconds=0.1)
    give_back(database, take_file(database))
    clock.advance(10)
    lease = take_file(database)
    assert members(database, lease) == ["a"]
    assert lease is not None and lease.jobs == (second,)
    assert take_file(database) is None


def test_what_a_stopping_worker_hands_back_is_no_suspect(database: Database) -> None:
    wanted(database, *names("a", 4), seconds=0.1)
    for _ in range(5):
        lease = take_file(database)
        assert lease is not None and len(members(database, lease)) == 4
        with database.write() as session:
            end_attempt.release(session, lease)


def test_what_was_recorded_before_a_worker_died_stands_and_the_rest_is_compiled_again(
    database: Database, clock: FakeClock
) -> None:
    job = add_job(database)
    plan_next(database, "a", "b", "c")
    lease = take_file(database)
    assert lease is not None
    some = [
        BuildOutcome("a", "ok", "code-a", {}, library="l" * 64),
        BuildOutcome("b", "compile_error", log="x.cu(1): error: no"),
    ]
    with database.write() as session:
        record_builds(session, lease, some)
    clock.advance(6)
    with database.write() as session:
        end_attempt.expire_leases(session)
    clock.advance(losses.pause_after(1))
    assert states(database, "a", "b", "c") == ["ok", "compile_error", "pending"]
    verify_next(database)  # also gives the failure to its candidate, which the lost worker had not done
    (problem_id,) = ids(database, job.id)
    assert candidates_of(database, problem_id) == {"c-a": "ok", "c-b": "compile_error", "c-c": None}
    compile_next(database)
    assert len(verify_next(database)) == 1


def test_verifying_is_charged_though_nothing_is_left_to_verify(database: Database, clock: FakeClock) -> None:
    job = add_job(database)
    plan_next(database, "a")
    lease = take_file(database)
    assert lease is not None
    with database.write() as session:
        failed = [BuildOutcome("a", "compile_error", log="x.cu(1): error: no")]
        record_builds(session, lease, failed)
    clock.advance(6)
    with database.write() as session:
        end_attempt.expire_leases(session)
    verify_next(database)  # of four seconds: gives the failure to its candidate
    with database.read() as session:
        (problem_id,) = problem_ids(session, job.id)
        problem = load_problem(session, problem_id)
    assert problem is not None and problem.seconds["verify"]["wall"] == pytest.approx(4.0)


def test_a_failed_file_is_charged_to_the_jobs_that_it_was_for(database: Database) -> None:
    first, second = add_job(database), add_job(database)
    plan_next(database, "a", "b")
    plan_next(database, "c")
    lease = take_file(database)
    assert lease is not None
    with database.write() as session:
        made = GroupFiles(compile=StageSeconds(wall=9.0, cpu=9.0))
        add_seconds(session, what_follows(session, lease, made)[1])
        complete_group(session, lease, made, (), "the compiler hung")
    with database.read() as session:
        spent = [
            load_problem(session, problem_id) for job in (first, second) for problem_id in problem_ids(session, job.id)
        ]
        trace = job_trace(session, second.id)
    seconds = [problem.seconds["compile"]["wall"] for problem in spent if problem]
    assert seconds == [pytest.approx(6.0), pytest.approx(3.0)]
    assert trace is not None
    assert [(task.kind, task.attempts[0].state) for task in trace.tasks] == [("plan", "done"), ("compile", "done")]


@pytest.mark.parametrize("cancelled", [False, True])
def test_what_failed_for_good_is_tried_again_for_all_that_wait(database: Database, cancelled: bool) -> None:
    """A job that came before it was cleared lets it wait again, and may be cancelled then."""
    first = add_job(database)
    plan_next(database, "a")
    compile_next(database)
    lease = take_one(database, "verify")
    with database.write() as session:
        end_attempt.fail(session, lease, "no space left", retry=False)
    with database.read() as session:
        late_part = find_ended(session)
    second = add_job(database)
    plan_next(database, "a")
    assert late_part is not None
    with database.write() as session:
        late_part(session)
    if cancelled:
        cancel(database, second.id)
    verify_next(database)
    for job in (first, *([] if cancelled else [second])):
        assert candidates_of(database, ids(database, job.id)[0]) == {"c-a": "ok"}


# What no job needs.


def test_the_builds_of_a_cancelled_job_are_forgotten_but_for_those_that_another_needs(database: Database) -> None:
    first = wanted(database, "a", "shared")
    wanted(database, "shared")
    cancel(database, first)
    assert states(database, "a", "shared") == [None, "pending"]
    with database.read() as session:
        assert pending_counts(session, 10) == {TARGET: 1}


def test_a_file_that_is_cancelled_leaves_nothing_pending(database: Database) -> None:
    job = wanted(database, *names("a", 3))
    lease = take_file(database)
    cancel(database, job)
    assert states(database, *names("a", 3)) == [None] * 3
    assert take_file(database) is None
    with database.write() as session:
        assert lease is not None and tasks.renew(session, lease, 5.0, 0.0) is tasks.Renewal.CANCELLED


def test_a_large_job_is_cleared_a_part_at_a_time(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_jobs, "CLEARED_AT_ONCE", 10)
    job = add_job(database)
    plan_next(database, *names("a", 35))
    with database.write() as session:
        end_jobs.cancel_job(session, job.id)
    with database.write() as session:
        assert clear_all(session) == 4 + 4, "demands, and candidates"
    (problem_id,) = ids(database, job.id)
    assert set(candidates_of(database, problem_id).values()) == {"skipped"}
    assert set(states(database, *names("a", 35))) == {None}


def ids(database: Database, job_id: str) -> list[int]:
    with database.read() as session:
        return problem_ids(session, job_id)


def plan_next_of(database: Database, *builds: str) -> None:
    add_job(database)
    plan_next(database, *builds)
