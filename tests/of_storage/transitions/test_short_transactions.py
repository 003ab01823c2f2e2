"""However many problems share kernels, no transaction does more than a part of what follows from them.

Of SQLite the instructions of its virtual machine are counted, which no other load changes: a million take 20 to 60 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event

from cukiln.types import StageSeconds
from storage.database.session import Database
from storage.database.sql import chunks, insert_new
from storage.database.tables import BuildRow, ImportRow, PendingBuildRow
from storage.entities import jobs
from storage.entities.groups import NewBuild, kernels_of, load_group
from storage.entities.jobs import problems_to_plan
from storage.entities.stage_times import PROBLEMS_AT_ONCE, Spent, add_seconds
from storage.entities.verdicts import NewVerdict
from storage.queue import tasks
from storage.queue.tasks import Lease
from storage.transfer.imports import Import, ImportedCandidate, ImportedProblem, Importer, import_results
from storage.transfer.withdrawals import clear_withdrawn, find_broken_off
from storage.transitions import accept, end_attempt, end_jobs, take_work
from storage.transitions.apply_verdicts import Versions
from storage.transitions.end_jobs import RECENT_SECONDS, expire_budgets, find_ended
from storage.transitions.groups import (
    BuildOutcome,
    GroupFiles,
    apply_group_verdicts,
    builds_to_verify,
    complete_group,
    complete_verified,
    record_builds,
    record_verdicts,
    verify_shares,
    what_follows,
)
from storage.transitions.measure import (
    apply_measured_verdicts,
    candidates_to_measure,
    complete_measured,
    forget_group_library,
    record_measured,
)
from storage.transitions.pending_builds import NewCandidate, PlannedProblem, end_plan, record_candidates
from storage.transitions.take_work import FileLimits
from tests.support.fixtures.storage import (
    CPU_PLAN,
    DRIVER,
    GPU_CLASS,
    TARGET,
    TOOLCHAIN,
    VERSIONS,
    EveryOperator,
    measured,
    measurement,
    new_build,
    new_problem,
    take_one,
)
from tests.support.run.each_run import some_each_run
from tests.support.run.fake_clock import FakeClock

PROBLEMS, KERNELS = 240, 20
MOST_INSTRUCTIONS = 400_000
STEP = 1_000
KNOWN = Versions(**VERSIONS)
CPU_CLASS = "predicted:sm_80"
on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # the instructions are counted there


@contextmanager
def counted(database: Database) -> Iterator[list[int]]:
    """Instructions of each write transaction inside."""
    counts: list[int] = []
    running = [0]

    def count() -> int:
        running[0] += STEP
        return 0

    def watch(connection: Any, *_: Any) -> None:
        connection.set_progress_handler(count, STEP)

    def begin(_: Any) -> None:
        running[0] = 0

    def commit(_: Any) -> None:
        counts.append(running[0])

    database.dispose()
    event.listen(database.engine, "connect", watch)
    event.listen(database.engine, "begin", begin)
    event.listen(database.engine, "commit", commit)
    yield counts
    for name, heard in (("connect", watch), ("begin", begin), ("commit", commit)):
        event.remove(database.engine, name, heard)
    database.dispose()


@pytest.fixture
def transactions(database: Database) -> Iterator[list[int]]:
    """Of the whole test. At the end none of them did more than a part."""
    with counted(database) as counts:
        yield counts
    assert max(counts) <= MOST_INSTRUCTIONS, sorted(counts)[-5:]


def names(count: int) -> list[str]:
    return [f"b{number:02}" for number in range(count)]


def submit(database: Database, device_class: str, count: int = PROBLEMS, **job: Any) -> str:
    problems = [new_problem(f"p{number}", device_class=device_class) for number in range(count)]
    with database.write() as session:
        return accept.create_jobs(session, [accept.NewJob(problems, **job)])[0].id


@on_sqlite
def test_a_large_job_is_written_in_parts(database: Database, transactions: list[int]) -> None:
    new = accept.NewJob([new_problem(f"p{number}") for number in range(2_500)])
    assert accept.create_large_job(database, new, lambda _: None) is not None
    assert len(transactions) >= 2 + 2_500 / accept.PROBLEMS_AT_ONCE


def plan(database: Database) -> None:
    """Every problem gets the same kernels, as a planner records them."""
    builds = {name: new_build(name) for name in names(KERNELS)}
    while True:
        with database.write() as session:
            lease = take_work.take(session, ["plan"], None, "w", 1e6)
        if lease is None:
            return
        plan_task(database, lease, builds)


def plan_task(database: Database, lease: Lease, builds: dict[str, NewBuild]) -> None:
    with database.read() as session:
        problems = problems_to_plan(session, lease)
    for some in chunks(problems, 400 // KERNELS):
        pairs = [
            (problem.id, NewCandidate(f"c-{name}", {}, f"{name:0>64}", name)) for problem in some for name in builds
        ]
        with database.write() as session:
            record_candidates(session, lease, pairs, builds, KNOWN)
            for problem in some:
                end_plan(session, lease, PlannedProblem(problem.id, KERNELS, KERNELS, {}, StageSeconds()))
    with database.write() as session:
        tasks.complete(session, lease)


def apply_all(database: Database, part: Any) -> None:
    more = True
    while more:
        with database.write() as session:
            _, more = part(session)


def spend(database: Database, spent: Spent) -> None:
    for some in chunks(spent, PROBLEMS_AT_ONCE):
        with database.write() as session:
            add_seconds(session, {problem: spent[problem] for problem in some})


def compile_all(database: Database, failing: frozenset[str] = frozenset()) -> None:
    lease = take_one(database, "compile", seconds=1e6)
    with database.read() as session:
        group = load_group(session, lease.ref)
    assert group is not None
    outcomes = [
        BuildOutcome(build, "compile_error", log="error")
        if build in failing
        else BuildOutcome(build, "ok", f"code-{build}", {"registers": 32}, library="library")
        for build in (kernel.build for kernel in kernels_of(group))
    ]
    for some in chunks(outcomes, 16):
        with database.write() as session:
            record_builds(session, lease, some)
    apply_all(database, lambda session: apply_group_verdicts(session, lease, KNOWN))
    made = GroupFiles(compile=StageSeconds(wall=1.0, cpu=1.0))
    with database.read() as session:
        unverified, spent = what_follows(session, lease, made)
    spend(database, spent)
    with database.write() as session:
        complete_group(session, lease, made, unverified)


def verify_all(database: Database) -> None:
    lease = take_one(database, "verify", seconds=1e6)
    with database.read() as session:
        asked = builds_to_verify(session, lease.ref, **CPU_PLAN)
    assert len(asked) == KERNELS - 1
    with database.write() as session:
        record_verdicts(
            session,
            lease,
            [NewVerdict(kernel.slice, "matmul", "ok", None, {}, 1.0, 1.0) for kernel in asked],
            EveryOperator("1"),
        )
    apply_all(database, lambda session: apply_group_verdicts(session, lease, KNOWN))
    with database.read() as session:
        spent = verify_shares(session, lease, asked, StageSeconds(wall=1.0, cpu=1.0))
    spend(database, spent)
    with database.write() as session:
        assert complete_verified(session, lease, asked, verify=StageSeconds(wall=1.0), plans=EveryOperator("1")) == []


def clear(database: Database) -> int:
    parts = 0
    while True:
        with database.read() as session:
            part = find_ended(session) or find_broken_off(session)
        if part is None:
            return parts
        with database.write() as session:
            part(session)
        parts += 1


def unverified(database: Database) -> int:
    with database.engine.connect() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM candidates WHERE verdict IS NULL").scalar_one())


def finishes(database: Database) -> int:
    with database.engine.connect() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM tasks WHERE kind = 'finish'").scalar_one())


@on_sqlite
def test_equal_problems_are_planned_compiled_and_verified(database: Database, transactions: list[int]) -> None:
    submit(database, CPU_CLASS)
    plan(database)
    compile_all(database, failing=frozenset({"b03"}))
    verify_all(database)
    assert (unverified(database), finishes(database)) == (0, PROBLEMS)
    submit(database, CPU_CLASS)
    plan(database)
    assert (unverified(database), finishes(database)) == (0, 2 * PROBLEMS), "all is known"


@on_sqlite
def test_equal_jobs_share_a_file(database: Database, transactions: list[int]) -> None:
    for _ in range(120):
        submit(database, CPU_CLASS, 1)
        plan(database)
    compile_all(database, failing=frozenset({"b03"}))
    verify_all(database)
    assert (unverified(database), finishes(database)) == (0, 120)


@on_sqlite
def test_equal_problems_are_measured_and_one_kernel_is_wrong(database: Database, transactions: list[int]) -> None:
    submit(database, GPU_CLASS)
    plan(database)
    compile_all(database)
    lease = take_one(database, "measure", seconds=1e6)
    with database.read() as session:
        asked = candidates_to_measure(session, lease.ref, GPU_CLASS, EveryOperator("g1"))
    results = [measured(kernel, "incorrect" if kernel.build == "b05" else "ok") for kernel in asked]
    with database.write() as session:
        record_measured(session, lease, results, driver=DRIVER, plans=EveryOperator("g1"))
    apply_all(database, lambda session: apply_measured_verdicts(session, results, GPU_CLASS, EveryOperator("g1")))
    with database.write() as session:
        assert complete_measured(session, lease, results, plans=EveryOperator("g1")) == []
    assert unverified(database) == 0


@on_sqlite
def test_a_library_that_many_wait_for_is_lost(database: Database, transactions: list[int]) -> None:
    submit(database, GPU_CLASS)
    plan(database)
    compile_all(database)
    apply_all(database, lambda session: forget_group_library(session, "library"))
    assert unverified(database) == 0
    with database.read() as session:
        assert {row.library for row in session.query(BuildRow)} == {None}


ENDS = ("late", "given up", "verify failed")


# Each way to end, in parts; some as large as they come.
@pytest.mark.parametrize(
    ("how", "at_once"),
    [
        ("cancelled", end_jobs.CLEARED_AT_ONCE),
        ("late before it was planned", end_jobs.CLEARED_AT_ONCE),
        *some_each_run([(how, 50) for how in ENDS]),
        *(pytest.param(how, end_jobs.CLEARED_AT_ONCE, marks=pytest.mark.long) for how in ENDS),
    ],
)
@on_sqlite
def test_many_problems_end_before_their_time(
    database: Database,
    clock: FakeClock,
    transactions: list[int],
    how: str,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(end_jobs, "CLEARED_AT_ONCE", at_once)
    count = at_once + at_once // 5
    job = submit(database, CPU_CLASS, count, budget_seconds=60.0)
    lease: Lease | None
    if how == "late before it was planned":
        lease = take_one(database, "plan", seconds=1e6)
    else:
        plan(database)
    if how == "cancelled":
        with database.write() as session:
            end_jobs.cancel_job(session, job)
    elif how.startswith("late"):
        clock.advance(61)
        with database.write() as session:
            assert expire_budgets(session) == [job]
    elif how == "given up":
        for _ in range(3 * KERNELS + 10):
            with database.write() as session:
                lease = take_work.take(session, ["compile"], None, "w", 1e6, FileLimits())
                if lease is not None:
                    complete_group(session, lease, GroupFiles(), (), "the compiler died")
        assert lease is None
    else:
        compile_all(database)
        lease = take_one(database, "verify", seconds=1e6)
        with database.write() as session:
            end_attempt.fail(session, lease, "the disk is full", retry=False)
    assert clear(database) > 1
    assert unverified(database) == 0
    assert finishes(database) == (0 if how == "cancelled" else count)


@pytest.mark.parametrize("state", ["ok", "pending"])
@on_sqlite
def test_what_was_compiled_before_and_what_a_cancelled_job_leaves_is_not_looked_at(
    database: Database, state: str
) -> None:
    old = submit(database, CPU_CLASS, 1)
    others = [
        {**vars(new_build(f"o{number}")), "state": state, "group_id": None, "created_at": 0.0}
        for number in range(30_000)
    ]
    demands = [
        {"job_id": old, "build": f"o{number}", "wanted_at": 0.0, "predicted_seconds": 1.0}
        | {"target": TARGET, "toolchain": TOOLCHAIN}
        for number in range(len(others) if state == "pending" else 0)
    ]
    with database.write() as session:
        insert_new(session, BuildRow, others)
        insert_new(session, PendingBuildRow, demands)
        end_jobs.cancel_job(session, old)
    submit(database, CPU_CLASS, 20)
    with counted(database) as counts:
        plan(database)
        compile_all(database, failing=frozenset({"b03"}))
        verify_all(database)
        with database.read() as session:
            part = find_ended(session)
        if part is not None:
            with database.write() as session:
                part(session)
    assert finishes(database) == 20
    assert max(counts) <= MOST_INSTRUCTIONS, sorted(counts)[-5:]


@on_sqlite
def test_problems_that_ended_long_ago_are_not_looked_at(database: Database, clock: FakeClock) -> None:
    for _ in range(3):
        job = submit(database, CPU_CLASS, 3_000)
        with database.write() as session:
            end_jobs.cancel_job(session, job)
    clock.advance(2 * RECENT_SECONDS)
    submit(database, CPU_CLASS, 20)
    with counted(database) as counts, database.write() as session:
        assert find_ended(session) is None
    assert max(counts) <= 20_000, counts


def an_import(candidates: int) -> Import:
    imported = [
        ImportedCandidate(
            f"c-{number}", {}, "k", f"slice-{number}", TOOLCHAIN, f"code-{number}", {}, "ok", None, {},
            measurement(7.0), None, StageSeconds(), StageSeconds(),
        )
        for number in range(candidates)
    ]  # fmt: skip
    problem = ImportedProblem("i", "matmul", {"m": 64}, TARGET, "i" * 64, {"level": 1}, 1, imported, None)
    return Import("1" * 64, GPU_CLASS, "GPU-1", DRIVER, EveryOperator("g1"), 1.0, None, False, [problem])


SENDER = Importer("lab")


class Killed(BaseException):
    pass


def interrupt(database: Database, monkeypatch: pytest.MonkeyPatch, new: Import, after: int) -> None:
    """Import it with a service that is killed in a pause, after so many."""
    pauses = iter([None] * after)

    def pause() -> None:
        if next(pauses, Killed) is Killed:
            raise Killed

    monkeypatch.setattr(database, "pause", pause)
    with pytest.raises(Killed):
        import_results(database, new, SENDER, lambda session: None)


@on_sqlite
def test_an_import_that_is_interrupted_is_gone_on_with(
    database: Database, transactions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    new = an_import(2_000)
    interrupt(database, monkeypatch, new, 4)
    with database.read() as session:
        job = jobs.job_state(session, new.job_id)
    assert job is not None and job.state == "queued"
    assert finishes(database) == 0
    monkeypatch.undo()
    assert import_results(database, new, SENDER, lambda session: None) is not None
    assert import_results(database, new, SENDER, lambda session: None) is None
    assert finishes(database) == 1
    with database.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM candidates").scalar_one() == 2_000


@pytest.mark.parametrize("when", ["while it is written", "when it has begun"])
def test_an_import_that_continues_after_all_loses_nothing(
    database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    new = an_import(2_000)
    interrupt(database, monkeypatch, new, 8)
    clock.advance(601)
    with database.read() as session:
        part = find_broken_off(session)
    assert part is not None
    clearing = (lambda: clear(database)) if when == "while it is written" else (lambda: None)
    monkeypatch.setattr(database, "pause", clearing)
    assert import_results(database, new, SENDER, lambda session: None) is not None
    with database.write() as session:
        part(session)
    with database.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM candidates").scalar_one() == 2_000


@on_sqlite
def test_an_import_of_many_problems_is_withdrawn(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    job = submit(database, GPU_CLASS, 5_000)
    sent = {"by": "lab", "overwrites": False, "device_class": GPU_CLASS, "uuid": "GPU-1", "driver": DRIVER}
    with database.write() as session:
        session.add(ImportRow(id=job, **sent, measured_at=1.0, created_at=1.0, withdrawn_at=2.0))
    monkeypatch.setattr(database, "pause", lambda: None)
    with counted(database) as counts:
        clear_withdrawn(database)
    with database.read() as session:
        assert jobs.job_state(session, job) is None
    assert max(counts) <= MOST_INSTRUCTIONS


def test_an_import_that_is_not_continued_is_forgotten(
    database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = an_import(2_000)
    interrupt(database, monkeypatch, new, 4)
    assert clear(database) == 0, "it may be going on"
    clock.advance(601)
    assert clear(database) > 1
    with database.read() as session:
        assert jobs.job_state(session, new.job_id) is None
    monkeypatch.undo()
    assert import_results(database, new, SENDER, lambda session: None) is not None
