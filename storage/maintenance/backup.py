"""Backups of a running service, and a data folder out of one.

```
FOLDER/manifest.json       written last: which database file, which blobs; what it does not name is not part of it
       cukiln-<id>.db      SQLite's own online copy, in one step, which blocks no writer
       blobs/sha256/xx/…   by digest; what is there and whole is not copied again
```
Bytes that the service itself has lost or that are damaged are named as missing: after a restore they count as lost, and
the next job builds them anew. PostgreSQL is dumped by its own tools; of it only the blobs are copied here.
"""

import fcntl
import hashlib
import os
import re
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from storage.blobs.blob_store import PREFIX, BlobStore, blob_path
from storage.blobs.object_store import LocalObjects, sync
from storage.config.files import UMASK, close_tree
from storage.config.settings import RESTORING, Settings
from storage.database.session import Database
from storage.entities.keys import Key, all_keys
from storage.errors import BackupUnusable, BlobCorrupt, BlobMissing
from storage.maintenance.damage import repair

MANIFEST, LOCK = "manifest.json", "backup.lock"
DATABASE = "cukiln.db"
FORMAT = 1
_OURS = re.compile(r"cukiln-[0-9a-f]{32}\.db(-journal|-wal|-shm)?|" + re.escape(f"{MANIFEST}.partial"))
_OUR_BLOB = re.compile(PREFIX + r"/[0-9a-f]{2}/[0-9a-f]{64}(#[0-9]+)?")


class DatabaseFile(BaseModel):
    """The copy of the database in a backup's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    sha256: str
    bytes: int


class Manifest(BaseModel):
    """`database`: none of PostgreSQL; `blobs`: sizes by digest; `missing`: those that the service had lost."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    created_at: float
    database: DatabaseFile | None
    blobs: dict[str, int]
    missing: list[str]


@dataclass(frozen=True)
class BackedUp:
    """`copied`: blobs that were not in the folder yet."""

    manifest: Manifest
    copied: int


@dataclass(frozen=True)
class Restored:
    """`lost`: digests of blobs that the backup lacks, or that are damaged in it; what needed them is built anew.
    `keys`: those that are good now, also where they were revoked after the backup."""

    manifest: Manifest
    lost: list[str]
    keys: list[Key]


@contextmanager
def _private() -> Iterator[None]:
    """What is made meanwhile is closed to all other users."""
    before = os.umask(UMASK)
    try:
        yield
    finally:
        os.umask(before)


@_private()
def back_up(database: Database, blobs: BlobStore, folder: Path, *, blobs_only: bool = False) -> BackedUp:
    """Bring a folder's backup up to date; the old one holds until the new manifest is there. Raises BackupUnusable."""
    if not database.is_sqlite and not blobs_only:
        raise BackupUnusable(
            "the database is PostgreSQL: dump it with pg_dump, then back up the blobs with --blobs-only"
        )
    with _locked(folder):
        copy = _Copy(blobs, LocalObjects(folder / "blobs", PREFIX))
        # Before the database too: what is removed from the service while it is copied is there already.
        copy.take({blob.digest: blob.size for blob in blobs.all()})
        snapshot = None if blobs_only else _snapshot(database, folder)
        listed = _listed(folder / snapshot.file) if snapshot else dict(copy.held)
        copy.take(listed)
        held = {digest: size for digest, size in listed.items() if digest in copy.held}
        manifest = Manifest(
            created_at=database.clock.now(),
            database=snapshot,
            blobs=held,
            missing=sorted({*listed, *(() if snapshot else copy.missing)} - held.keys()),
        )
        _write(folder / MANIFEST, manifest.model_dump_json(indent=1).encode())
        _prune(folder, manifest)
    return BackedUp(manifest, copy.copied)


def read_manifest(folder: Path) -> Manifest:
    """Raises BackupUnusable."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise BackupUnusable(f"{folder} holds no whole backup: it has no {MANIFEST}, which is written last") from None
    except (OSError, ValidationError) as error:
        raise BackupUnusable(f"{folder / MANIFEST} cannot be used: {error}") from error
    if manifest.format != FORMAT:
        raise BackupUnusable(f"{folder} is of format {manifest.format}, this release reads {FORMAT}")
    return manifest


@_private()
def restore(folder: Path, settings: Settings) -> Restored:
    """Fill an empty data folder, every digest checked. An interrupted one begins again. Raises BackupUnusable."""
    manifest = read_manifest(folder)
    data = settings.data_dir
    elsewhere = {"CUKILN_BLOBS_URL": settings.blobs_url != (data / "blobs").as_uri()}
    if manifest.database is not None:
        elsewhere["DATABASE_URL"] = settings.database_url != f"sqlite:///{data / DATABASE}"
    if named := [name for name, is_elsewhere in elsewhere.items() if is_elsewhere]:
        raise BackupUnusable(f"a backup is restored into the data folder alone: unset {' and '.join(named)}")
    data.mkdir(parents=True, exist_ok=True)
    if others := sorted(entry.name for entry in data.iterdir() if entry.name != RESTORING):
        raise BackupUnusable(f"{data} is not empty (it has {others[0]}): restore into a folder that is empty or new")
    close_tree(data.resolve())
    staging = data / RESTORING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    digests, keys = {*manifest.blobs, *manifest.missing}, list[Key]()
    if manifest.database is not None:
        _restore_database(folder / manifest.database.file, manifest.database, staging / DATABASE)
        digests |= _listed(staging / DATABASE).keys()  # also where the manifest is damaged
    lost = _restore_blobs(folder, staging, digests)
    if manifest.database is not None:
        keys = _forget_lost(staging, lost)
    for name in ("blobs", *([DATABASE] if manifest.database else [])):  # the database last: with it, all is there
        (staging / name).rename(data / name)
        sync(data)
    shutil.rmtree(staging)
    sync(data)
    return Restored(manifest, lost, keys)


class _Copy:
    """Blobs on their way into a backup. `held`: sizes of those that are in it, whole."""

    def __init__(self, blobs: BlobStore, target: LocalObjects) -> None:
        self._blobs, self._target = blobs, target
        self.held: dict[str, int] = {}
        self.missing: set[str] = set()
        self.copied = 0

    def take(self, sizes: Mapping[str, int]) -> None:
        for digest in sizes.keys() - self.held.keys():
            data = self._target.get(blob_path(digest))
            if data is None or hashlib.sha256(data).hexdigest() != digest:
                try:
                    data = self._blobs.get(digest)
                except (BlobMissing, BlobCorrupt):
                    self.missing.add(digest)
                    continue
                self._target.put(blob_path(digest), data)
                self.copied += 1
            self.held[digest] = len(data)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One backup at a time, into a folder that is empty or holds one."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / LOCK).exists() and any(folder.iterdir()):
        raise BackupUnusable(f"{folder} is not empty and holds no backup: name a new folder, or that of a backup")
    close_tree(folder.resolve())
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BackupUnusable(f"another backup into {folder} is under way") from None
        yield


def _snapshot(database: Database, folder: Path) -> DatabaseFile:
    name = f"cukiln-{database.clock.new_id()}.db"
    path = folder / name
    with closing(sqlite3.connect(str(database.url.database))) as source, closing(sqlite3.connect(path)) as target:
        # All pages in one step: a write between two steps makes it begin again.
        source.backup(target, pages=-1)
        target.execute("PRAGMA journal_mode=DELETE")  # one file, without a log beside it
    sync(path)
    sync(folder)
    return DatabaseFile(file=name, sha256=_digest(path), bytes=path.stat().st_size)


def _listed(path: Path) -> dict[str, int]:
    """The blobs that a copy of the database names."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        return dict(connection.execute("SELECT digest, size FROM blobs"))


def _write(path: Path, data: bytes) -> None:
    """Durable and whole under its name, or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    sync(partial)
    partial.rename(path)
    sync(path.parent)


def _prune(folder: Path, manifest: Manifest) -> None:
    """What only earlier backups into the folder needed, or an interrupted one left; nothing that is not a backup's."""
    current = manifest.database.file if manifest.database else None
    for file in folder.iterdir():
        if _OURS.fullmatch(file.name) and file.name != current:
            file.unlink()
    for entry in LocalObjects(folder / "blobs", PREFIX).list():
        if _OUR_BLOB.fullmatch(entry.path) and entry.name not in manifest.blobs:
            (folder / "blobs" / entry.path).unlink()


def _restore_blobs(folder: Path, staging: Path, digests: Iterable[str]) -> list[str]:
    """Returns the digests of those that cannot be had."""
    target = LocalObjects(staging / "blobs", PREFIX)
    lost = []
    for digest in digests:
        file = folder / "blobs" / blob_path(digest)
        data = file.read_bytes() if file.is_file() else b""
        if hashlib.sha256(data).hexdigest() != digest:
            lost.append(digest)
        else:
            target.put(blob_path(digest), data)
    return sorted(lost)


def _restore_database(file: Path, expected: DatabaseFile, target: Path) -> None:
    try:
        shutil.copyfile(file, target)
    except OSError as error:
        raise BackupUnusable(f"{file} cannot be read: {error.strerror}") from error
    if (digest := _digest(target)) != expected.sha256:
        raise BackupUnusable(f"{file} is damaged: its digest is {digest}, not {expected.sha256}")
    sync(target)


def _forget_lost(staging: Path, lost: list[str]) -> list[Key]:
    """Returns the keys that are good."""
    database = Database(f"sqlite:///{staging / DATABASE}")
    database.migrate()  # it may be of an older release
    blobs = BlobStore(database, (staging / "blobs").absolute().as_uri())
    for digest in lost:
        repair(database, blobs, digest)
    with database.read() as session:
        keys = [key for key in all_keys(session) if key.revoked_at is None]
    database.dispose()
    for left in staging.glob(f"{DATABASE}?*"):  # locks and empty logs
        left.unlink()
    sync(staging / DATABASE)
    return keys


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
