"""Imports stand apart from what was measured here: they are labelled, overwrite nothing unasked, and can be withdrawn
as a whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select, text, update

from codegen.canonical import digest
from cukiln.types import MeasuredOn, StageSeconds, WinnerRecord
from storage.database.session import Database, Session
from storage.database.sql import insert_new
from storage.database.tables import BuildRow, CandidateRow, JobProblemRow
from storage.entities.jobs import load_problem
from storage.entities.record_parts import publish_imported, publish_own, withdraw_code, withdraw_files, withdraw_record
from storage.entities.verdicts import GPU, NewVerdict, write_verdicts, wrong_codes
from storage.entities.winners import get_winners
from storage.errors import ImportWithdrawn
from storage.maintenance.retention import Keep, collect
from storage.transfer import imports
from storage.transfer.imports import (
    Import,
    ImportedCandidate,
    ImportedProblem,
    Importer,
    import_results,
    imported_by,
    imported_classes,
)
from storage.transfer.withdrawals import clear_withdrawn, find_withdrawn, import_report, list_imports, withdraw_import
from storage.transitions.accept import NewJob, create_jobs
from storage.transitions.end_jobs import cancel_job, finish_problem
from storage.transitions.take_work import take
from tests.support.fixtures.storage import (
    GPU_CLASS,
    TARGET,
    TOOLCHAIN,
    EveryOperator,
    end_budgets,
    measurement,
    new_problem,
    problem_ids,
    winner_record,
)
from tests.support.run.fake_clock import FakeClock

KEYS = [f"{number}" * 64 for number in (1, 2)]
CODES = [f"{number}" * 64 for number in (7, 8, 9)]
US = (5.0, 6.0, 7.0)
"""Of the code with the same place."""


@dataclass(frozen=True)
class Sent:
    """What an import says of each code, on each of its keys: microseconds, or a failure."""

    number: int
    keys: tuple[int, ...]
    codes: tuple[float | str, ...]
    overwrites: bool = False
    driver: str = "580.1"

    def as_import(self) -> Import:
        problems = [
            ImportedProblem(
                name=f"p{key}",
                operator="matmul",
                problem={"m": key},
                target=TARGET,
                key=KEYS[key],
                search={"level": 1},
                space_size=len(self.codes),
                candidates=[self._candidate(key, place) for place in range(len(self.codes))],
                comparison=None,
            )
            for key in self.keys
        ]
        return Import(
            digest=digest("test", 1, of=repr(self)),
            device_class=GPU_CLASS,
            uuid=f"GPU-{self.number}",
            driver=self.driver,
            plans=EveryOperator("plan"),
            measured_at=100.0 + self.number,
            workspace_limit_bytes=None,
            deterministic=False,
            problems=problems,
        )

    def _candidate(self, key: int, place: int) -> ImportedCandidate:
        said = self.codes[place]
        us = said if isinstance(said, float) else None
        return ImportedCandidate(
            candidate=f"c{key}{place}",
            schedule={"tile_m": place},
            kernel=f"k{place}",
            slice=f"s{place}",
            toolchain=TOOLCHAIN,
            code_digest=CODES[place],
            resources={"registers": self.number},
            verdict="ok" if us is not None else str(said),
            message=None,
            details={"seed": self.number},
            measurement=measurement(us) if us is not None else None,
            prediction=None,
            verify=StageSeconds(),
            measure=StageSeconds(),
        )


class World:
    """A service's database, and the steps of its work that imports meet."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def send(self, sent: Sent) -> str:
        sender = Importer("lab", "0123abcd", sent.overwrites)
        new = sent.as_import()
        import_results(self.database, new, sender, lambda session: None)
        return new.job_id

    def finish(self) -> bool:
        """Publish what one import brought to one key, as `workers.steps.finish` does. False where nothing waits."""
        with self.database.write() as session:
            held = take(session, ["finish"], [TARGET], "w", 600.0)
            if held is None:
                return False
            problem = load_problem(session, int(held.ref))
            assert problem is not None
            label = imported_by(session, problem.job_id)
            assert label is not None
            rows = session.execute(
                text(
                    "SELECT candidate, code_digest, measured_us FROM candidates JOIN builds ON builds.id = build "
                    f"WHERE job_problem_id = {problem.id} AND verdict = 'ok' ORDER BY measured_us"
                )
            ).all()
            if not rows:
                finish_problem(session, held, winner=None, error="none is right")
                return True
            driver = session.execute(text(f"SELECT driver FROM imports WHERE id = '{label.id}'")).scalar_one()
            place = on(driver, label.measured_at)
            entries = [(row.candidate, row.code_digest, row.measured_us) for row in rows[:1]]
            part = record_of(problem.key, entries, place, imported=label)
            publish_imported(session, label.id, part, held.token)
            finish_problem(session, held, winner=rows[0].candidate, error=None)
            return True

    def measure_here(self, key: int, place: int) -> None:
        """A job of this service's own finds one code the best. One that was found wrong here stays so."""
        with self.database.write() as session:
            write_verdicts(
                session, [NewVerdict(CODES[place], "matmul", "ok", None, {}, 0.0, 0.0)], GPU, EveryOperator("plan")
            )
            if wrong_codes(session, [CODES[place]]):
                return
            self._add_job(session, key, place)
            part = record_of(KEYS[key], [(f"c{key}{place}", CODES[place], US[place])], on("580.1", 50.0))
            publish_own(session, part, self.database.clock.new_id())

    def _add_job(self, session: Session, key: int, place: int) -> None:
        """An ended one that has the candidate."""
        created = create_jobs(session, [NewJob([new_problem(key=KEYS[key], device_class=GPU_CLASS)])])[0]
        cancel_job(session, created.id)
        [problem] = problem_ids(session, created.id)
        won = update(JobProblemRow).where(JobProblemRow.id == problem).values(winner=f"c{key}{place}")
        session.execute(won)
        name = f"own{place}"
        build = {"id": name, "kernel": f"k{place}", "slice": f"s{place}", "toolchain": TOOLCHAIN, "target": TARGET}
        insert_new(session, BuildRow, [{**build, "state": "ok", "code_digest": CODES[place], "created_at": 0.0}])
        candidate = {"candidate": f"c{key}{place}", "schedule": {}, "kernel": f"k{place}", "build": name}
        insert_new(session, CandidateRow, [{**candidate, "job_problem_id": problem, "verdict": "ok"}])

    def find_wrong_here(self, place: int) -> None:
        with self.database.write() as session:
            write_verdicts(
                session,
                [NewVerdict(CODES[place], "matmul", "incorrect", "wrong", {}, 0.0, 0.0)],
                GPU,
                EveryOperator("plan"),
            )
            withdraw_code(session, [CODES[place]])

    def withdraw(self, import_id: str) -> None:
        with self.database.write() as session:
            cancel_job(session, import_id)
            withdraw_import(session, import_id)
        clear_withdrawn(self.database)

    def records(self) -> dict[str, WinnerRecord]:
        with self.database.read() as session:
            return get_winners(session, KEYS)

    def fastest(self, key: int) -> tuple[str, str | None] | None:
        """The candidate that a lookup gets, and what brought it."""
        record = self.records().get(KEYS[key])
        return None if record is None else (record.front[0].candidate, (i := record.front[0].imported) and i.id)

    def content(self) -> dict[str, list[str]]:
        """All rows, but for revisions, times, tokens and numbers that are given out in order."""
        unsettled = (
            "revision",
            "attempt",
            "token",
            "worker",
            "id",
            "job_id",
            "job_problem_id",
            "task_id",
            "ref",
            "past",
        )
        tables = {}
        with self.database.read() as session:
            for table in ("jobs", "job_problems", "candidates", "builds", "verdicts", "measurements", "winners"):
                rows = session.execute(text(f"SELECT * FROM {table}")).mappings().all()
                tables[table] = sorted(_plain(row, unsettled) for row in rows)
            for table in ("imported_winners", "imported_findings"):
                tables[table] = sorted(
                    _plain(row, ()) for row in session.execute(text(f"SELECT * FROM {table}")).mappings()
                )
            standing = session.execute(text("SELECT * FROM imports WHERE withdrawn_at IS NULL")).mappings()
            tables["imports"] = sorted(_plain(row, ()) for row in standing)
        tables["winners"] = [row for row in tables["winners"] if '"record": {}' not in row]
        return tables


def _plain(row: Any, without: Sequence[str]) -> str:
    settled = {name: _settled(value) for name, value in row.items() if name not in without and not name.endswith("_at")}
    return json.dumps(settled, sort_keys=True)


def _settled(value: Any) -> Any:
    """JSON of a column, without revisions and times."""
    if isinstance(value, str) and value[:1] in "{[":
        value = json.loads(value)
    if isinstance(value, dict):
        left_out = ("revision", "updated_at", "imported_at", "created_at")
        return {name: _settled(part) for name, part in value.items() if name not in left_out}
    return [_settled(part) for part in value] if isinstance(value, list) else value


def on(driver: str, at: float) -> MeasuredOn:
    return MeasuredOn(device=GPU_CLASS, uuid="GPU-1", driver=driver, cold=True, before={}, after={}, measured_at=at)


def record_of(
    key: str, entries: Sequence[tuple[str, str, float]], place: MeasuredOn, imported: Any = None
) -> WinnerRecord:
    record = winner_record(key, "c", device_class=GPU_CLASS, ranked_by="measured")
    front = [
        record.front[0].model_copy(
            update={
                "candidate": name,
                "code_digest": code,
                "measured_us": us,
                "measured_on": place,
                "imported": imported,
            }
        )
        for name, code, us in entries
    ]
    search = {"search": {"level": 1}, "generator": "g", "workspace_limit_bytes": None, "deterministic": False}
    return record.model_copy(update={"front": front, "searches": [search]})


@pytest.fixture
def world(database: Database) -> World:
    return World(database)


def drain(world: World) -> None:
    while world.finish():
        pass


def test_an_import_answers_where_nothing_was_measured_and_is_labelled(world: World) -> None:
    job = world.send(Sent(1, (0,), (9.0, 1.0)))
    drain(world)
    assert world.fastest(0) == ("c01", job)
    label = world.records()[KEYS[0]].front[0].imported
    assert label is not None and (label.by, label.uuid, label.device) == ("lab", "GPU-1", GPU_CLASS)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_kernel_of_which_a_run_measured_one_candidate_alone_has_that_ones_verification(
    world: World, order: tuple[int, int]
) -> None:
    new = Sent(1, (0,), (9.0,)).as_import()
    [verified] = new.problems[0].candidates
    unfinished = replace(verified, candidate="c09", verdict="skipped", details={}, measurement=None)
    both = [(verified, unfinished)[number] for number in order]
    new = replace(new, problems=[replace(new.problems[0], candidates=both)])
    import_results(world.database, new, Importer("lab", "0123abcd", False), lambda session: None)
    with world.database.read() as session:
        [verification] = session.scalars(select(BuildRow.imported)).all()
    assert verification is not None and verification["verdict"] == "ok"


@pytest.mark.parametrize("first", ["here", "import"])
def test_what_was_measured_here_stands_before_any_import(world: World, first: str) -> None:
    if first == "here":
        world.measure_here(0, 0)
    world.send(Sent(1, (0,), (9.0, 0.001, "incorrect")))
    drain(world)
    if first == "import":
        world.measure_here(0, 0)
    assert world.fastest(0) == ("c00", None)


def test_an_import_cannot_call_wrong_what_was_verified_here(world: World) -> None:
    world.measure_here(0, 0)
    world.send(Sent(1, (0,), ("incorrect",)))
    drain(world)
    assert world.fastest(0) == ("c00", None)


def test_a_key_that_overwrites_stands_beside_what_was_measured_here(world: World) -> None:
    world.measure_here(0, 0)
    job = world.send(Sent(1, (0,), (9.0, 0.001), overwrites=True))
    drain(world)
    assert world.fastest(0) == ("c01", job)
    world.withdraw(job)
    assert world.fastest(0) == ("c00", None)


def test_an_imports_failure_silences_other_imports_until_it_is_withdrawn(world: World) -> None:
    job = world.send(Sent(1, (0,), (1.0,)))
    drain(world)
    doubt = world.send(Sent(2, (1,), ("incorrect",)))
    assert world.fastest(0) is None
    world.withdraw(doubt)
    assert world.fastest(0) == ("c00", job)


def test_code_that_is_wrong_here_is_wrong_in_imports(world: World) -> None:
    world.send(Sent(1, (0,), (1.0, 2.0)))
    drain(world)
    world.find_wrong_here(0)
    assert world.fastest(0) is None


def test_an_import_that_answers_nothing_yet_is_found_by_its_code(world: World) -> None:
    doubt = world.send(Sent(2, (1,), ("incorrect",)))
    job = world.send(Sent(1, (0,), (1.0,)))
    drain(world)
    assert world.fastest(0) is None
    world.withdraw(doubt)
    assert world.fastest(0) == ("c00", job)


def test_of_two_imports_the_faster_answers_and_the_newer_drivers_times_count(world: World) -> None:
    slow, fast = world.send(Sent(1, (0,), (9.0, 8.0))), world.send(Sent(2, (0,), (2.0,)))
    drain(world)
    assert world.fastest(0) == ("c00", fast)
    newest = world.send(Sent(3, (0,), (30.0, 20.0), driver="590.2"))
    drain(world)
    assert world.fastest(0) == ("c01", newest)
    world.withdraw(newest)
    world.withdraw(fast)
    assert world.fastest(0) == ("c01", slow)


def test_a_withdrawn_import_can_be_sent_again(world: World) -> None:
    sent = Sent(1, (0,), (1.0,))
    job = world.send(sent)
    world.withdraw(job)
    assert world.fastest(0) is None
    assert world.send(sent) == job
    drain(world)
    assert world.fastest(0) == ("c00", job)


def test_an_import_that_is_withdrawn_while_it_is_written_ends_with_an_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = Sent(1, (0,), (1.0,))

    def withdrawn_meanwhile() -> None:
        with world.database.write() as session:
            withdraw_import(session, sent.as_import().job_id)

    monkeypatch.setattr(world.database, "pause", withdrawn_meanwhile)
    with pytest.raises(ImportWithdrawn, match="send the results again"):
        world.send(sent)
    monkeypatch.undo()
    clear_withdrawn(world.database)
    assert world.content()["jobs"] == []


def test_an_import_whose_withdrawal_is_still_cleared_is_not_taken_for_one_that_stands(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = Sent(1, (0,), (1.0,))
    job = world.send(sent)
    with world.database.write() as session:
        withdraw_import(session, job)
    monkeypatch.setattr(imports, "clear_withdrawn", lambda database: None)
    with pytest.raises(ImportWithdrawn, match="send the results again"):
        world.send(sent)


def test_what_was_found_to_clear_is_not_cleared_once_the_import_is_sent_again(world: World) -> None:
    sent = Sent(1, (0,), (1.0,))
    job = world.send(sent)
    drain(world)
    with world.database.write() as session:
        withdraw_import(session, job)
    with world.database.read() as session:
        part = find_withdrawn(session)
    assert part is not None
    assert world.send(sent) == job
    drain(world)
    with world.database.write() as session:
        part(session)
    assert world.fastest(0) == ("c00", job)


def test_an_import_that_is_withdrawn_and_sent_again_while_it_is_written_ends_with_an_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = Sent(1, (0,), (1.0,))

    def sent_again_meanwhile() -> None:
        monkeypatch.undo()
        world.withdraw(sent.as_import().job_id)
        with world.database.write() as session:  # takes the numbers that were free
            create_jobs(session, [NewJob([new_problem(), new_problem()])])[0]
        world.send(sent)

    monkeypatch.setattr(world.database, "pause", sent_again_meanwhile)
    with pytest.raises(ImportWithdrawn, match="send the results again"):
        world.send(sent)
    drain(world)
    assert world.fastest(0) == ("c00", sent.as_import().job_id)


def test_a_withdrawal_that_was_interrupted_is_gone_on_with(world: World, clock: FakeClock) -> None:
    job = world.send(Sent(1, (0, 1), (1.0,)))
    drain(world)
    with world.database.write() as session:
        withdraw_import(session, job)
    end_budgets(world.database)
    assert world.records() == {}
    assert world.content()["candidates"] == []


def test_an_import_outlives_its_job_and_can_still_be_withdrawn(world: World, clock: FakeClock) -> None:
    job = world.send(Sent(1, (0,), (1.0,)))
    drain(world)
    clock.advance(100 * 86_400)
    for _ in collect(world.database, Keep(seconds=30 * 86_400)):
        pass
    assert world.content()["jobs"] == world.content()["candidates"] == []
    assert world.fastest(0) == ("c00", job)
    world.withdraw(job)
    assert world.fastest(0) is None


def test_a_device_class_counts_until_all_its_imports_are_withdrawn(world: World) -> None:
    first, second = (world.send(Sent(number, (0,), (9.0,))) for number in (1, 2))
    for withdrawn, classes in ((first, {GPU_CLASS}), (second, set())):
        world.withdraw(withdrawn)
        with world.database.read() as session:
            assert imported_classes(session) == classes


def test_a_lost_file_of_an_import_takes_its_kernel_out_of_the_record(world: World) -> None:
    world.send(Sent(1, (0,), (1.0,)))
    drain(world)
    lost = world.records()[KEYS[0]].front[0].so_sha256
    with world.database.write() as session:
        assert withdraw_files(session, [lost]) == [KEYS[0]]
    assert world.fastest(0) is None


def test_a_forgotten_record_answers_no_more_with_any_part(world: World) -> None:
    world.send(Sent(1, (0,), (1.0,)))
    drain(world)
    world.measure_here(0, 1)
    with world.database.write() as session:
        withdraw_record(session, KEYS[0])
    assert world.fastest(0) is None


def test_imports_are_listed_with_their_records(world: World, clock: FakeClock) -> None:
    jobs = []
    for number in range(3):
        jobs.append(world.send(Sent(number, (0,), (1.0 + number,))))
        clock.advance(1)
    drain(world)
    world.withdraw(jobs[0])
    with world.database.read() as session:
        page = list_imports(session, limit=2)
        rest = list_imports(session, limit=2, cursor=page.next_cursor)
        gone = import_report(session, jobs[0])
    assert [row.id for row in (*page.imports, *rest.imports)] == jobs[::-1]
    assert [row.records for row in (*page.imports, *rest.imports)] == [1, 1, 0]
    assert rest.next_cursor is None and gone is not None and gone.withdrawn_at is not None


said = st.one_of(st.sampled_from([1.0, 2.0, 5.5, 50.0]), st.sampled_from(["incorrect", "runtime_error"]))
sendings = st.builds(
    Sent,
    number=st.integers(1, 4),
    keys=st.sampled_from([(0,), (1,), (0, 1)]),
    codes=st.tuples(said, said),
    overwrites=st.booleans(),
    driver=st.sampled_from(["580.1", "590.2"]),
)
steps = st.one_of(
    st.tuples(st.just("send"), sendings, st.booleans()),
    st.tuples(st.just("send"), sendings, st.booleans()),
    st.tuples(st.just("withdraw"), st.integers(0, 2)),
    st.tuples(st.just("here"), st.integers(0, 1), st.integers(0, 2)),
    st.tuples(st.just("wrong"), st.integers(0, 2)),
)


def play(world: World, done: Sequence[Any], only: set[str] | None) -> set[str]:
    """The imports that stand at the end. `only`: leave out all others, and every withdrawal."""
    sent: list[str] = []
    standing: set[str] = set()
    for step in done:
        match step:
            case ("send", sending, finished):
                if only is None or sending.as_import().job_id in only:
                    sent.append(world.send(sending))
                    standing.add(sent[-1])
                if finished:
                    drain(world)
            case ("withdraw", place) if only is None and place < len(sent):
                with suppress(KeyError):
                    standing.remove(sent[place])
                world.withdraw(sent[place])
            case ("here", key, place):
                world.measure_here(key, place)
            case ("wrong", place):
                world.find_wrong_here(place)
    drain(world)
    return standing


@settings(max_examples=12)
@given(st.lists(steps, min_size=2, max_size=8))
def test_what_was_withdrawn_leaves_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    migrated_file: Path,
    done: list[Any],
) -> None:
    """Any sequence of imports and withdrawals leaves, but for revisions and times, what those alone would have left
    that were never withdrawn."""
    folder = tmp_path_factory.mktemp("imports")
    with_all, alone = (World(fresh(shutil.copy(migrated_file, folder / name))) for name in ("all.db", "alone.db"))
    standing = play(with_all, done, None)
    play(alone, done, standing)
    assert with_all.content() == alone.content()


def fresh(path: Path) -> Database:
    database = Database(f"sqlite:///{path}", FakeClock())
    database.pause = lambda: None  # type: ignore[method-assign]
    return database
