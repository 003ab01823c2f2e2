"""A backup of a running service is one again: whole or not at all, copied once, checked when it is restored."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

import cukiln
from cukiln.cli import main
from storage.blobs.blob_store import BlobStore
from storage.config.files import UMASK
from storage.config.settings import RESTORING, Settings, load_settings
from storage.database.session import Database
from storage.database.sql import core
from storage.database.tables import BlobRow
from storage.entities.keys import create_key, parts_of, revoke_key
from storage.entities.winners import get_winners, publish_winner
from storage.errors import BackupUnusable
from storage.maintenance import backup
from storage.maintenance.backup import back_up, read_manifest, restore
from tests.support.fixtures.line import Line, N
from tests.support.fixtures.queue import QueueWorld
from tests.support.fixtures.storage import winner_record
from workers.steps import STEPS
from workers.steps.context import Cancel, StepContext
from workers.supervisor.serve import embedded
from workers.supervisor.start_checks import ServeError, refuse_half_restored

# The cheapest kernels; those of the second take longer than a backup.
FIRST = {"operator": "reduce", "shape": [64, 96], "axes": [1], "dtype": "float32", "name": "first"}
LATER = {**FIRST, "shape": [64, 97], "name": "later"}
KEY = "k" * 64


class Kept:
    """A data folder with a database and blobs, without a service."""

    def __init__(self, folder: Path, template: Path) -> None:
        self.settings = load_settings(data_dir=folder)
        folder.mkdir()
        shutil.copy(template, folder / "cukiln.db")
        self.database = Database(self.settings.database_url)
        self.blobs = BlobStore(self.database, self.settings.blobs_url)

    def file(self, digest: str) -> Path:
        return self.settings.data_dir / "blobs" / "sha256" / digest[:2] / digest


@pytest.fixture
def kept(tmp_path: Path, migrated_file: Path) -> Kept:
    return Kept(tmp_path / "data", migrated_file)


def copy_of(folder: Path, digest: str) -> Path:
    return folder / "blobs" / "sha256" / digest[:2] / digest


def restored_to(folder: Path, data: Path) -> tuple[Settings, backup.Restored]:
    settings = load_settings(data_dir=data)
    return settings, restore(folder, settings)


def test_what_is_backed_up_between_two_steps_of_a_job_is_restored_with_winners_and_continues(
    line: Line, tmp_path: Path
) -> None:
    search: dict[str, Any] = {"tunables": {"way": ["copy"], "slices": [1], "factor": [1]}}
    line.job(search)
    record = line.record()
    later = replace(line, problem=type(line.problem).model_validate({**line.problem.canonical(), "n": 2 * N}))
    under_way = later.submit({"tunables": {**search["tunables"], "factor": [2]}})
    lease = line.lease("plan")
    assert lease is not None
    STEPS[lease.kind](StepContext(line.workplace, lease, Cancel()))
    assert back_up(line.world.database, line.blobs, tmp_path / "backup").manifest.missing == []
    settings, result = restored_to(tmp_path / "backup", tmp_path / "again")
    assert result.lost == []
    world = QueueWorld(tmp_path, settings, Database(settings.database_url), line.world.redis)
    again = Line(world, line.processes, later.problem)
    assert again.report(under_way).state == "running"
    with world.database.read() as session:
        assert get_winners(session, [line.key]) == {line.key: record}
    for digest in record.front[0].blobs:
        assert hashlib.sha256(again.blobs.get(digest)).hexdigest() == digest
    while (lease := again.lease(*STEPS)) is not None:
        STEPS[lease.kind](StepContext(again.workplace, lease, Cancel()))
    assert again.report(under_way).state == "done"
    assert again.record().front[0].schedule["factor"] == 2
    world.database.dispose()


@pytest.mark.long  # the same of two services: the test before it
def test_a_service_that_is_backed_up_while_jobs_run_is_restored_with_winners_and_continues(tmp_path: Path) -> None:
    search = {"level": 1, "limit": 1}
    with embedded(load_settings(data_dir=tmp_path / "data", workers=1, port=0)) as running:
        with cukiln.Client(running.url) as client:
            done = client.tune([FIRST], search=search, timeout=240)
            under_way = client.tune([LATER], search={"level": 1, "limit": 2}, wait=False)
            record = client.kernel(done.problems[0].key)
        settings = load_settings(data_dir=tmp_path / "data")
        database = Database(settings.database_url)
        made = back_up(database, BlobStore(database, settings.blobs_url), tmp_path / "backup")
        assert made.manifest.missing == []
        database.dispose()
    _, result = restored_to(tmp_path / "backup", tmp_path / "again")
    assert result.lost == []
    with sqlite3.connect(tmp_path / "again" / "cukiln.db") as connection:
        (state,) = connection.execute("SELECT state FROM jobs WHERE id = ?", (under_way.job,)).fetchone()
        assert state in ("queued", "running"), "the job was to be under way"
    with (
        embedded(load_settings(data_dir=tmp_path / "again", workers=1, port=0)) as running,
        cukiln.Client(running.url, cache_dir=tmp_path / "cache") as client,
    ):
        assert client.kernel(record.key) == record
        for digest in record.front[0].blobs:
            assert hashlib.sha256(client.blob(digest)).hexdigest() == digest
        assert client.wait(under_way.job, timeout=240).state == "done"
        assert client.tune([FIRST], search=search, timeout=240).cached


def test_writers_continue_while_a_backup_is_made_and_it_holds_every_blob_that_it_names(
    kept: Kept, tmp_path: Path
) -> None:
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            kept.blobs.put(number.to_bytes(8, "big") * 100, "-")
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3):
            made = back_up(kept.database, kept.blobs, tmp_path / "backup")
            assert made.manifest.missing == []
    finally:
        stop.set()
        writer.join()
    settings, result = restored_to(tmp_path / "backup", tmp_path / "again")
    database = Database(settings.database_url)
    blobs = BlobStore(database, settings.blobs_url)
    with database.read() as session:
        digests = set(session.scalars(select(BlobRow.digest)))
    assert digests == result.manifest.blobs.keys()
    assert all(blobs.get(digest) for digest in digests)


def test_a_second_backup_copies_only_what_is_new_and_drops_what_is_not_needed(kept: Kept, tmp_path: Path) -> None:
    folder = tmp_path / "backup"
    stays, goes, damaged = (kept.blobs.put(name, "-").digest for name in (b"stays", b"goes", b"damaged"))
    assert back_up(kept.database, kept.blobs, folder).copied == 3
    before = copy_of(folder, stays).stat()
    copy_of(folder, damaged).write_bytes(b"damagEd")
    new = kept.blobs.put(b"new", "-").digest
    with kept.database.write() as session:
        session.execute(core(BlobRow).delete().where(BlobRow.digest == goes))
    made = back_up(kept.database, kept.blobs, folder)
    assert (made.copied, made.manifest.blobs.keys()) == (2, {stays, damaged, new})
    assert copy_of(folder, stays).stat().st_mtime_ns == before.st_mtime_ns
    assert copy_of(folder, damaged).read_bytes() == b"damaged"
    assert not copy_of(folder, goes).exists()
    assert len(list(folder.glob("*.db"))) == 1


def test_what_a_backup_did_not_write_stays_in_its_folder(kept: Kept, tmp_path: Path) -> None:
    folder = tmp_path / "backup"
    back_up(kept.database, kept.blobs, folder)
    others = [folder / name for name in ("cukiln.dump", "cukiln-2026.db", "NOTES", "blobs/list.txt")]
    left = [folder / name for name in (f"cukiln-{'0' * 32}.db-journal", "manifest.json.partial")]
    for file in (*others, *left):
        file.write_text("words")
    back_up(kept.database, kept.blobs, folder)
    assert [file.exists() for file in (*others, *left)] == [True] * len(others) + [False] * len(left)


@pytest.mark.parametrize("made", ["before", "by an older release"])
def test_only_the_owner_can_read_a_backup_and_what_is_restored_from_it(kept: Kept, tmp_path: Path, made: str) -> None:
    kept.blobs.put(b"bytes", "-")
    before = os.umask(0o022)
    try:
        for name in ("backup", "again"):
            (tmp_path / name).mkdir()
        if made == "by an older release":
            back_up(kept.database, kept.blobs, tmp_path / "backup")
            for path in (tmp_path / "backup", *(tmp_path / "backup").rglob("*")):
                path.chmod(0o755)
        back_up(kept.database, kept.blobs, tmp_path / "backup")
        restored_to(tmp_path / "backup", tmp_path / "again")
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    for folder in (tmp_path / "backup", tmp_path / "again"):
        assert [path for path in (folder, *folder.rglob("*")) if path.stat().st_mode & UMASK] == []


def test_a_restore_says_which_keys_are_good_again(
    kept: Kept, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with kept.database.write() as session:
        (ci, _), (old, _) = (parts_of(create_key(session, name, ["read"])) or ("", "") for name in ("ci", "old"))
        revoke_key(session, old)
    back_up(kept.database, kept.blobs, tmp_path / "backup")
    with kept.database.write() as session:
        revoke_key(session, ci)
    monkeypatch.setenv("CUKILN_DATA", str(tmp_path / "again"))
    monkeypatch.setattr("sys.argv", ["cukiln", "restore", str(tmp_path / "backup")])
    with pytest.raises(SystemExit):
        main.main()
    said = capsys.readouterr().out.splitlines()[1:]
    assert said == [f"key {ci} (ci, read) is good: `cukiln keys revoke {ci}` if it was revoked since"]


@pytest.mark.parametrize("fails_at", ["_snapshot", "_listed", "_write", "_prune"])
def test_a_backup_that_is_interrupted_leaves_the_one_before(
    fails_at: str, kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "backup"
    first = kept.blobs.put(b"first", "-").digest
    back_up(kept.database, kept.blobs, folder)
    second = kept.blobs.put(b"second", "-").digest

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(backup, fails_at, interrupted)
        with pytest.raises(KeyboardInterrupt):
            back_up(kept.database, kept.blobs, folder)
    _, result = restored_to(folder, tmp_path / "again")
    assert result.lost == []
    assert result.manifest.blobs.keys() == ({first, second} if fails_at == "_prune" else {first})
    assert back_up(kept.database, kept.blobs, folder).manifest.blobs.keys() == {first, second}


def test_half_a_backup_is_none(kept: Kept, tmp_path: Path) -> None:
    back_up(kept.database, kept.blobs, tmp_path / "backup")
    (tmp_path / "backup" / "manifest.json").unlink()
    with pytest.raises(BackupUnusable, match=r"no whole backup: it has no manifest\.json"):
        restored_to(tmp_path / "backup", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_damaged_database_is_not_restored(kept: Kept, tmp_path: Path) -> None:
    back_up(kept.database, kept.blobs, tmp_path / "backup")
    (copy,) = (tmp_path / "backup").glob("*.db")
    copy.write_bytes(copy.read_bytes()[:-1] + b"!")
    with pytest.raises(BackupUnusable, match="is damaged: its digest is"):
        restored_to(tmp_path / "backup", tmp_path / "again")
    assert not (tmp_path / "again" / "cukiln.db").exists()


@pytest.mark.parametrize("lost_in", ["the service", "the backup", "the manifest"])
def test_what_needed_a_lost_blob_answers_no_more_after_a_restore(
    lost_in: str, kept: Kept, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, lost = (kept.blobs.put(name, "-").digest for name in (b"whole", b"lost"))
    for key, digest in ((KEY, lost), ("w" * 64, whole)):
        named = dict.fromkeys(("so_sha256", "cubin_sha256", "source_sha256"), digest)
        entry = winner_record(key, "c").front[0].model_copy(update=named)
        with kept.database.write() as session:
            publish_winner(session, winner_record(key, "c", front=[entry]), attempt="t")
    if lost_in == "the service":
        kept.file(lost).write_bytes(b"l0st")
    monkeypatch.setenv("CUKILN_DATA", str(kept.settings.data_dir))
    monkeypatch.setattr("sys.argv", ["cukiln", "backup", str(tmp_path / "backup")])
    with pytest.raises(SystemExit) as ended:
        main.main()
    out = capsys.readouterr().out
    assert (ended.value.code, lost in out) == ((1, True) if lost_in == "the service" else (0, False))
    if lost_in == "the backup":
        copy_of(tmp_path / "backup", lost).write_bytes(b"l0st")
    if lost_in == "the manifest":
        copy_of(tmp_path / "backup", lost).unlink()
        manifest = tmp_path / "backup" / "manifest.json"
        manifest.write_text(manifest.read_text().replace(lost, whole))
    monkeypatch.setenv("CUKILN_DATA", str(tmp_path / "again"))
    monkeypatch.setattr("sys.argv", ["cukiln", "restore", str(tmp_path / "backup")])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert (ended.value.code, f"lost: sha256:{lost}" in capsys.readouterr().out) == (1, True)
    database = Database(load_settings(data_dir=tmp_path / "again").database_url)
    with database.read() as session:
        assert list(get_winners(session, [KEY, "w" * 64])) == ["w" * 64]
        assert session.scalars(select(BlobRow.digest)).all() == [whole]


def test_a_folder_that_holds_something_is_left_alone(kept: Kept, tmp_path: Path) -> None:
    back_up(kept.database, kept.blobs, tmp_path / "backup")
    with pytest.raises(BackupUnusable, match=r"data is not empty \(it has "):
        restored_to(tmp_path / "backup", tmp_path / "data")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("words")
    with pytest.raises(BackupUnusable, match="holds no backup"):
        back_up(kept.database, kept.blobs, tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_restore_that_was_interrupted_is_begun_again_and_no_service_starts_before(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = kept.blobs.put(b"bytes", "-").digest
    back_up(kept.database, kept.blobs, tmp_path / "backup")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", interrupted)
        with pytest.raises(KeyboardInterrupt):
            restored_to(tmp_path / "backup", tmp_path / "again")
    assert [path.name for path in (tmp_path / "again").iterdir()] == [RESTORING]
    with pytest.raises(ServeError, match="holds half of a backup: run `cukiln restore` once more"):
        refuse_half_restored(tmp_path / "again")
    restored_to(tmp_path / "backup", tmp_path / "again")
    refuse_half_restored(tmp_path / "again")
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == ["blobs", "cukiln.db"]
    assert (tmp_path / "again" / "blobs" / "sha256" / digest[:2] / digest).read_bytes() == b"bytes"


def test_of_postgresql_only_the_blobs_are_copied_and_it_is_said_how_the_rest_is(tmp_path: Path, kept: Kept) -> None:
    server = Database("postgresql://user@127.0.0.1:1/none")
    with pytest.raises(BackupUnusable, match="dump it with pg_dump"):
        back_up(server, BlobStore(server, kept.settings.blobs_url), tmp_path / "backup")
    digest = kept.blobs.put(b"bytes", "-").digest
    made = back_up(kept.database, kept.blobs, tmp_path / "backup", blobs_only=True)
    assert (made.manifest.database, made.manifest.blobs) == (None, {digest: 5})
    settings = load_settings(data_dir=tmp_path / "again", database_url=str(server.url.render_as_string(False)))
    assert restore(tmp_path / "backup", settings).manifest == read_manifest(tmp_path / "backup")
    assert [path.name for path in (tmp_path / "again").iterdir()] == ["blobs"]


def test_a_store_elsewhere_is_not_restored_into(kept: Kept, tmp_path: Path) -> None:
    back_up(kept.database, kept.blobs, tmp_path / "backup")
    settings = load_settings(data_dir=tmp_path / "again", blobs_url="s3://bucket/prefix")
    with pytest.raises(BackupUnusable, match="unset CUKILN_BLOBS_URL"):
        restore(tmp_path / "backup", settings)
