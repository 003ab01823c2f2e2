"""The database: schema, transactions, many processes, crashes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, inspect, select, text

from cukiln.types import StageSeconds
from storage.database import MIGRATIONS, Database
from storage.errors import (
    BadCursor,
    BlobCorrupt,
    BlobMissing,
    Conflict,
    DatabaseUnusable,
    LostClaim,
    PlanOutdated,
    SchemaMissing,
)
from storage.jobs import cancel_job
from storage.plans import NewCandidate, NewGroup, PlannedProblem, problems_to_plan, record_plan
from storage.screening import record_refined
from storage.searches import search_entry
from storage.tables import Base, BlobRow, WinnerRow
from storage.toolchains import live_toolchains, register_toolchain
from storage.winners import get_winners, publish_winner
from tests.fixtures_measuring import CPU_CLASS, add, plan_known
from tests.fixtures_storage import *  # noqa: F403 - fixtures
from tests.fixtures_storage import (
    GPU_CLASS,
    PLAN,
    TARGET,
    TOOLCHAIN,
    claim_one,
    compile_next,
    new_build,
    verify_next,
    winner_record,
)

SPAWN = multiprocessing.get_context("spawn")


def test_the_migrations_make_exactly_the_tables_of_the_code(tmp_path: Path) -> None:
    migrated, written = tmp_path / "migrated.db", tmp_path / "written.db"
    Database(f"sqlite:///{migrated}").migrate()
    Base.metadata.create_all(create_engine(f"sqlite:///{written}"))

    def schema(path: Path) -> dict[str, list[str]]:
        query = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name != 'alembic_version'"
        # Words, sorted: Alembic writes the constraints of a table in another order.
        return {name: sorted(re.findall(r"\w+", sql)) for name, sql in sqlite3.connect(path).execute(query)}

    assert schema(migrated) == schema(written)


def test_a_migrated_database_is_ready_and_an_empty_one_says_what_to_do(database_url: str) -> None:
    database = Database(database_url)
    with pytest.raises(SchemaMissing, match="empty"):
        database.check()
    database.migrate()
    database.check()
    database.migrate()  # again: nothing to do
    database.check()
    database.dispose()


def test_a_schema_of_another_release_is_refused_and_left_alone(database_url: str) -> None:
    database = Database(database_url)
    database.migrate()
    with database.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DatabaseUnusable, match=r"'9999'\): another release of cukiln made its schema.*DATABASE_URL"):
        database.migrate()
    with database.read() as session:
        assert session.execute(text("SELECT version_num FROM alembic_version")).scalar() == "9999"
    database.dispose()


def test_a_file_that_is_no_database_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "d.db"
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(DatabaseUnusable, match=f"{path} .*not a database.*backup.*CUKILN_DATA") as refused:
        Database(f"sqlite:///{path}").migrate()
    assert "\n" not in str(refused.value)
    with pytest.raises(DatabaseUnusable, match=r"d\.db .*DATABASE_URL"):
        Database(f"sqlite:///{path}/d.db").migrate()


def test_a_database_server_that_is_away_is_named_without_its_password() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(DatabaseUnusable, match=f"127.0.0.1:{port}/cukiln .*correct DATABASE_URL") as refused:
            Database(f"postgresql://me:secret@127.0.0.1:{port}/cukiln?password=secret").migrate()
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)


def downgrade(database: Database, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with database.engine.execution_options(cukiln_write=True).connect() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, revision)
        connection.commit()


def test_a_release_that_does_not_measure_gets_no_job_that_would_wait_for_ever(database: Database) -> None:
    only, mixed, ended = add(database, GPU_CLASS), add(database, GPU_CLASS, CPU_CLASS), add(database, GPU_CLASS)
    for _ in range(3):
        plan_known(database, "a")
    compile_next(database)
    with database.write() as session:
        cancel_job(session, ended.id)
    downgrade(database, "0002")
    columns = "p.job_id, p.device_class, p.state, j.state, j.error"
    with database.read() as session:
        rows = session.execute(
            text(f"SELECT {columns} FROM job_problems p JOIN jobs j ON j.id = p.job_id ORDER BY p.id")
        )
        found = [
            (row[0], row[1], row[2], row[3], "older" if "does not measure" in str(row[4]) else row[4]) for row in rows
        ]
        kinds = set(session.scalars(text("SELECT kind FROM items WHERE state = 'waiting'")))
    assert found == [
        (only.id, GPU_CLASS, "failed", "failed", "older"),
        (mixed.id, GPU_CLASS, "failed", "running", None),
        (mixed.id, CPU_CLASS, "running", "running", None),
        (ended.id, GPU_CLASS, "cancelled", "cancelled", None),
    ]
    assert kinds == {"verify"}
    database.migrate()
    database.check()


@pytest.mark.parametrize("refined", [False, True])
def test_a_release_that_does_not_screen_publishes_nothing_that_was_only_screened(
    database: Database, refined: bool
) -> None:
    screened, plain = add(database, CPU_CLASS), add(database, CPU_CLASS)
    claim = claim_one(database, "plan")
    with database.write() as session:
        (problem,) = problems_to_plan(session, claim)
        candidates = [NewCandidate(f"c-{name}", {}, "k", f"fast-{name}") for name in "ab"]
        planned = PlannedProblem(problem.id, candidates, 2, {}, 0.0, 0.0, screening=True)
        builds = {one.build: new_build(one.build, f"slice-{one.build[-1]}") for one in candidates}
        record_plan(session, claim, [planned], builds, [NewGroup(tuple(builds), TARGET, "fast", 1.0)], **PLAN)
    compile_next(database)
    verify_next(database)
    if refined:
        claim = claim_one(database, "refine")
        with database.write() as session:
            new = {"a": new_build("a", "slice-a")}
            group = NewGroup(("a",), TARGET, TOOLCHAIN, 1.0)
            record_refined(session, claim, {"c-a": "a"}, new, [group], spent=StageSeconds(), **PLAN)
        compile_next(database)
    plan_known(database, "b")
    searches = [search_entry(search, "g", None) for search in ({"level": 1}, {"level": 2, "screening": 1})]
    record = winner_record("k" * 64, "c-a", searches=searches)
    with database.write() as session:
        publish_winner(session, record, expected_revision=0, attempt="t")
    downgrade(database, "0005")
    with database.read() as session:
        states = session.execute(text("SELECT id, state, error FROM jobs ORDER BY created_at, id")).all()
        waiting = set(session.scalars(text("SELECT kind FROM items WHERE state = 'waiting'")))
    found = {row.id: (row.state, "without screening" in str(row.error)) for row in states}
    assert found == {screened.id: ("failed", True), plain.id: ("running", False)}
    assert waiting <= {"compile", "verify"}
    database.migrate()
    database.check()
    with database.read() as session:
        (kept,) = get_winners(session, ["k" * 64]).values()
        row = session.scalars(select(WinnerRow)).one()
    assert [one["search"] for one in kept.searches] == [one["search"] for one in row.searches] == [{"level": 1}]


def _migrate(url: str, barrier: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    Database(url).migrate()


def test_processes_that_migrate_at_once_wait_for_each_other(database_url: str) -> None:
    barrier = SPAWN.Barrier(3)
    processes = [SPAWN.Process(target=_migrate, args=(database_url, barrier)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    database = Database(database_url)
    database.check()
    assert set(Base.metadata.tables) <= set(inspect(database.engine).get_table_names())
    database.dispose()


def test_an_exception_rolls_everything_back(database: Database) -> None:
    with pytest.raises(ZeroDivisionError), database.write() as session:
        register_toolchain(session, "t", {}, [])
        _ = 1 / 0
    with database.read() as session:
        assert live_toolchains(session, 60) == []


def test_a_read_sees_one_snapshot(database: Database) -> None:
    with database.read() as session:
        assert live_toolchains(session, 60) == []
        with database.write() as writing:
            register_toolchain(writing, "t", {}, [])
        assert live_toolchains(session, 60) == []
    with database.read() as session:
        assert [found.digest for found in live_toolchains(session, 60)] == ["t"]


def test_a_write_commits_durably_and_keeps_foreign_keys(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'd.db'}")
    database.migrate()
    with database.write() as session:
        found = {name: session.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "foreign_keys")}
        synchronous = session.execute(text("PRAGMA synchronous")).scalar()
    assert found == {"journal_mode": "wal", "foreign_keys": 1}
    assert synchronous == 2  # FULL


def _count_up(url: str, times: int) -> None:
    database = Database(url)
    for _ in range(times):
        with database.write() as session:
            # Read, then write: with a deferred BEGIN two of these would fail with SQLITE_BUSY at once.
            row = session.get(BlobRow, "counter")
            assert row is not None
            row.size += 1


def test_writers_of_several_processes_lose_no_update_and_never_fail(database: Database, database_url: str) -> None:
    with database.write() as session:
        session.add(BlobRow(digest="counter", size=0, media_type="-", created_at=0.0))
    processes = [SPAWN.Process(target=_count_up, args=(database_url, 40)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 4
    with database.read() as session:
        assert session.get_one(BlobRow, "counter").size == 160


def test_a_forked_child_opens_its_own_connections(database: Database) -> None:
    with database.write() as session:
        register_toolchain(session, "parent", {}, [])
    of_the_parent = database.engine.pool
    child = os.fork()
    if child == 0:  # everything here ends in _exit: the child must not run pytest's own end
        status = 1
        try:
            with database.write() as session:
                register_toolchain(session, "child", {}, [])
            status = 0 if database.engine.pool is not of_the_parent else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with database.write() as session:
        register_toolchain(session, "parent again", {}, [])
    with database.read() as session:
        assert {found.digest for found in live_toolchains(session, 60)} == {"parent", "child", "parent again"}


WRITE_FOREVER = """
import itertools, sys
from storage.database import Database
from storage.tables import BlobRow
database = Database(sys.argv[1])
for number in itertools.count():
    with database.write() as session:
        session.add_all(BlobRow(digest=f"{number}-{part}", size=0, media_type="-", created_at=0.0) for part in range(5))
    print(number, flush=True)
"""


def test_kill_9_between_writes_loses_nothing_acknowledged_and_leaves_nothing_half(
    database: Database, database_url: str
) -> None:
    for _ in range(3):
        with database.write() as session:
            session.query(BlobRow).delete()
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITE_FOREVER, database_url],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(15)][-1]
        writer.send_signal(signal.SIGKILL)
        acknowledged = max([acknowledged, *(int(line) for line in writer.stdout.read().split())])
        writer.wait()
        writer.stdout.close()
        with database.write() as session:
            parts: dict[int, int] = {}
            for row in session.query(BlobRow):
                number = int(row.digest.split("-")[0])
                parts[number] = parts.get(number, 0) + 1
        assert set(range(acknowledged + 1)) <= set(parts)
        assert set(parts.values()) == {5}


def test_a_data_folder_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "100% of Jürgen's #1 data"
    database = Database(f"sqlite:///{folder / 'cukiln.db'}")
    database.migrate()
    database.check()
    assert (folder / "cukiln.db").exists()


def test_errors_survive_pickling() -> None:
    made = [
        LostClaim("compile", "g", "t"),
        PlanOutdated(("b",)),
        Conflict("k", 1, 2),
        BlobMissing("d"),
        BlobCorrupt("d", "e"),
        BadCursor("c"),
        SchemaMissing(None, "0002"),
    ]
    for error in made:
        copied = pickle.loads(pickle.dumps(error))
        assert (type(copied), str(copied), copied.__dict__) == (type(error), str(error), error.__dict__)
