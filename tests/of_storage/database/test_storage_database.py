"""The database: schema, transactions, many processes, crashes."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, select, text

from codegen.identity import problem_digest
from cukiln.types import StageSeconds
from storage.database.session import HEAD, MIGRATIONS, Database, Session
from storage.database.tables import Base, BlobRow, JobProblemRow, WinnerRow
from storage.entities.candidates import candidates_of_problem
from storage.entities.heartbeats import live_toolchains, register_toolchain
from storage.entities.jobs import job_state
from storage.entities.searches import search_entry
from storage.entities.task_kinds import measure_ref
from storage.entities.winners import Elsewhere, get_winners, measured_elsewhere, used_by
from storage.errors import (
    BadCursor,
    BlobCorrupt,
    BlobMissing,
    DatabaseUnusable,
    LostLease,
    SchemaMissing,
)
from storage.queue import tasks
from storage.reports.times import job_trace
from storage.transitions import end_attempt, take_work
from storage.transitions.end_jobs import finish_problem
from storage.transitions.groups import builds_to_verify
from storage.transitions.measure import record_compared
from tests.support.fixtures.measuring import COMPARISON, CPU_CLASS, add
from tests.support.fixtures.storage import (
    CPU_PLAN,
    DRIVER,
    GPU_CLASS,
    TARGET,
    TOOLCHAIN,
    VERSIONS,
    cancel,
    compile_leased,
    end_budgets,
    measure_leased,
    measured,
    measurement,
    new_build,
    plan_next,
    record,
    to_measure,
    verify_leased,
    winner_record,
)
from tests.support.processes.fresh_processes import FRESH
from tests.support.run.fake_clock import FakeClock

KINDS = ("finish", "compare", "measure", "verify", "compile", "plan")
LIVE = "('queued', 'running')"
KEY = "k" * 64


def test_the_migrations_make_exactly_the_tables_of_the_code(tmp_path: Path) -> None:
    migrated, written = tmp_path / "migrated.db", tmp_path / "written.db"
    older = Database(f"sqlite:///{migrated}")
    make_older(older)
    for database in (older, Database(f"sqlite:///{written}")):
        database.migrate()
        database.check()

    def schema(path: Path) -> dict[str, list[str]]:
        query = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"
        # Words, sorted: Alembic writes the constraints of a table in another order.
        return {name: sorted(re.findall(r"\w+", sql)) for name, sql in sqlite3.connect(path).execute(query)}

    assert schema(migrated) == schema(written)


def test_the_revision_of_the_code_is_the_last_migration() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    assert ScriptDirectory.from_config(config).get_current_head() == HEAD


def test_a_migrated_database_is_ready_and_an_empty_one_says_what_to_do(database_url: str) -> None:
    database = Database(database_url)
    with pytest.raises(SchemaMissing, match="empty"):
        database.check()
    database.migrate()
    database.check()
    database.migrate()  # again: nothing to do
    database.check()
    database.dispose()


@pytest.mark.parametrize("revision", ["9999", "0006", "0019"])
def test_a_schema_of_another_release_is_refused_and_left_alone(database_url: str, revision: str) -> None:
    database = Database(database_url)
    database.migrate()
    with database.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
    message = rf"'{revision}'\): another release of cukiln made its schema.*DATABASE_URL"
    with pytest.raises(DatabaseUnusable, match=message):
        database.migrate()
    with database.read() as session:
        assert session.execute(text("SELECT version_num FROM alembic_version")).scalar() == revision
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


def make_older(database: Database) -> None:
    """The tables of revision 0007 in an empty database."""
    statements = (Path(__file__).parent / "schema_0007.sql").read_text()
    if not database.is_sqlite:
        statements = statements.replace("BOOLEAN DEFAULT 0", "BOOLEAN DEFAULT false").replace(
            "  id INTEGER", "  id SERIAL"
        )
    with database.write() as session:
        for statement in statements.split(";"):
            if statement.strip():
                session.execute(text(statement))


@pytest.fixture
def older(database_url: str, clock: FakeClock) -> Iterator[Database]:
    """A database of the release before this one."""
    database = Database(database_url, clock)
    make_older(database)
    yield database
    database.dispose()


def test_records_of_an_older_release_are_found_by_their_files_and_code(older: Database, clock: FakeClock) -> None:
    with older.write() as session:
        before = Older(session, clock.now())
        for key in ("a" * 64, "b" * 64):
            before.winner(key, "c")
    older.migrate()
    with older.read() as session:
        uses = used_by(session, [*(digit * 64 for digit in "1234"), "5" * 64])
    assert uses == {digit * 64: ["a" * 64, "b" * 64] for digit in "1234"}


def test_what_was_to_be_screened_is_planned_anew_and_what_only_was_is_skipped(
    older: Database, clock: FakeClock
) -> None:
    screened = {"level": 1, "screening": 1}
    with older.write() as session:
        before = Older(session, clock.now())
        (ended,) = before.job("ended", CPU_CLASS, state="done", problem="done", search=screened)
        before.group("made", "ended", "compiled", "a", "b", "e", item=None)
        for build in ("a", "b", "e"):
            before.build(build, "made")
        before.verdict("slice-e", "cpu")
        before.candidate(ended, "a", "ok", screening_build="fast-a")
        before.candidate(ended, "b", "ok", screening_build="b", predicted_us=4.0)
        (verified,) = before.job("verified", CPU_CLASS, search=screened)
        before.candidate(verified, "e", "ok", screening_build="fast-e")
        before.item("finish", verified, "verified", "waiting", TARGET)
        before.job("queued", CPU_CLASS, state="queued", problem="queued", plan="waiting", search=screened)
        searches = [search_entry(search, "g", None) for search in ({"level": 1}, {"level": 2, "screening": 1})]
        before.winner(KEY, "c-a", searches)
        before.insert("toolchains", digest="fast", description={}, targets=[], seen_at=clock.now())
        before.insert("toolchains", digest=TOOLCHAIN, description={}, targets=[TARGET], seen_at=clock.now())
    older.migrate()
    older.check()
    with older.read() as session:
        candidates = session.execute(
            text("SELECT candidate, verdict, message FROM candidates ORDER BY candidate")
        ).all()
        waiting = session.execute(text("SELECT kind, state FROM tasks WHERE state IN ('waiting', 'leased')")).all()
        builds = session.scalars(text("SELECT id FROM builds ORDER BY id")).all()
        (published,) = get_winners(session, [KEY]).values()
        row = session.scalars(select(WinnerRow)).one()
        problems = session.scalars(select(JobProblemRow.search)).all()
        alive = [toolchain.digest for toolchain in live_toolchains(session, 60)]
    assert [(row.candidate, row.verdict, "only screened" in str(row.message)) for row in candidates] == [
        ("c-a", "ok", False),
        ("c-b", "skipped", True),
    ]
    assert ([tuple(row) for row in waiting], builds) == ([("plan", "waiting")] * 2, ["a", "e"])
    assert (
        [entry["search"] for entry in published.searches]
        == [entry["search"] for entry in row.searches]
        == [{"level": 1}]
    )
    assert (problems, alive) == ([{"level": 1}] * 3, [TOOLCHAIN])
    done = drive(older, {id_of("verified"): ["e"], id_of("queued"): ["c", "d"]})
    assert done == {"compile": ["c", "d"], "verify": ["c", "d"], "measure": []}  # the text of `e` was verified
    assert states(older) == dict.fromkeys(("ended", "verified", "queued"), "done")


class Older:
    """Rows of a database at revision 0007, written as the release of that revision wrote them."""

    def __init__(self, session: Session, now: float) -> None:
        self.session, self.now = session, now

    def insert(self, table: str, **values: Any) -> None:
        row = {name: json.dumps(each) if isinstance(each, dict | list) else each for name, each in values.items()}
        names = ", ".join(f":{name}" for name in row)
        self.session.execute(text(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({names})"), row)

    def job(
        self,
        name: str,
        *classes: str,
        state: str = "running",
        problem: str = "running",
        plan: str | None = "done",
        search: dict[str, Any] | None = None,
        **job: Any,
    ) -> list[int]:
        """A job with a problem per device class, in this state, and its plan task; returns the problems' ids."""
        ended = state not in ("queued", "running")
        planned = plan not in ("waiting", "claimed")
        times = {"created_at": self.now - 50, "started_at": self.now - 40, "finished_at": self.now if ended else None}
        fields = {"state": state, "cached": False, "priority": 10, "deterministic": False, **times, **job}
        self.insert("jobs", id=id_of(name), **fields)
        for position, device_class in enumerate(classes):
            self.insert(
                "job_problems",
                job_id=id_of(name),
                position=position,
                name=f"{name}{position}",
                operator="matmul",
                problem={"operator": "matmul", "m": 64},
                target=TARGET,
                device_class=device_class,
                key=f"{name:k>64}",
                search=search or {"level": 1},
                state=problem,
                cached=False,
                planned=planned,
                screening=False,
                space_size=4,
                candidate_count=2,
                rejections={},
                seconds={"lower": {"wall": 1.0, "cpu": 1.0}},
                started_at=self.now - 40,
                finished_at=None if problem in ("queued", "running") else self.now,
            )
        if plan is not None:
            self.item("plan", f"{id_of(name)}:0-{len(classes) - 1}", name, plan)
        query = text("SELECT id FROM job_problems WHERE job_id = :job ORDER BY position")
        return list(self.session.scalars(query, {"job": id_of(name)}))

    def item(self, kind: str, ref: object, job: str, state: str, target: str | None = None) -> None:
        leased, begun = state == "claimed", state in ("claimed", "done", "joined")
        self.insert(
            "items",
            kind=kind,
            target=target,
            ref=str(ref),
            job_id=id_of(job),
            priority=10,
            predicted_seconds=1.0,
            state=state,
            attempt=1 if begun else 0,
            token=f"{kind}-{job}"[:32] if begun else None,
            worker="old" if begun else None,
            lease_expires_at=self.now + 60 if leased else None,
            created_at=self.now - 30,
            started_at=self.now - 20 if begun else None,
            finished_at=None if state in ("waiting", "claimed") else self.now - 10,
            past=[],
        )

    def group(
        self, name: str, job: str, state: str, *builds: str, item: str | None, joined_to: str | None = None
    ) -> None:
        """With its compile task; these builds are in its file, as a rule made by it."""
        kernels = [new_build(build) for build in builds]
        compiled = state == "compiled"
        self.insert(
            "groups",
            id=id_of(name),
            job_id=id_of(job),
            target=TARGET,
            toolchain=TOOLCHAIN,
            state=state,
            joined_to=joined_to and id_of(joined_to),
            kernels=[
                {
                    "build": kernel.id,
                    "id": kernel.kernel,
                    "slice": kernel.slice,
                    "kernel": kernel.kernel_json,
                    "predicted_seconds": 1.0,
                }
                for kernel in kernels
            ],
            predicted_seconds=2.0,
            library=f"library-{name}" if compiled else None,
            phases=[{"name": "cicc", "seconds": 1.5, "start": 0.0}] if compiled else [],
            codegen_seconds={"wall": 1.0, "cpu": 1.0} if compiled else {},
            compile_seconds={"wall": 8.0, "cpu": 8.0} if compiled else {},
            verify_seconds={},
            created_at=self.now - 30,
            finished_at=self.now - 10 if compiled else None,
        )
        if item is not None:
            self.item("compile", id_of(name), job, item, TARGET)

    def build(self, name: str, group: str | None, state: str = "ok", **changes: Any) -> None:
        made = new_build(name)
        ok = state == "ok"
        row = {
            "id": name,
            "kernel": made.kernel,
            "slice": made.slice,
            "toolchain": TOOLCHAIN,
            "target": TARGET,
            "group_id": group and id_of(group),
            "verify_group_id": group and id_of(group),
            "state": state,
            "code_digest": f"code-{name}" if ok else None,
            "library": f"library-{group}" if ok else None,
            "resources": {"registers": 32} if ok else None,
            "log": None if ok else "x.cu(7): error: no such thing",
            "created_at": self.now - 30,
        }
        self.insert("builds", **{**row, **changes})

    def candidate(self, problem: int, build: str, verdict: str | None = None, **changes: Any) -> None:
        row = {"schedule": {"n": build}, "kernel": new_build(build).kernel, "build": build, "verdict": verdict}
        self.insert("candidates", job_problem_id=problem, candidate=f"c-{build}", **{**row, **changes})

    def verdict(self, subject: str, venue: str) -> None:
        plan_version = VERSIONS["cpu_plans" if venue == "cpu" else "gpu_plans"]["matmul"]
        self.insert(
            "verdicts",
            subject=subject,
            venue=venue,
            plan_version=plan_version,
            verdict="ok",
            details={"cases": []},
            wall_seconds=1.0,
            cpu_seconds=1.0,
            created_at=self.now - 5,
        )

    def timed(self, build: str) -> None:
        self.insert(
            "measurements",
            code_digest=f"code-{build}",
            candidate=f"c-{build}",
            device_class=GPU_CLASS,
            driver=DRIVER,
            plan_version="g1",
            median_us=7.0,
            measurement=measurement(7.0),
            created_at=self.now - 5,
        )

    def winner(self, key: str, candidate: str, searches: Sequence[dict[str, Any]] = (), **changes: Any) -> None:
        shown = winner_record(key, candidate, searches=list(searches), **changes)
        fields = {name: getattr(shown, name) for name in ("operator", "target", "device_class", "problem")}
        record = shown.model_dump(mode="json")
        self.insert(
            "winners",
            key=key,
            revision=3,
            record=record,
            searches=list(searches),
            attempt="t",
            updated_at=1.0,
            **fields,
        )


def id_of(name: str) -> str:
    """Of a job or a group."""
    return f"{name:->32}"


def fill(older: Older) -> dict[str, list[str]]:
    """Jobs in every state that one could be in; returns by job the builds that its unfinished problems need."""
    # Pending: in a group that waits, in one that is leased, and in one that joined the latter.
    (problem,) = older.job("waiting", CPU_CLASS)
    older.group("waits", "waiting", "waiting", "w", item="waiting")
    older.build("w", "waits", "pending", log=None)
    older.candidate(problem, "w")
    (problem,) = older.job("claimed", CPU_CLASS)
    older.group("file", "claimed", "waiting", "f", "j", item="claimed")
    older.build("f", "file", "pending", log=None)
    older.candidate(problem, "f")
    (problem,) = older.job("joined", CPU_CLASS)
    older.group("joins", "joined", "joined", "j", item="joined", joined_to="file")
    older.build("j", "file", "pending", log=None)
    older.candidate(problem, "j")
    # Compiled: its own group proves it, or one that was made for that.
    (problem,) = older.job("compiled", CPU_CLASS)
    older.group("made", "compiled", "compiled", "v", "x", "u", "s", item="done")
    older.build("x", "made", "compile_error")
    for build in ("v", "u", "s"):
        older.build(build, "made")
    older.verdict("slice-u", "cpu")
    older.verdict("slice-s", "cpu")
    older.item("verify", id_of("made"), "compiled", "waiting", TARGET)
    for build, verdict in (("v", None), ("x", "compile_error"), ("u", "ok")):
        older.candidate(problem, build, verdict)
    (problem,) = older.job("verifying", CPU_CLASS)
    older.group("verified", "verifying", "compiled", "p", item="done")
    older.build("p", "verified", verify_group_id=id_of("verifies"))
    older.item("verify", id_of("verified"), "verifying", "done", TARGET)
    older.group("verifies", "verifying", "compiled", "p", item=None)
    older.item("verify", id_of("verifies"), "verifying", "claimed", TARGET)
    older.candidate(problem, "p")
    # On a GPU.
    (problem,) = older.job("measuring", GPU_CLASS)
    older.group("timed", "measuring", "compiled", "m", "n", item="done")
    for build in ("m", "n"):
        older.build(build, "timed")
    older.verdict("code-m", "gpu")
    older.timed("m")
    older.item("measure", measure_ref(id_of("timed"), GPU_CLASS), "measuring", "waiting", GPU_CLASS)
    older.candidate(problem, "m", "ok", measured_us=7.0, measurement=measurement(7.0))
    older.candidate(problem, "n")
    (problem,) = older.job("comparing", GPU_CLASS)
    older.candidate(problem, "m", "ok", measured_us=7.0, measurement=measurement(7.0))
    older.item("compare", problem, "comparing", "claimed", GPU_CLASS)
    # Verified.
    (problem,) = older.job("refining", CPU_CLASS)
    older.session.execute(text("UPDATE job_problems SET screening = :yes WHERE id = :id"), {"yes": True, "id": problem})
    older.candidate(problem, "s", "ok", screening_build="s")
    older.item("refine", problem, "refining", "waiting")
    for name, state in (("finishing", "waiting"), ("closing", "claimed")):
        (problem,) = older.job(name, CPU_CLASS)
        older.candidate(problem, "u", "ok", predicted_us=4.0)
        older.item("finish", problem, name, state, TARGET)
    # Not planned.
    older.job("queued", CPU_CLASS, state="queued", problem="queued", plan="waiting", started_at=None)
    older.job("planning", CPU_CLASS, problem="queued", plan="claimed")
    # One problem of two has ended.
    ended, problem = older.job("half", CPU_CLASS, CPU_CLASS)
    older.candidate(ended, "u", "ok", predicted_us=4.0)
    older.item("finish", ended, "half", "done", TARGET)
    ending = {"winner": "c-u", "now": older.now, "id": ended}
    older.session.execute(
        text("UPDATE job_problems SET state = 'done', winner = :winner, finished_at = :now WHERE id = :id"), ending
    )
    older.candidate(problem, "w")
    # Imported: all is verified, and there never was a plan.
    problems = older.job("imported", GPU_CLASS, GPU_CLASS, plan=None)
    older.build("i", None, library=None)
    older.verdict("code-i", "gpu")
    older.timed("i")
    for problem, state in zip(problems, ("waiting", "claimed"), strict=True):
        older.candidate(problem, "i", "ok", measured_us=7.0, measurement=measurement(7.0))
        older.item("finish", problem, "imported", state, TARGET)
    # Ended.
    (problem,) = older.job("done", CPU_CLASS, state="done", problem="done")
    older.candidate(problem, "u", "ok", predicted_us=4.0)
    older.item("finish", problem, "done", "done", TARGET)
    older.winner(f"{'done':k>64}", "c-u")
    (problem,) = older.job("failed", CPU_CLASS, state="failed", problem="failed", error="none was right")
    older.candidate(problem, "x", "compile_error")
    (problem,) = older.job("cancelled", CPU_CLASS, state="cancelled", problem="cancelled")
    older.group("given up", "cancelled", "cancelled", "gone", item="cancelled")
    older.candidate(problem, "gone", "skipped", message="the job was cancelled")
    return {
        "waiting": ["w"],
        "claimed": ["f"],
        "joined": ["j"],
        "compiled": ["v", "x", "u"],
        "verifying": ["p"],
        "measuring": ["m", "n"],
        "comparing": ["m"],
        "refining": ["s"],
        "finishing": ["u"],
        "closing": ["u"],
        "queued": ["q"],
        "planning": ["q"],
        "half": ["w"],
    }


OF_ENDED = f"(SELECT id FROM job_problems WHERE state NOT IN {LIVE})"
KEPT = {
    "winners": "true",
    "verdicts": "true",
    "measurements": "true",
    "jobs": "true",
    "job_problems": f"state NOT IN {LIVE}",
    "candidates": f"job_problem_id IN {OF_ENDED}",
    "builds": "state NOT IN ('pending', 'compiling')",
    "groups": "state IN ('compiled', 'cancelled')",
    "items": "kind IN ('finish', 'compile') AND state IN ('done', 'cancelled')",
}
"""What no migration may change, by table."""


def kept(database: Database, names: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """By table; `names`: of tables that are called otherwise by now."""
    with database.read() as session:
        return {
            table: [
                dict(row)
                for row in session.execute(text(f"SELECT * FROM {names.get(table, table)} WHERE {which}")).mappings()
            ]
            for table, which in KEPT.items()
        }


def assert_kept(before: dict[str, list[dict[str, Any]]], after: dict[str, list[dict[str, Any]]]) -> None:
    """All rows are there as they were, in the columns that both revisions have."""
    for table, rows in before.items():
        assert rows, f"there is nothing of {table} to be kept"
        columns = sorted(set(rows[0]) & set(after[table][0]))
        assert len(columns) > len(rows[0]) / 2
        cells = [[row[name] for name in columns] for row in after[table]]
        assert [row for row in rows if [row[name] for name in columns] not in cells] == [], table


def drive(database: Database, builds: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """All work there is, done as workers do it; `builds` by job. Returns the builds that were compiled, verified and
    measured."""
    done: dict[str, list[str]] = {"compile": [], "verify": [], "measure": []}
    while True:
        with database.write() as session:
            lease = take_work.take(session, KINDS, None, "w", 5.0)
            if lease is None:
                return {kind: sorted(candidates) for kind, candidates in done.items()}
            match lease.kind:
                case "plan":
                    record(session, lease, builds.get(lease.job_id, ()))
                case "compare":
                    record_compared(session, lease, COMPARISON, measure=StageSeconds())
                case "finish":
                    candidates = candidates_of_problem(session, int(lease.ref))
                    assert {row.verdict for row in candidates} <= {"ok", "compile_error"}, "all is verified"
                    finish_problem(
                        session, lease, winner=min(o.candidate for o in candidates if o.verdict == "ok"), error=None
                    )
                case "verify":
                    done["verify"] += [kernel.build for kernel in builds_to_verify(session, lease.ref, **CPU_PLAN)]
        match lease.kind:
            case "compile":
                done["compile"] += compiled_now(database, lease)
            case "verify":
                verify_leased(database, lease)
            case "measure":
                found_now = to_measure(database, lease)
                done["measure"] += [row.build for row in found_now]
                measure_leased(database, lease, [measured(row) for row in found_now])


def compiled_now(database: Database, lease: tasks.Lease) -> list[str]:
    compile_leased(database, lease)
    with database.read() as session:
        return list(session.scalars(text("SELECT id FROM builds WHERE group_id = :group"), {"group": lease.ref}))


def states(database: Database) -> dict[str, str]:
    with database.read() as session:
        rows = session.execute(text("SELECT id, state FROM jobs")).all()
    return {name.lstrip("-"): state for name, state in rows}


def test_unfinished_work_of_the_release_before_is_planned_anew_and_comes_to_its_end(
    older: Database, clock: FakeClock
) -> None:
    with older.write() as session:
        builds = fill(Older(session, clock.now()))
    before = kept(older, {})
    older.migrate()
    older.check()
    assert_kept(before, kept(older, {"items": "tasks"}))
    with older.read() as session:
        assert get_winners(session, [f"{'done':k>64}"]).popitem()[1].front[0].candidate == "c-u"
        unended = session.execute(
            text("SELECT kind, state, token, started_at FROM tasks WHERE state IN ('waiting', 'leased')")
        ).all()
        gone = [
            session.scalar(text(f"SELECT count(*) FROM {table} WHERE state IN ('pending', 'waiting', 'joined')"))
            for table in ("builds", "groups")
        ]
        trace = job_trace(session, id_of("planning"))
    # Nothing is left of the work that came of a plan, nor of a plan that was under way.
    assert {row.kind for row in unended} == {"plan", "finish"}
    assert [tuple(row) for row in unended if row.kind == "plan"] == [("plan", "waiting", None, None)] * len(builds)
    assert gone == [0, 0]
    assert trace is not None and [task.attempts[-1].state for task in trace.tasks] == ["waiting"]

    clock.advance(100)
    with older.write() as session:
        expired = end_attempt.expire_leases(session)
    assert ("finish", (id_of("imported"),), "waiting") in [(row.kind, row.jobs, row.state) for row in expired]
    clock.advance(1)
    done = drive(older, {id_of(job): names for job, names in builds.items()})
    # What was compiled, verified or measured before is not again.
    assert done == {"compile": ["f", "j", "q", "w"], "verify": ["f", "j", "p", "q", "v", "w"], "measure": ["n"]}
    ended = {"failed": "failed", "cancelled": "cancelled"}
    assert states(older) == {name: ended.get(name, "done") for name in (*builds, "imported", "done", *ended)}


def test_a_build_that_the_release_before_was_compiling_again_is_still_verified(
    older: Database, clock: FakeClock
) -> None:
    """Its library was lost, and with the job that needed it the group that was to compile it anew is gone."""
    with older.write() as session:
        before = Older(session, clock.now())
        (problem,) = before.job("again", GPU_CLASS)
        before.group("anew", "again", "waiting", "r", item="waiting")
        before.build("r", "anew", "pending", code_digest="code-r", library=None, resources={"registers": 32}, log=None)
        before.candidate(problem, "r")
    older.migrate()
    cancel(older, id_of("again"))
    later = add(older, CPU_CLASS)
    plan_next(older, "r")
    assert drive(older, {})["verify"] == ["r"]
    with older.read() as session:
        ended = job_state(session, later.id)
    assert ended is not None and ended.state == "done"


def test_what_the_release_before_had_only_to_finish_is_finished_though_its_budget_is_spent(
    older: Database, clock: FakeClock
) -> None:
    with older.write() as session:
        before = Older(session, clock.now())
        (problem,) = before.job("late", CPU_CLASS, budget_seconds=30.0, deadline=clock.now() - 10)
        before.group("made", "late", "compiled", "u", item="done")
        before.build("u", "made")
        before.verdict("slice-u", "cpu")
        before.candidate(problem, "u", "ok", predicted_us=4.0)
        before.item("finish", problem, "late", "waiting", TARGET)
    older.migrate()
    end_budgets(older)
    drive(older, {id_of("late"): ["u"]})
    assert states(older) == {"late": "done"}


def _migrate(url: str, barrier: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    Database(url).migrate()


def test_what_the_release_before_had_measured_is_found_by_its_problem(older: Database, clock: FakeClock) -> None:
    with older.write() as session:
        before = Older(session, clock.now())
        before.winner("a" * 64, "c-a", device_class=GPU_CLASS)
        before.winner("b" * 64, "c-b", device_class=CPU_CLASS)
    older.migrate()
    with older.read() as session:
        asked = [Elsewhere(problem_digest({"m": 64}), TARGET), Elsewhere(problem_digest({"m": 64}), TARGET, GPU_CLASS)]
        assert measured_elsewhere(session, asked) == {0: (GPU_CLASS, "a" * 64)}


def test_processes_that_migrate_at_once_wait_for_each_other(database_url: str) -> None:
    barrier = FRESH.Barrier(3)
    processes = [FRESH.Process(target=_migrate, args=(database_url, barrier)) for _ in range(3)]
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
        register_toolchain(session, "t", {}, ["sm_80"])
        _ = 1 / 0
    with database.read() as session:
        assert live_toolchains(session, 60) == []


def test_a_read_sees_one_snapshot(database: Database) -> None:
    with database.read() as session:
        assert live_toolchains(session, 60) == []
        with database.write() as writing:
            register_toolchain(writing, "t", {}, ["sm_80"])
        assert live_toolchains(session, 60) == []
    with database.read() as session:
        assert [toolchain.digest for toolchain in live_toolchains(session, 60)] == ["t"]


def test_a_write_commits_durably_and_keeps_foreign_keys(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'd.db'}")
    database.migrate()
    with database.write() as session:
        pragmas = {name: session.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "foreign_keys")}
        synchronous = session.execute(text("PRAGMA synchronous")).scalar()
    assert pragmas == {"journal_mode": "wal", "foreign_keys": 1}
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
    processes = [FRESH.Process(target=_count_up, args=(database_url, 40)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 4
    with database.read() as session:
        assert session.get_one(BlobRow, "counter").size == 160


def test_a_forked_child_opens_its_own_connections(database: Database) -> None:
    with database.write() as session:
        register_toolchain(session, "parent", {}, ["sm_80"])
    of_the_parent = database.engine.pool
    child = os.fork()
    if child == 0:  # everything here ends in _exit: the child must not run pytest's own end
        status = 1
        try:
            with database.write() as session:
                register_toolchain(session, "child", {}, ["sm_80"])
            status = 0 if database.engine.pool is not of_the_parent else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with database.write() as session:
        register_toolchain(session, "parent again", {}, ["sm_80"])
    with database.read() as session:
        assert {toolchain.digest for toolchain in live_toolchains(session, 60)} == {"parent", "child", "parent again"}


WRITE_FOREVER = """
import itertools, sys
from storage.database.session import HEAD, MIGRATIONS
from storage.database.session import Database
from storage.database.tables import BlobRow
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
        LostLease("compile", "g", "t"),
        BlobMissing("d"),
        BlobCorrupt("d", "e"),
        BadCursor("c"),
        SchemaMissing(None, "0002"),
    ]
    for error in made:
        copied = pickle.loads(pickle.dumps(error))
        assert (type(copied), str(copied), copied.__dict__) == (type(error), str(error), error.__dict__)
