"""Winner records: one revision after the other, fenced by the attempt."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from codegen.identity import problem_digest
from cukiln.types import WinnerRecord
from storage.database.session import Database
from storage.entities.libraries import (
    PtxVerdict,
    add_library,
    end_library,
    files_of,
    find_library,
    forget_library,
    ptx_verdict,
    start_library,
    write_ptx_verdict,
    wrong_ptx,
)
from storage.entities.winners import (
    Elsewhere,
    get_winners,
    measured_elsewhere,
    publish_winner,
    stored_winners,
    winner_stamps,
    withdraw_winner,
)
from storage.queue.new_tasks import NewTask, add_tasks
from storage.queue.tasks import complete
from storage.transitions.end_attempt import expire_leases, release
from tests.support.fixtures.storage import TARGET, add_job, counted_statements, take_one, winner_record
from tests.support.run.fake_clock import FakeClock

KEY = "k" * 64


def publish(database: Database, record: WinnerRecord, attempt: str) -> tuple[int, bool]:
    """The record's revision, and whether it is a new one."""
    with database.write() as session:
        before = winner_stamps(session, [record.key])
        publish_winner(session, record, attempt=attempt)
        after = winner_stamps(session, [record.key])
    return after[record.key][0], after != before


def test_a_record_is_published_and_read_back(database: Database, clock: FakeClock) -> None:
    assert publish(database, winner_record(KEY, "c1"), "t1") == (1, True)
    with database.read() as session:
        records = get_winners(session, [KEY, "missing"])
        assert winner_stamps(session, [KEY, "missing"]) == {KEY: (1, "t1")}
    assert records == {KEY: winner_record(KEY, "c1").model_copy(update={"revision": 1, "updated_at": clock.now()})}


def test_publishing_twice_with_one_attempt_changes_nothing(database: Database) -> None:
    publish(database, winner_record(KEY, "c1"), "t1")
    assert publish(database, winner_record(KEY, "c2"), "t1") == (1, False)
    with database.read() as session:
        assert get_winners(session, [KEY])[KEY].front[0].candidate == "c1"


def test_publishing_what_the_record_says_already_makes_no_revision(database: Database, clock: FakeClock) -> None:
    publish(database, winner_record(KEY, "c1"), "t1")
    clock.advance(5)
    assert publish(database, winner_record(KEY, "c1"), "t2") == (1, False)
    with database.read() as session:
        assert get_winners(session, [KEY])[KEY].updated_at == clock.now() - 5


def test_another_attempt_publishes_the_next_revision_also_of_a_record_that_was_withdrawn(database: Database) -> None:
    publish(database, winner_record(KEY, "c1"), "t1")
    assert publish(database, winner_record(KEY, "c2"), "t2") == (2, True)
    with database.write() as session:
        withdraw_winner(session, KEY, "t3")
    assert publish(database, winner_record(KEY, "c2"), "t4") == (4, True)
    with database.read() as session:
        assert get_winners(session, [KEY])[KEY].front[0].candidate == "c2"


def test_ten_thousand_records_are_looked_up_with_one_query(database: Database) -> None:
    publish(database, winner_record(KEY, "c1"), "t1")
    with counted_statements(database) as seen, database.read() as session:
        records = get_winners(session, [KEY, *(f"{n:064x}" for n in range(9_999))])
    assert list(records) == [KEY]
    assert len([statement for statement in seen if "winners" in statement]) == 1


def test_stored_records_are_the_json_that_was_published(database: Database) -> None:
    publish(database, winner_record(KEY, "c1", updated_at=1.0), "t1")
    with database.read() as session:
        assert stored_winners(session, []) == winner_stamps(session, []) == {}
        ((stamp, stored),) = stored_winners(session, [KEY, "missing", KEY]).values()
        assert stamp == winner_stamps(session, [KEY])[KEY] == (1, "t1")
        assert WinnerRecord.model_validate_json(stored) == get_winners(session, [KEY])[KEY]


def test_a_number_that_json_cannot_hold_is_published_as_none(database: Database) -> None:
    endless = winner_record(KEY, "c1")
    front = [endless.front[0].model_copy(update={"predicted_us": math.inf})]
    publish(database, endless.model_copy(update={"front": front}), "t1")
    with database.read() as session:
        ((_, stored),) = stored_winners(session, [KEY]).values()
    (entry,) = json.loads(stored, parse_constant=lambda name: pytest.fail(name))["front"]
    assert entry["predicted_us"] is None


def test_what_was_measured_is_found_by_its_problem_on_one_class_after_the_other(database: Database) -> None:
    def key(number: int) -> str:
        return f"{number:064x}"

    classes = ["predicted:sm_80", "NVIDIA A", "NVIDIA C", "NVIDIA B"]
    for number, device_class in enumerate(classes):
        publish(database, winner_record(key(number), "c1", device_class=device_class), f"t{number}")
    publish(database, winner_record(key(9), "c1", device_class="NVIDIA A", problem={"m": 65}), "t9")
    here, other = problem_digest({"m": 64}), problem_digest({"m": 65})
    asked = [
        Elsewhere(here, TARGET),
        Elsewhere(here, "sm_90a"),
        Elsewhere(here, TARGET, "NVIDIA A"),
        Elsewhere(here, TARGET, "NVIDIA C"),
        Elsewhere(other, TARGET),
    ]
    with counted_statements(database) as seen, database.read() as session:
        assert measured_elsewhere(session, asked) == {
            0: ("NVIDIA A", key(1)),
            2: ("NVIDIA B", key(3)),
            4: ("NVIDIA A", key(9)),
        }
        assert measured_elsewhere(session, []) == {}
    assert len([statement for statement in seen if "winners" in statement]) == 1


def test_a_library_is_built_by_one_attempt_at_a_time(database: Database, clock: FakeClock) -> None:
    job = add_job(database).id
    with database.write() as session:
        add_tasks(session, [NewTask("finish", name, jobs=(job,)) for name in ("a", "b")])
    first, other = take_one(database, "finish"), take_one(database, "finish")
    with database.write() as session:
        assert start_library(session, "i" * 64, first)
        assert start_library(session, "i" * 64, first)  # again
        assert not start_library(session, "i" * 64, other)
        assert start_library(session, "j" * 64, other)
        end_library(session, "i" * 64, other)  # not its own
        assert not start_library(session, "i" * 64, other)
        clock.set_by(3600.0)
        assert not start_library(session, "i" * 64, other), "clocks need not agree: the lease is there"
        end_library(session, "i" * 64, first)
        assert start_library(session, "i" * 64, other)


@pytest.mark.parametrize("end", ["expired", "completed", "released"])
def test_an_attempt_that_has_ended_builds_no_library_any_more(database: Database, clock: FakeClock, end: str) -> None:
    job = add_job(database).id
    with database.write() as session:
        add_tasks(session, [NewTask("finish", name, jobs=(job,)) for name in ("a", "b")])
    lease = take_one(database, "finish", seconds=5.0)
    other = take_one(database, "finish", seconds=60.0)
    with database.write() as session:
        assert start_library(session, "i" * 64, lease)
        if end == "expired":
            clock.advance(6)
            assert len(expire_leases(session)) == 1
        elif end == "completed":
            complete(session, lease)
        else:
            release(session, lease)
        assert start_library(session, "i" * 64, other)


def test_the_first_library_of_an_id_stays(database: Database) -> None:
    same = {"id": "i" * 64, "kernel": "k", "toolchain": "t", "code_digest": "code"}
    with database.write() as session:
        assert find_library(session, "i" * 64) is None
        add_library(session, **same, resources={"registers": 32}, library="so1", cubin="cubin1", source="cu1")
        add_library(session, **same, resources={}, library="so2", cubin="cubin2", source="cu2")
    with database.read() as session:
        library = find_library(session, "i" * 64)
        assert library is not None
        assert (library.resources, files_of(library)) == ({"registers": 32}, ["so1", "cubin1", "cu1"])
    with database.write() as session:
        forget_library(session, "i" * 64)
        assert find_library(session, "i" * 64) is None


def test_a_verdict_on_ptx_holds_for_all_libraries_with_it_and_for_its_version(database: Database) -> None:
    own = {"toolchain": "t", "code_digest": "d", "resources": {}, "cubin": "c", "source": "s", "kernel": "k"}
    right = PtxVerdict("ok", "", "v1", 7, 0.5, 0.25)
    wrong = replace(right, verdict="incorrect", message="64 elements are wrong", plan_version="v2")
    with database.write() as session:
        for name in ("first", "other launch code"):
            add_library(session, id=name, library=name, ptx="p", **own)
        add_library(session, id="another kernel", library="l", ptx="q", **own)
        add_library(session, id="without ptx", library="m", **own)
        assert ptx_verdict(session, "p", "v1") is None
        write_ptx_verdict(session, "p", right)
    with database.write() as session:
        assert ptx_verdict(session, "p", "v1") == right
        assert (ptx_verdict(session, "p", "v2"), ptx_verdict(session, "q", "v1")) == (None, None)
        add_library(session, id="a third", library="n", ptx="p", **own)
        assert ptx_verdict(session, "p", "v1") == right
        assert wrong_ptx(session, ["p", "q"]) == set()
        write_ptx_verdict(session, "p", wrong)
        assert (ptx_verdict(session, "p", "v1"), ptx_verdict(session, "p", "v2")) == (None, wrong)
        assert wrong_ptx(session, ["p", "q"]) == {"p"}
