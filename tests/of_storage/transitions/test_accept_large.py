"""A large job is written in parts: nothing shows it, or works on it, before the last, and what is interrupted goes."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select

from storage.database.session import Database, Session
from storage.database.tables import JobProblemRow, JobRow, TaskRow
from storage.entities.jobs import job_state, list_jobs
from storage.maintenance.retention import ACCEPT_SECONDS, find_half_accepted
from storage.reports.times import timings
from storage.transitions import accept
from storage.transitions.take_work import waiting_counts
from tests.support.fixtures.storage import new_problem
from tests.support.run.fake_clock import FakeClock

COUNT = 7


@pytest.fixture(autouse=True)
def in_threes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "PROBLEMS_AT_ONCE", 3)


class Killed(Exception):
    pass


def job_of(count: int = COUNT) -> accept.NewJob:
    return accept.NewJob([new_problem(f"p{number}") for number in range(count)])


def admit_all(_: Session) -> None: ...


def rows(database: Database) -> dict[str, int]:
    with database.read() as session:
        tables = (JobRow, JobProblemRow, TaskRow)
        return {table.__tablename__: session.scalar(select(func.count()).select_from(table)) or 0 for table in tables}


def assert_nothing_shows_it(database: Database) -> None:
    with database.read() as session:
        assert list_jobs(session).jobs == []
        assert timings(session, "operator").timings == timings(session, "day").timings == []
        assert waiting_counts(session) == {}
        assert all(job_state(session, id) is None for id in session.scalars(select(JobRow.id)))


def interrupted_at(database: Database, monkeypatch: pytest.MonkeyPatch, pause: int) -> None:
    """Accept a job in a process that ends at this of its pauses between two transactions."""
    pauses = 0

    def ends() -> None:
        nonlocal pauses
        if pauses == pause:
            raise Killed
        pauses += 1

    with monkeypatch.context() as interrupted:
        interrupted.setattr(database, "pause", ends)
        with pytest.raises(Killed):
            accept.create_large_job(database, job_of(), admit_all)


def test_it_is_the_job_that_one_transaction_writes(database: Database) -> None:
    created = accept.create_large_job(database, job_of(), admit_all)
    with database.write() as session:
        other = accept.create_jobs(session, [job_of()])[0]
    assert created is not None and (created.state, created.tasks) == ("queued", other.tasks)
    with database.read() as session:
        problem, kept = JobProblemRow.__table__.c, {}
        for id in (created.id, other.id):
            its = select(JobProblemRow.__table__).where(problem.job_id == id).order_by(problem.position)
            kept[id] = [{**row._mapping, "id": 0, "job_id": ""} for row in session.execute(its)]
        assert len(kept[other.id]) == COUNT and kept[created.id] == kept[other.id]
        states = [job_state(session, id) for id in (created.id, other.id)]
        assert [{**state._mapping, "id": ""} for state in states if state is not None] == 2 * [
            {**states[1]._mapping, "id": ""}  # type: ignore[union-attr]
        ]


@pytest.mark.parametrize("pause", range(4))
def test_what_is_interrupted_is_not_seen_and_goes(
    database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, pause: int
) -> None:
    interrupted_at(database, monkeypatch, pause)
    assert rows(database) == {"jobs": 1, "job_problems": min(3 * pause, COUNT), "tasks": 0}
    assert_nothing_shows_it(database)
    database.in_parts(find_half_accepted)
    assert rows(database)["jobs"] == 1, "it may be under way"
    clock.advance(ACCEPT_SECONDS + 1)
    database.in_parts(find_half_accepted)
    assert rows(database) == {"jobs": 0, "job_problems": 0, "tasks": 0}


def test_an_acceptance_that_takes_too_long_keeps_nothing(
    database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def sleeps() -> None:
        if len(begun) == 1:
            clock.advance(ACCEPT_SECONDS + 1)
            with database.read() as session:
                part = find_half_accepted(session)
            assert part is not None
            with database.write() as session:
                part(session)
        begun.append(1)

    with monkeypatch.context() as slow:
        slow.setattr(database, "pause", sleeps)
        assert accept.create_large_job(database, job_of(), admit_all) is None
    assert_nothing_shows_it(database)
    database.in_parts(find_half_accepted)
    assert rows(database) == {"jobs": 0, "job_problems": 0, "tasks": 0}


@pytest.mark.parametrize("calls", [0, 1])
def test_it_may_be_refused_at_the_beginning_and_at_the_end(database: Database, calls: int) -> None:
    admitted: list[int] = []

    def admit(_: Session) -> None:
        if len(admitted) == calls:
            raise Killed
        admitted.append(1)

    with pytest.raises(Killed):
        accept.create_large_job(database, job_of(), admit)
    assert_nothing_shows_it(database)


def test_a_job_that_has_been_accepted_stays(database: Database, clock: FakeClock) -> None:
    accept.create_large_job(database, job_of(), admit_all)
    before = rows(database)
    clock.advance(ACCEPT_SECONDS + 1)
    database.in_parts(find_half_accepted)
    assert rows(database) == before
