"""Statements that several modules share."""

from typing import Any

from storage.database.session import Database
from storage.database.sql import change_each, core
from storage.database.tables import JobProblemRow
from tests.support.fixtures.storage import add_job, problem_ids


def test_rows_are_changed_by_their_keys_and_one_that_is_gone_is_left_out(database: Database) -> None:
    job = add_job(database, 3)
    with database.write() as session:
        first, second, third = problem_ids(session, job.id)
        given: list[tuple[int, dict[str, Any]]] = [
            (first, {"lower": {"wall": 1.0}}),
            (third, {}),
            (third + 1, {"lower": {"wall": 2.0}}),
        ]
        for rows in ([given[0]], [given[2]], given[1:], []):
            change_each(session, JobProblemRow, [{"id": id, "seconds": seconds, "error": "e"} for id, seconds in rows])
    with database.read() as session:
        found = session.execute(core(JobProblemRow).select().order_by(JobProblemRow.id)).all()
    assert [(row.id, row.seconds, row.error) for row in found] == [
        (first, {"lower": {"wall": 1.0}}, "e"),
        (second, {}, None),
        (third, {}, "e"),
    ]
