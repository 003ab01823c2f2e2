"""Whatever is removed, forgotten, damaged and repaired, at any time: every winner's files are there, every job ends.

The orders of `test_storage_state_machine` with collectors, winners that are published, and blobs between them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test
from sqlalchemy import select

from storage.blobs.blob_store import BlobStore, require_blobs
from storage.blobs.object_store import StoredObject
from storage.database.session import Database
from storage.database.tables import BlobRow, BuildRow, JobProblemRow, WinnerRow, WinnerUseRow
from storage.entities.libraries import add_library, files_of, find_library
from storage.entities.winners import get_winners, publish_winner, uses_of
from storage.errors import BlobMissing
from storage.maintenance import retention
from storage.maintenance.damage import repair
from storage.maintenance.forget import forget_builds, forget_winner
from storage.maintenance.retention import Keep, Removed, collect
from storage.transitions import end_jobs
from tests.of_storage.transitions.job_machine import Jobs
from tests.support.fixtures.storage import winner_record
from tests.support.processes.played_workers import AT_ONCE
from tests.support.run.fake_clock import FakeClock

HOUR, DAY = 3600.0, 86_400.0
KEYS = ("k" * 64, "l" * 64)
TEXTS = ("one", "two", "three")


class FakeObjects:
    """An object store whose times are the fake clock's."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.held: dict[str, tuple[bytes, float]] = {}

    def put(self, path: str, data: bytes) -> None:
        self.held[path] = (data, self._clock.now())

    def get(self, path: str) -> bytes | None:
        return self.held[path][0] if path in self.held else None

    def delete(self, path: str) -> None:
        self.held.pop(path, None)

    def delete_older(self, path: str, before: float) -> bool:
        old = path in self.held and self.held[path][1] < before
        if old:
            self.delete(path)
        return old

    def move(self, path: str, to: str) -> None:
        if path in self.held:
            self.held[to] = self.held.pop(path)

    def list(self) -> Iterator[StoredObject]:
        return iter([StoredObject(path, len(data), at) for path, (data, at) in self.held.items()])

    def local_path(self, path: str) -> Path | None:
        return None


class KeptJobs(Jobs):
    @initialize()
    def open(self) -> None:
        super().open()
        self.objects = FakeObjects(self.clock)
        self.blobs = BlobStore(self.database, "", self.objects)
        self.collectors: list[Iterator[Removed]] = []
        self.publishing: list[Iterator[None]] = []

    # ---- what happens

    @precondition(lambda self: len(self.collectors) < 2)
    @rule(seconds=st.sampled_from([HOUR, 30 * DAY]), bytes=st.sampled_from([None, 1]))
    def a_collector_begins(self, seconds: float, bytes: int | None) -> None:
        self.collectors.append(collect(self.database, Keep(seconds, bytes)))

    @precondition(lambda self: self.collectors)
    @rule(place=st.sampled_from([0, -1]), steps=st.sampled_from([1, 1, 3, 99]))
    def a_collector_continues(self, place: int, steps: int) -> None:
        for _ in range(steps):
            if next(self.collectors[place], None) is None:
                del self.collectors[place]
                break
        self.note_what_is_gone()

    @rule()
    def bytes_are_swept(self) -> None:
        self.blobs.sweep()

    @rule(seconds=st.sampled_from([2 * HOUR, 40 * DAY]))
    def much_time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(key=st.sampled_from(KEYS), text=st.sampled_from(TEXTS), steps=st.sampled_from([1, 9]))
    def a_winner_is_built(self, key: str, text: str, steps: int) -> None:
        self.publishing.append(_publish(self.database, self.blobs, key, text))
        self.a_winner_continues(-1, steps)

    @precondition(lambda self: self.publishing)
    @rule(place=st.sampled_from([0, -1]), steps=st.sampled_from([1, 9]))
    def a_winner_continues(self, place: int, steps: int) -> None:
        for _ in range(steps):
            if next(self.publishing[place], "published") == "published":
                del self.publishing[place]
                break

    @rule(data=st.data())
    def a_blob_is_damaged_and_repaired(self, data: st.DataObject) -> None:
        with self.database.read() as session:
            digests = session.scalars(select(BlobRow.digest).order_by(BlobRow.digest)).all()
        if digests:
            digest = data.draw(st.sampled_from(digests))
            self.objects.put(f"sha256/{digest[:2]}/{digest}", b"other bytes")
            repair(self.database, self.blobs, digest)
            assert self.blobs.head(digest) is None

    @rule(key=st.sampled_from(KEYS))
    def a_winner_is_forgotten(self, key: str) -> None:
        with self.database.write() as session:
            forget_winner(session, key)
            assert get_winners(session, [key]) == {}

    @rule(data=st.data())
    def a_build_is_forgotten(self, data: st.DataObject) -> None:
        with self.database.write() as session:
            ids = session.scalars(select(BuildRow.id).order_by(BuildRow.id)).all()
            if ids:
                forget_builds(session, [data.draw(st.sampled_from(ids))])

    def note_what_is_gone(self) -> None:
        """Numbers of problems may come again."""
        with self.database.read() as session:
            there = set(session.scalars(select(JobProblemRow.id)))
        for row in (self.model.spent, self.seen):
            for place in [place for place in row if place[0] not in there]:
                del row[place]  # type: ignore[attr-defined]

    # ---- what must hold

    @invariant()
    def every_file_of_a_winner_is_there(self) -> None:
        with self.database.read() as session:
            records = dict(session.execute(select(WinnerRow.key, WinnerRow.record)).all())
            uses = {(row.key, row.digest) for row in session.execute(select(WinnerUseRow.key, WinnerUseRow.digest))}
            winners = get_winners(session, records)
        assert uses == {(key, digest) for key, record in records.items() for digest in uses_of(record)}
        for record in winners.values():
            for entry in record.front:
                for digest in (entry.so_sha256, entry.cubin_sha256):
                    assert self.blobs.get(digest)

    def end_everything(self) -> None:
        for winner in self.publishing:
            for _ in winner:
                pass
        for collector in self.collectors:
            for _ in collector:
                pass
        self.note_what_is_gone()
        super().end_everything()
        self.every_file_of_a_winner_is_there()
        self.everything_goes_when_it_is_old()

    def everything_goes_when_it_is_old(self) -> None:
        self.clock.advance(40 * DAY)
        for _ in collect(self.database, Keep(30 * DAY)):
            pass
        self.blobs.sweep()
        self.every_file_of_a_winner_is_there()
        with self.database.read() as session:
            assert session.scalars(select(JobProblemRow.id)).all() == []
            assert session.scalars(select(BuildRow.id)).all() == []
            used = set(session.scalars(select(WinnerUseRow.digest)))
            assert set(session.scalars(select(BlobRow.digest))) <= used
        assert {entry.name for entry in self.objects.list() if entry.path.startswith("sha256")} <= used


def _publish(database: Database, blobs: BlobStore, key: str, text: str) -> Iterator[None]:
    """As the finish step does it: a library that is known is used again, else built; then it is published, if its files
    are still there."""
    identity = f"{text:0>64}"
    while True:
        with database.read() as session:
            library_row = find_library(session, identity)
        if library_row is None or blobs.missing(files_of(library_row)):
            files = [(f"{text} {kind}".encode(), "-") for kind in ("so", "cubin", "source")]
            library, cubin, source = (blob.digest for blob in blobs.put_many(files))
            yield
            of = {"id": identity, "kernel": "e" * 64, "toolchain": "t" * 64, "code_digest": f"{text:c>64}"}
            with database.write() as session:
                library_row = add_library(session, **of, resources={}, library=library, cubin=cubin, source=source)
        yield
        try:
            with database.write() as session:
                require_blobs(session, files_of(library_row))
                entry = (
                    winner_record(key, text)
                    .front[0]
                    .model_copy(
                        update={
                            "so_sha256": library_row.library,
                            "cubin_sha256": library_row.cubin,
                            "source_sha256": library_row.source,
                            "code_digest": library_row.code_digest,
                        }
                    )
                )
                new = winner_record(key, text, front=[entry])
                publish_winner(session, new, attempt=database.clock.new_id())
        except BlobMissing:
            yield
            continue
        return


# A failing order is made short for up to five minutes, and then printed.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("orders", [4, pytest.param(60, marks=pytest.mark.long)])
def test_winners_keep_their_files_and_jobs_end_whatever_is_removed(
    orders: int,
    migrated_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    KeptJobs.template = migrated_file
    monkeypatch.setattr(Database, "pause", lambda self: None)
    monkeypatch.setattr(end_jobs, "CLEARED_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(retention, "ROWS_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(retention, "PROBLEMS_AT_ONCE", 1)
    examples = int(os.environ.get("CUKILN_TEST_JOB_ORDERS", orders))
    chosen = settings(
        max_examples=examples,
        stateful_step_count=40,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    run_state_machine_as_test(KeptJobs, settings=chosen)
