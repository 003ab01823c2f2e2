"""Blobs: durable before their row, checked before every use, nothing half-written whatever happens."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from storage.blobs import object_store
from storage.blobs.blob_store import Blob, BlobStore, add_blobs, blob_path
from storage.blobs.object_store import LocalObjects, RemoteObjects, StoredObject, open_objects
from storage.database.session import Clock, Database
from storage.database.tables import BlobRow
from storage.errors import BlobCorrupt, BlobMissing, BlobsAway, SettingsError
from workers.processes.cause import is_of_the_machine

DATA = b"\x7fELF" + bytes(range(256)) * 40
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a folder").mkdir()
    return tmp_path / "a folder" / "blobs"


@pytest.fixture
def blobs(database: Database, folder: Path) -> BlobStore:
    database.clock = Clock()  # blobs compare it with the file system's time
    return BlobStore(database, folder.as_uri())


def file_of(folder: Path, digest: str = DIGEST) -> Path:
    return folder / "sha256" / digest[:2] / digest


def make_old(path: Path, hours: float = 2.0) -> None:
    then = time.time() - hours * 3600
    os.utime(path, (then, then))


@pytest.mark.parametrize("kind", ["folder", "remote"])
def test_bytes_come_back_under_their_digest(database: Database, folder: Path, kind: str) -> None:
    remote = RemoteObjects(MemoryStore()) if kind == "remote" else None
    store = BlobStore(database, folder.as_uri(), remote)
    blob = store.put(DATA, "application/x-sharedlib")
    assert blob == Blob(DIGEST, len(DATA), "application/x-sharedlib", database.clock.now())
    assert store.get(DIGEST) == DATA
    assert store.head(DIGEST) == blob
    assert store.path(DIGEST) == (None if kind == "remote" else file_of(folder))


@pytest.mark.parametrize("url", ["memory:///", "s3://bucket/prefix?region=us-east-1"])
def test_other_stores_are_opened_by_their_url(url: str) -> None:
    assert type(open_objects(url, "sha256")) is RemoteObjects


ANSWERS = {
    "no bucket": (404, "NoSuchBucket", "there is no such bucket"),
    "wrong credentials": (403, "SignatureDoesNotMatch", "its credentials are refused"),
    "anything else": (400, "InvalidRequest", "Generic S3 error"),
}


@contextmanager
def bucket(status: int, code: str) -> Iterator[RemoteObjects]:
    """An S3 that answers each request so."""

    class Answer(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>m</Message></Error>'.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in {
            "AWS_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        }.items():  # fmt: skip
            patch.setenv(variable, value)
        patch.setattr(object_store, "RETRIES", {"max_retries": 0})
        try:
            yield open_objects("s3://bucket/prefix", "sha256")
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


@pytest.mark.parametrize("name", ANSWERS)
def test_a_bucket_that_cannot_be_used_is_one_line(name: str) -> None:
    status, code, words = ANSWERS[name]
    match = r"the blob store s3://bucket/prefix cannot be used \("
    with bucket(status, code) as objects, pytest.raises(SettingsError, match=match) as raised:
        objects.require()
    assert words in str(raised.value) and "\n" not in str(raised.value) and len(str(raised.value)) < 450


CALLS: dict[str, Callable[[RemoteObjects], object]] = {
    "put": lambda objects: objects.put("sha256/ab/first", b"bytes"),
    "get": lambda objects: objects.get("sha256/ab/first"),
    "delete": lambda objects: objects.delete("sha256/ab/first"),
    "delete older": lambda objects: objects.delete_older("sha256/ab/first", 0.0),
    "move": lambda objects: objects.move("sha256/ab/first", "quarantine/first"),
    "list": lambda objects: list(objects.list()),
}


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (403, "AccessDenied"), (404, "NoSuchBucket")])
def test_a_bucket_that_is_away_or_refuses_is_the_machines(status: int, code: str) -> None:
    with bucket(status, code) as objects:
        for name, call in CALLS.items():
            if (code, name) == ("NoSuchBucket", "delete older"):  # an answer to HEAD has no words: nothing is deleted
                assert call(objects) is False
                continue
            with pytest.raises(BlobsAway) as met:
                call(objects)
            assert is_of_the_machine(met.value), name
            assert "http" not in str(met.value.strerror) and "sha256" not in str(met.value.strerror), met.value.strerror


def test_what_was_never_put_is_missing(blobs: BlobStore) -> None:
    assert blobs.head(DIGEST) is None
    for use in (blobs.get, blobs.path):
        with pytest.raises(BlobMissing, match=DIGEST):
            use(DIGEST)


def test_a_row_whose_bytes_are_gone_is_missing_until_put_again(blobs: BlobStore, folder: Path) -> None:
    blobs.put(DATA, "-")
    file_of(folder).unlink()
    with pytest.raises(BlobMissing):
        blobs.get(DIGEST)
    blobs.put(DATA, "-")
    assert blobs.get(DIGEST) == DATA


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-1], lambda data: b"", lambda data: data[:9] + b"!" + data[10:], lambda data: data + b"."],
)
def test_damaged_bytes_are_never_handed_out_and_healed_by_the_next_put(
    blobs: BlobStore, folder: Path, damage: Callable[[bytes], bytes]
) -> None:
    blobs.put(DATA, "-")
    file_of(folder).write_bytes(damage(DATA))
    for use in (blobs.get, blobs.path):
        with pytest.raises(BlobCorrupt, match="not handed out"):
            use(DIGEST)
    blobs.put(DATA, "-")
    assert blobs.get(DIGEST) == DATA


@pytest.mark.parametrize("what", ["folder", "pipe", "loop"])
def test_what_is_no_file_is_missing_and_replaced_by_the_next_put(blobs: BlobStore, folder: Path, what: str) -> None:
    digest = blobs.put(b"kernel", "text/plain").digest
    file = folder / blob_path(digest)
    file.unlink()
    {"folder": file.mkdir, "pipe": partial(os.mkfifo, file), "loop": partial(file.symlink_to, file)}[what]()
    with pytest.raises(BlobMissing):
        blobs.get(digest)
    blobs.put(b"kernel", "text/plain")
    assert blobs.get(digest) == b"kernel"


def test_the_same_bytes_are_written_once(blobs: BlobStore, folder: Path) -> None:
    blobs.put(DATA, "-")
    before = file_of(folder).stat()
    blobs.put(DATA, "-")
    after = file_of(folder).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_file_and_folder_are_synced_before_the_row_is_committed(
    blobs: BlobStore, database: Database, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []
    real = os.fsync

    def note(descriptor: int) -> None:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        with database.read() as session:
            synced.append((path, session.get(BlobRow, DIGEST) is not None))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    blobs.put(DATA, "-")
    file, own = file_of(folder), file_of(folder).parent
    assert synced == [(str(path), False) for path in (own.parent, file, own)], "the folder was made, too"
    assert blobs.head(DIGEST) is not None


def test_each_opened_store_syncs_its_folders_before_their_first_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one may have made them, and not synced them yet."""
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    )
    blobs, shared = tmp_path / "blobs", tmp_path / "blobs" / "sha256" / "ab"
    for _ in range(2):
        objects = LocalObjects(blobs, "sha256")
        assert synced == [str(blobs), str(tmp_path)]
        for name in ("first", "second"):
            objects.put(f"sha256/ab/{name}", b"bytes")
        first, second = shared / "first", shared / "second"
        assert synced[2:] == [str(path) for path in (shared.parent, first, shared, second, shared)]
        synced.clear()


def test_a_sub_folder_that_was_removed_is_made_and_synced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, shared = LocalObjects(tmp_path / "blobs", "sha256"), tmp_path / "blobs" / "sha256"
    objects.put("sha256/ab/first", b"bytes")
    shutil.rmtree(shared / "ab")
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    )
    objects.put("sha256/ab/second", b"bytes")
    assert synced[0] == str(shared)
    assert objects.get("sha256/ab/second") == b"bytes"


def test_what_keeps_a_folder_from_being_written_is_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, shared = LocalObjects(tmp_path / "blobs", "sha256"), tmp_path / "blobs" / "sha256"
    (shared / "aa").write_text("no folder")
    (shared / "ab").symlink_to("nowhere")
    for name in ("aa", "ab"):
        with pytest.raises(OSError, match="no folder: move it away") as met:
            objects.put(f"sha256/{name}/first", b"bytes")
        assert is_of_the_machine(met.value)
    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", lambda *of: refused("No space left on device (os error 28)"))
        with pytest.raises(OSError, match="No space left on device") as met:
            objects.put("sha256/ac/first", b"bytes")
        assert is_of_the_machine(met.value)
    shared.rename(tmp_path / "away")
    for moved in (lambda: objects.put("sha256/ad/first", b"bytes"), lambda: objects.move("aside", "sha256/ad/first")):
        with pytest.raises(OSError, match="the folder of the blobs is gone") as met:
            moved()
        assert is_of_the_machine(met.value)
    assert not shared.exists()


def refused(words: str) -> None:
    raise GenericError(words)


def test_nothing_is_moved_where_there_is_nothing(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path / "blobs", "sha256")
    objects.move("sha256/ab/none", "quarantine/none")
    assert list(objects.list()) == []


def test_a_data_folder_that_is_moved_away_is_not_made_a_second_time(blobs: BlobStore, folder: Path) -> None:
    blobs.put(DATA, "text/plain")
    away = folder.parent.rename(folder.parent.with_name("away"))
    with pytest.raises(OSError, match="the folder of the blobs is gone") as met:
        blobs.put(b"other", "text/plain")
    assert is_of_the_machine(met.value), "workers pause"
    with pytest.raises(SettingsError, match="No such file or directory"):
        open_objects(folder.as_uri(), "sha256")
    assert not folder.parent.exists()
    away.rename(folder.parent)
    assert blobs.get(blobs.put(b"other", "text/plain").digest) == b"other"


class FailingObjects:
    """The object store, failing in the middle of a put."""

    def __init__(self, root: Path, fail: str) -> None:
        self._real = LocalObjects(root, "sha256")
        self._fail: str | None = fail

    def put(self, path: str, data: bytes) -> None:
        if self._fail == "before":
            raise OSError(28, "No space left on device")
        if self._fail == "half":
            staged = self._real.root / f"{path}#1"  # as obstore stages
            staged.parent.mkdir()
            staged.write_bytes(data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        self._real.put(path, data)
        if self._fail == "after":
            raise OSError(5, "Input/output error")

    def heal(self) -> None:
        self._fail = None

    def get(self, path: str) -> bytes | None:
        return self._real.get(path)

    def delete(self, path: str) -> None:
        self._real.delete(path)

    def delete_older(self, path: str, before: float) -> bool:
        return self._real.delete_older(path, before)

    def move(self, path: str, to: str) -> None:
        self._real.move(path, to)

    def list(self) -> Iterator[StoredObject]:
        return self._real.list()

    def local_path(self, path: str) -> Path | None:
        return self._real.local_path(path)


@pytest.mark.parametrize("fail", ["before", "half", "after"])
def test_a_put_that_fails_leaves_nothing_visible_and_the_next_one_works(
    database: Database, folder: Path, fail: str
) -> None:
    objects = FailingObjects(folder, fail)
    store = BlobStore(database, folder.as_uri(), objects)
    with pytest.raises(OSError, match=r"No space left|Input/output"):
        store.put(DATA, "-")
    assert store.head(DIGEST) is None
    with pytest.raises(BlobMissing):
        store.get(DIGEST)
    objects.heal()
    store.put(DATA, "-")
    assert store.get(DIGEST) == DATA


def test_staged_bytes_become_visible_with_the_callers_transaction(blobs: BlobStore, database: Database) -> None:
    blob = blobs.stage(DATA, "text/plain")
    assert blobs.head(DIGEST) is None
    with pytest.raises(RuntimeError, match="lost"), database.write() as session:
        add_blobs(session, [blob])
        raise RuntimeError("lost")
    assert blobs.head(DIGEST) is None
    with database.write() as session:
        add_blobs(session, [blob, blob])
    assert blobs.get(DIGEST) == DATA


def test_a_sweep_removes_old_leftovers_and_keeps_what_has_a_row_or_is_young(blobs: BlobStore, folder: Path) -> None:
    blobs.put(DATA, "-")
    lost = blobs.stage(b"bytes of a transaction that was lost", "-")
    young = blobs.stage(b"bytes of one that is under way", "-")
    half = file_of(folder).with_name(f"{DIGEST}#1")
    half.write_bytes(DATA[:10])
    for path in (file_of(folder), file_of(folder, lost.digest), half):
        make_old(path)
    swept = blobs.sweep(older_than_seconds=3600)
    assert (swept.files, swept.bytes) == (2, lost.size + 10)
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == sorted([DIGEST, young.digest])
    assert blobs.sweep(older_than_seconds=3600).files == 0


def test_a_sweep_spares_bytes_that_were_put_again_since_it_looked(database: Database, folder: Path) -> None:
    database.clock = Clock()
    objects = FailingObjects(folder, "never")
    store = BlobStore(database, folder.as_uri(), objects)
    store.stage(DATA, "-")
    make_old(file_of(folder))
    real_list = objects.list

    def list_then_put() -> Iterator[StoredObject]:
        yield from list(real_list())
        store.stage(DATA, "-")  # its row comes later

    objects.list = list_then_put  # type: ignore[method-assign]
    assert store.sweep(older_than_seconds=3600).files == 0
    assert file_of(folder).exists()


def test_a_remote_store_is_swept_too(database: Database, folder: Path) -> None:
    database.clock = Clock()
    objects = RemoteObjects(MemoryStore())
    store = BlobStore(database, folder.as_uri(), objects)
    store.put(DATA, "-")
    store.stage(b"lost", "-")
    assert store.sweep(older_than_seconds=3600).files == 0
    assert store.sweep(older_than_seconds=-60).files == 1
    assert store.get(DIGEST) == DATA
    objects.delete("sha256/no/such")  # deleting what is not there is no error
    assert not objects.delete_older("sha256/no/such", time.time() + 60)


def test_what_is_missing_is_seen_without_reading_it(database: Database, folder: Path, blobs: BlobStore) -> None:
    digests = [blobs.put(data, "-").digest for data in (b"stays", b"is deleted", b"is cut short")]
    staged = blobs.stage(b"has no row", "-").digest
    assert blobs.missing([*digests, staged, "0" * 64]) == {staged, "0" * 64}
    file_of(folder, digests[1]).unlink()
    file_of(folder, digests[2]).write_bytes(b"is cut")
    assert blobs.missing(iter(digests)) == set(digests[1:])
    assert blobs.missing([]) == set()
    # A remote store is taken at its row's word.
    remote = BlobStore(database, folder.as_uri(), RemoteObjects(MemoryStore()))
    assert remote.missing([*digests, staged]) == {staged}


PUT_FOREVER = """
import hashlib, itertools, os, sys
from storage.blobs.blob_store import BlobStore
from storage.database.session import Database
store = BlobStore(Database(sys.argv[1]), sys.argv[2])
for number in itertools.count():
    print(store.put(number.to_bytes(8, "big") * 40_000, "-").digest, flush=True)
"""


def test_kill_9_in_the_middle_of_puts_leaves_only_whole_blobs(
    database: Database, database_url: str, folder: Path
) -> None:
    database.clock = Clock()
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", PUT_FOREVER, database_url, folder.as_uri()],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert writer.stdout is not None
        acknowledged = [writer.stdout.readline().strip() for _ in range(6)]
        writer.send_signal(signal.SIGKILL)
        acknowledged += writer.stdout.read().split()
        writer.wait()
        writer.stdout.close()
        store = BlobStore(database, folder.as_uri())
        with database.read() as session:
            recorded = {row.digest for row in session.query(BlobRow)}
        assert set(acknowledged) <= recorded
        for digest in recorded:
            assert len(store.get(digest)) == 320_000
    store.sweep(older_than_seconds=-60)
    assert {path.name for path in folder.rglob("*") if path.is_file()} == recorded
