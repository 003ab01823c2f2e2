"""What ended long ago is removed, as far as nothing needs it; a dry run says the same; the reconciler does it daily."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import func, select

from storage.blobs.blob_store import BlobStore
from storage.database.session import Database
from storage.database.sql import core
from storage.database.tables import BlobRow, BuildRow, CandidateRow, GroupRow, JobRow, TaskRow, VerdictRow
from storage.entities.jobs import job_state
from storage.entities.record_parts import withdraw_code
from storage.entities.verdicts import CPU, GPU, NewVerdict, write_verdicts
from storage.entities.winners import get_winners, publish_winner
from storage.maintenance import retention
from storage.maintenance.retention import Keep, Removed, collect, survey
from storage.transitions.end_jobs import finish_problem
from tests.support.fixtures.queue import QueueWorld
from tests.support.fixtures.storage import (
    EveryOperator,
    add_job,
    clear_all,
    compile_next,
    plan_next,
    take_one,
    verify_next,
    winner_record,
)
from tests.support.run.fake_clock import FakeClock
from workers.worker import reconcile
from workers.worker.reconcile import Reconciler

DAY = 86_400.0
KEEP = Keep(30 * DAY)


def count(database: Database, table: type) -> int:
    with database.read() as session:
        return session.scalar(select(func.count()).select_from(core(table))) or 0


def done_job(database: Database, *builds: str) -> str:
    """A job of one problem, through every step."""
    job = add_job(database).id
    plan_next(database, *builds)
    compile_next(database)
    verify_next(database)
    finish_next(database)
    return job


def finish_next(database: Database) -> None:
    lease = take_one(database, "finish")
    with database.write() as session:
        finish_problem(session, lease, winner="c", error=None)


def collected(database: Database, keep: Keep = KEEP) -> Removed:
    return sum(collect(database, keep), Removed())


def test_an_old_job_goes_with_all_that_only_it_needed_and_a_dry_run_says_so_before(
    database: Database, clock: FakeClock
) -> None:
    job = done_job(database, "a", "b")
    clock.advance(31 * DAY)
    expected = survey(database, KEEP)
    assert count(database, JobRow) == 1, "a dry run removes nothing"
    removed = collected(database)
    assert removed == expected
    assert replace(removed, tasks=0) == Removed(jobs=1, candidates=2, builds=2, groups=1, verdicts=2)
    assert [count(database, table) for table in (JobRow, CandidateRow, TaskRow, BuildRow, GroupRow, VerdictRow)] == (
        [0] * 6
    )
    with database.read() as session:
        assert job_state(session, job) is None
    assert collected(database) == survey(database, KEEP) == Removed()


def test_what_a_younger_job_or_one_that_has_not_ended_needs_stays(database: Database, clock: FakeClock) -> None:
    done_job(database, "a", "b")
    clock.advance(20 * DAY)
    live = add_job(database).id
    plan_next(database, "b", "c")
    clock.advance(20 * DAY)
    assert replace(survey(database, KEEP), tasks=0) == Removed(jobs=1, candidates=2, builds=1, verdicts=1)
    collected(database)
    compile_next(database)
    verify_next(database)
    finish_next(database)
    with database.read() as session:
        state = job_state(session, live)
        left = set(session.scalars(select(BuildRow.id)))
    assert state is not None and state.state == "done"
    assert left == {"b", "c"}


def test_a_problem_that_gets_the_number_of_one_that_was_removed_is_finished_too(
    database: Database, clock: FakeClock
) -> None:
    done_job(database, "a")
    clock.advance(31 * DAY)
    collected(database)
    job = done_job(database, "a")
    with database.read() as session:
        state = job_state(session, job)
    assert state is not None and state.state == "done"


def test_winners_keep_files_and_can_still_be_withdrawn_when_their_jobs_are_gone(
    database: Database, clock: FakeClock, tmp_path: Path
) -> None:
    blobs = BlobStore(database, (tmp_path / "blobs").as_uri())
    named, lost = blobs.put(b"of a winner", "-"), blobs.put(b"of nothing", "-")
    record = winner_record("k" * 64, "c")
    entry = record.front[0].model_copy(
        update={"so_sha256": named.digest, "cubin_sha256": named.digest, "source_sha256": named.digest}
    )
    with database.write() as session:
        publish_winner(session, winner_record("k" * 64, "c", front=[entry]), attempt="t")
        verification = NewVerdict(entry.code_digest, "matmul", "ok", None, {}, 0.0, 0.0)
        write_verdicts(session, [verification], GPU, EveryOperator("g1"))
    clock.advance(31 * DAY)
    assert collected(database) == Removed(blobs=1, bytes=lost.size)
    assert blobs.get(named.digest) == b"of a winner"
    with database.write() as session:
        write_verdicts(
            session,
            [NewVerdict(entry.code_digest, "matmul", "incorrect", "wrong", {}, 0.0, 0.0)],
            GPU,
            EveryOperator("g1"),
        )
        assert withdraw_code(session, [entry.code_digest]) == ["k" * 64]
        assert get_winners(session, ["k" * 64]) == {}
    assert collected(database) == Removed(blobs=1, bytes=named.size)


def test_a_blob_that_is_put_again_while_it_is_removed_stays(
    database: Database, clock: FakeClock, tmp_path: Path
) -> None:
    blobs = BlobStore(database, (tmp_path / "blobs").as_uri())
    digests = [blobs.put(name.encode(), "-").digest for name in ("one", "two")]
    clock.advance(31 * DAY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retention, "ROWS_AT_ONCE", 1)
        removing = retention.remove_blobs(database, clock.now())
        assert next(removing).blobs == 1
        for name in ("one", "two"):  # of which one is removed, and the other found to be free
            blobs.put(name.encode(), "-")
        assert sum(removing, Removed()) == Removed()
    assert [blobs.get(digest) for digest in digests] == [b"one", b"two"]


@pytest.mark.parametrize(
    ("venue", "verdict", "stays"), [(GPU, "incorrect", True), (GPU, "ok", False), (CPU, "ok", False)]
)
def test_what_a_gpu_found_wrong_is_never_removed(
    database: Database, clock: FakeClock, venue: str, verdict: str, stays: bool
) -> None:
    with database.write() as session:
        write_verdicts(session, [NewVerdict("code", "matmul", verdict, None, {}, 0.0, 0.0)], venue, EveryOperator("1"))
    clock.advance(31 * DAY)
    collected(database)
    assert count(database, VerdictRow) == stays


def test_with_too_many_bytes_younger_jobs_go_but_none_of_the_last_hour(
    database: Database, clock: FakeClock, tmp_path: Path
) -> None:
    blobs = BlobStore(database, (tmp_path / "blobs").as_uri())
    for name in ("old", "young"):
        job, source = add_job(database).id, blobs.put(name.encode(), "-").digest
        with database.write() as session:
            session.execute(
                GroupRow.__table__.insert().values(  # type: ignore[attr-defined]
                    id=name, target="sm_80", state="compiled", kernels=[], created_at=clock.now(),
                    finished_at=clock.now(), source=source,
                )
            )  # fmt: skip
            session.execute(core(JobRow).update().where(JobRow.id == job).values(state="done", finished_at=clock.now()))
            session.execute(core(TaskRow).update().values(state="done", finished_at=clock.now()))
        clock.advance(10 * DAY if name == "old" else 1800.0)
    assert collected(database, Keep(30 * DAY, 100)) == Removed()
    assert survey(database, Keep(30 * DAY, 1)).jobs == 1
    assert collected(database, Keep(30 * DAY, 1)).jobs == 1
    with database.read() as session:
        assert list(session.scalars(select(GroupRow.id))) == ["young"]


def test_the_reconciler_removes_what_is_old_a_part_in_each_round(
    queue_world: QueueWorld,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database, clock = queue_world.database, FakeClock()
    database.clock = clock
    for build in ("a", "b", "c"):
        done_job(database, build)
    clock.advance(31 * DAY)
    monkeypatch.setattr(reconcile, "COLLECT_ROUND_SECONDS", 0.0)
    blobs = BlobStore(database, queue_world.settings.blobs_url)
    reconciler = Reconciler(queue_world.settings, database, blobs, queue_world.redis)
    reconciler.run_once()
    assert count(database, JobRow) == 3, "not before the service has run for a while"
    monkeypatch.setattr(reconcile, "COLLECT_FIRST_SECONDS", 0.0)
    reconciler = Reconciler(queue_world.settings, database, blobs, queue_world.redis)
    reconciler.run_once()
    assert count(database, JobRow) > 0, "a part"
    for _ in range(30):
        reconciler.run_once()
    assert count(database, JobRow) == count(database, BuildRow) == 0


def test_no_part_of_it_is_long(database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each transaction removes so many rows at most."""
    monkeypatch.setattr(retention, "ROWS_AT_ONCE", 3)
    done_job(database, *(f"b{number}" for number in range(8)))
    with database.write() as session:
        clear_all(session)
    clock.advance(31 * DAY)
    assert [part.candidates for part in collect(database, KEEP) if part.candidates] == [3, 3, 2]
    assert count(database, BlobRow) == 0
