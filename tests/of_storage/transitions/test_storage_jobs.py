"""Jobs: durable when created, listed page by page, settled."""

from __future__ import annotations

import pytest

from storage.database.pages import make_cursor
from storage.database.session import Database
from storage.entities import jobs
from storage.errors import BadCursor
from storage.transitions import accept, end_jobs
from storage.transitions.end_jobs import settle_job
from storage.transitions.take_work import waiting_counts
from tests.support.fixtures.storage import add_job, new_problem, plan_next, take_one
from tests.support.run.fake_clock import FakeClock


@pytest.mark.parametrize(("problems", "tasks"), [(1, 1), (32, 1), (33, 2), (100, 4)])
def test_problems_are_planned_in_chunks_of_32(database: Database, problems: int, tasks: int) -> None:
    assert add_job(database, count=problems).tasks == tasks
    with database.read() as session:
        assert waiting_counts(session) == {("plan", None): tasks}


def test_a_job_is_one_transaction(database: Database) -> None:
    with pytest.raises(RuntimeError, match="the disk is full"), database.write() as session:
        accept.create_jobs(session, [accept.NewJob([new_problem()])])[0]
        raise RuntimeError("the disk is full")
    with database.read() as session:
        assert jobs.list_jobs(session).jobs == []
        assert waiting_counts(session) == {}


def test_a_job_needs_a_problem(database: Database) -> None:
    with pytest.raises(ValueError, match="at least one problem"), database.write() as session:
        accept.create_jobs(session, [accept.NewJob([])])[0]


def test_jobs_are_listed_newest_first_page_by_page(database: Database, clock: FakeClock) -> None:
    created = []
    for number in range(5):
        clock.advance(number % 2)  # pairs of one moment
        created.append(add_job(database, count=number + 1).id)
    seen, cursor, sizes = [], None, []
    with database.read() as session:
        while True:
            page = jobs.list_jobs(session, limit=2, cursor=cursor)
            seen += [job.job for job in page.jobs]
            sizes += [job.problem_count for job in page.jobs]
            cursor = page.next_cursor
            if cursor is None:
                break
    assert seen == created[::-1]
    assert sizes == [5, 4, 3, 2, 1]


def test_jobs_are_listed_by_state(database: Database) -> None:
    waiting, ended = add_job(database), add_job(database)
    with database.write() as session:
        end_jobs.cancel_job(session, ended.id)
        assert [job.job for job in jobs.list_jobs(session, state="cancelled").jobs] == [ended.id]
        assert [job.job for job in jobs.list_jobs(session, state="queued").jobs] == [waiting.id]
        assert jobs.unfinished_jobs(session) == 1


@pytest.mark.parametrize(
    "cursor", ["", "?", "bm9wZQ", make_cursor(1), make_cursor("x", "y"), make_cursor(True, "y"), "é", "W" * 4000]
)
def test_a_cursor_that_was_not_made_here_is_refused(database: Database, cursor: str) -> None:
    with pytest.raises(BadCursor, match="take next_cursor"), database.read() as session:
        jobs.list_jobs(session, cursor=cursor)


def test_unknown_jobs_are_none(database: Database) -> None:
    with database.write() as session:
        assert jobs.job_state(session, "nope") is None
        assert end_jobs.cancel_job(session, "nope") is None


def test_an_ended_job_cannot_be_cancelled(database: Database) -> None:
    with database.write() as session:
        job = accept.create_jobs(session, [accept.NewJob([new_problem(cached=True, winner="c")])])[0]
        status = end_jobs.cancel_job(session, job.id)
    assert status is not None and status.state == "done"


def test_settling_closes_a_job_once_and_not_before_its_last_problem(database: Database) -> None:
    job = add_job(database, count=2)
    plan_next(database)
    with database.write() as session:
        assert settle_job(session, job.id) is None
        end_jobs.cancel_job(session, job.id)
        assert settle_job(session, job.id) is None


@pytest.mark.parametrize("priority", ["low", "normal", "high"])
def test_the_priority_of_a_job_is_that_of_its_tasks(database: Database, priority: jobs.Priority) -> None:
    add_job(database, priority="normal")
    job = add_job(database, priority=priority)
    with database.read() as session:
        status = jobs.job_state(session, job.id)
    assert status is not None and jobs.priority_name(status.priority) == priority
    assert (take_one(database, "plan").job_id == job.id) is (priority == "high")
