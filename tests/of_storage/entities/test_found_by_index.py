"""What an index finds: records of a signature by size, jobs by their labels; also of rows of an older release."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event, text

from codegen.neighbours import Place, place_of, stored_place
from codegen.operators import operator
from cukiln.types import WinnerRecord
from storage.database import session as sessions
from storage.database.session import Database
from storage.entities.jobs import list_jobs
from storage.entities.winners import neighbours_of, publish_winner, withdraw_winner
from storage.transitions import accept
from tests.support.fixtures.storage import add_job, new_problem, winner_record
from tests.support.run.fake_clock import FakeClock

MATMUL = operator("matmul")


def problem(**fields: Any) -> dict[str, Any]:
    return MATMUL.parse({"operator": "matmul", "m": 64, "n": 64, "k": 64, **fields}).canonical()


def record_of(**fields: Any) -> WinnerRecord:
    fields = {"key": "", "target": "sm_80", **fields}
    key, target = fields.pop("key"), fields.pop("target")
    return winner_record(f"{key:k>64}", "c", problem=problem(**fields), target=target)


def keys_near(database: Database, at_most: int, **fields: Any) -> list[str]:
    place = place_of(MATMUL, MATMUL.parse(problem(**fields)))
    with database.read() as session:
        return [neighbour.key.lstrip("k") for neighbour in neighbours_of(session, place, "sm_80", at_most)]


def test_records_of_a_signature_are_found_by_the_next_sizes(database: Database) -> None:
    with database.write() as session:
        for m in (8, 64, 512, 4096):
            publish_winner(session, record_of(key=str(m), m=m), attempt="t")
        for other in ({"dtype": "float16"}, {"layout": "tt"}, {"n": 65}, {"target": "sm_90a"}):
            publish_winner(session, record_of(key="other" + str(other), **other), attempt="t")
    assert keys_near(database, 1, m=64) == ["64", "8"]
    assert keys_near(database, 1, m=65) == ["512", "64"]
    assert keys_near(database, 9, m=65) == ["512", "4096", "64", "8"]
    assert keys_near(database, 9, dtype="int8") == []


def test_a_withdrawn_record_is_found_no_more_and_one_that_comes_again_is(database: Database) -> None:
    for found in (["x"], [], ["x"]):
        with database.write() as session:
            if found:
                publish_winner(session, record_of(key="x"), attempt=database.clock.new_id())
            else:
                withdraw_winner(session, f"{'x':k>64}", "t2")
        assert keys_near(database, 1) == found


@pytest.mark.parametrize("problem", [{"m": 64}, {"operator": "matmul", "m": -1, "n": 1, "k": 1}])
def test_what_this_release_cannot_read_has_no_place(problem: dict[str, Any]) -> None:
    assert stored_place("matmul", problem) is None and stored_place("not there", problem) is None


def listed(database: Database, *labels: tuple[str, str], **options: Any) -> list[str]:
    names, cursor = [], None
    while True:
        with database.read() as session:
            page = list_jobs(session, labels=labels, cursor=cursor, **options)
        names += [str(job.name) for job in page.jobs]
        if (cursor := page.next_cursor) is None:
            return names


def test_jobs_of_a_label_are_listed_newest_first_a_page_at_a_time(database: Database, clock: FakeClock) -> None:
    for number in range(7):
        clock.advance(1)
        add_job(
            database, name=str(number), labels={"team": "nlp" if number % 2 else "vision", "half": str(number // 4)}
        )
    large = accept.NewJob([new_problem("p")], name="large", labels={"team": "nlp"})
    clock.advance(1)
    assert accept.create_large_job(database, large, lambda session: None) is not None
    add_job(database, name="none")
    assert listed(database, ("team", "nlp"), limit=2) == ["large", "5", "3", "1"]
    assert listed(database, ("team", "nlp"), ("half", "0"), limit=1) == ["3", "1"]
    assert listed(database, ("team", "nlp"), state="done") == listed(database, ("nlp", "team")) == []
    assert len(listed(database, limit=3)) == 9


def test_an_index_answers_what_is_asked_of_a_label_or_a_signature(database: Database) -> None:
    """Not a look at every job or record."""
    statements: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith("SELECT"):
            statements.append((statement, parameters))

    event.listen(database.engine, "before_cursor_execute", note)
    listed(database, ("team", "nlp"))
    keys_near(database, 5)
    event.remove(database.engine, "before_cursor_execute", note)
    assert len(statements) == 3
    if not database.is_sqlite:  # whose planner reads an empty table whole
        return
    with database.read() as session:
        for statement, parameters in statements:
            plan = session.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
            steps = "; ".join(row[3] for row in plan)
            assert "ix_job_labels_label" in steps or "ix_winners_neighbours" in steps, steps
            assert "SCAN" not in steps and "TEMP B-TREE FOR ORDER" not in steps.replace("LAST TERM OF", ""), steps


def test_rows_of_an_older_release_are_found_too(database_url: str, clock: FakeClock) -> None:
    database = Database(database_url, clock)
    database.migrate()
    with database.write() as session:
        publish_winner(session, record_of(key="old"), attempt="t")
        publish_winner(session, record_of(key="gone"), attempt="t")
        withdraw_winner(session, f"{'gone':k>64}", "t2")
        publish_winner(session, winner_record("u" * 64, "c"), attempt="t")  # a problem that cannot be read
    add_job(database, name="old", labels={"team": "nlp"})
    add_job(database, name="plain")
    with database.write() as session:
        for statement in (
            "DROP INDEX ix_winners_neighbours",
            "ALTER TABLE winners DROP COLUMN signature",
            "ALTER TABLE winners DROP COLUMN size",
            "DROP TABLE job_labels",
            "DROP INDEX ix_libraries_ptx",
            "ALTER TABLE libraries DROP COLUMN ptx_verdict",
            "ALTER TABLE jobs DROP COLUMN ptx",
            "ALTER TABLE builds DROP COLUMN ptx_verdict",
            "UPDATE alembic_version SET version_num = '0015'",
        ):
            session.execute(text(statement))
    database.migrate()
    database.check()
    assert sessions.HEAD == "0018"
    assert keys_near(database, 5) == ["old"]
    assert listed(database, ("team", "nlp")) == ["old"]
    database.dispose()


def test_labels_go_with_their_job(database: Database, clock: FakeClock) -> None:
    with database.write() as session:
        job = accept.create_jobs(session, [accept.NewJob([new_problem("p", cached=True)], labels={"team": "nlp"})])[0]
    assert job.state == "done"
    with database.write() as session:
        session.execute(text("DELETE FROM jobs"))
    with database.read() as session:
        assert session.scalar(text("SELECT count(*) FROM job_labels")) == 0


def test_a_problems_size_is_near_those_of_problems_with_near_extents() -> None:
    small, large = (place_of(MATMUL, MATMUL.parse(problem(m=m))) for m in (64, 128))
    assert isinstance(small, Place) and small.signature == large.signature and small.size < large.size < small.size + 1
