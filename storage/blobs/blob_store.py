"""Blobs: bytes under their SHA-256. A row means that the bytes are durable; a digest is checked before every use.

Order of a put: bytes into the store (file and folder synced), then the row. So a crash leaves at most bytes without a
row, which no request finds and `sweep` removes. A removal is the reverse: the row goes first, in a transaction
that checks that nothing needs it and that nothing has put it lately (`storage.maintenance.retention`), then the bytes.
"""

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import select, update

from storage.blobs.object_store import RemoteObjects, StoredObject, answered, open_objects
from storage.database.pages import pages
from storage.database.session import Database, Session
from storage.database.sql import chunks, core, insert_new, rows_among
from storage.database.tables import BlobRow
from storage.errors import BlobCorrupt, BlobMissing

PREFIX = "sha256"
ASIDE = "quarantine"
"""Where damaged bytes are kept, beside PREFIX, for ASIDE_SECONDS; the names end with the time."""
ASIDE_SECONDS = 30 * 86_400.0
SWEEP_AGE = 3600.0
"""Younger bytes may belong to a put whose row is not committed yet, a younger row to one that needs it next."""
SWEPT_AT_ONCE = 50
"""Files of one transaction."""
LISTED_AT_ONCE = 500


@dataclass(frozen=True)
class Blob:
    digest: str
    size: int
    media_type: str
    created_at: float


@dataclass(frozen=True)
class Swept:
    """What a sweep removed."""

    files: int
    bytes: int


class BlobStore:
    """Content-addressed bytes in the store behind `url`, with their rows in `database`."""

    def __init__(self, database: Database, url: str, objects: RemoteObjects | None = None) -> None:
        self._database = database
        self._objects = objects if objects is not None else open_objects(url, PREFIX)

    def require(self) -> None:
        """Raises SettingsError where a remote store does not answer."""
        self._objects.require()

    def put(self, data: bytes, media_type: str) -> Blob:
        """Keep the bytes; durable, row included, when it returns."""
        return self.put_many([(data, media_type)])[0]

    def put_many(self, contents: Sequence[tuple[bytes, str]]) -> list[Blob]:
        """Keep several, with one transaction for their rows."""
        blobs = self._stage(contents)
        with self._database.write() as session:
            add_blobs(session, blobs)
        return blobs

    def stage(self, data: bytes, media_type: str) -> Blob:
        """Make the bytes durable; a transaction that refers to them commits the row with `add_blobs`."""
        return self._stage([(data, media_type)])[0]

    def _stage(self, contents: Sequence[tuple[bytes, str]]) -> list[Blob]:
        now = self._database.clock.now()
        blobs = [Blob(hashlib.sha256(data).hexdigest(), len(data), kind, now) for data, kind in contents]
        renewed = self._renew([blob.digest for blob in blobs])
        for blob, (data, _) in zip(blobs, contents, strict=True):
            path = blob_path(blob.digest)
            # Read, not only looked up: bytes that were damaged since are replaced by good ones here. A file without a
            # row is written again: the crash that lost the row may have come before the sync, and it is young then.
            if blob.digest not in renewed or self._objects.get(path) != data:
                self._objects.put(path, data)
        return blobs

    def _renew(self, digests: Sequence[str]) -> set[str]:
        """Those that have a row; it is young from now on, so that it is not removed before it is needed again."""
        with self._database.read() as session:
            if session.scalar(select(BlobRow.digest).where(BlobRow.digest.in_(digests)).limit(1)) is None:
                return set()
        with self._database.write() as session:
            table = core(BlobRow)
            renewed = update(table).where(table.c.digest.in_(digests)).values(created_at=self._database.clock.now())
            return set(session.scalars(renewed.returning(table.c.digest)))

    def get(self, digest: str) -> bytes:
        """The bytes, checked against their digest. Raises `BlobMissing`, `BlobCorrupt`, `BlobsAway`."""
        if self.head(digest) is None:
            raise BlobMissing(digest)
        data = self._objects.get(blob_path(digest))
        if data is None:
            raise BlobMissing(digest)
        actual = hashlib.sha256(data).hexdigest()
        if actual != digest:
            raise BlobCorrupt(digest, actual)
        return data

    def head(self, digest: str) -> Blob | None:
        """The blob's row, without reading its bytes."""
        with self._database.read() as session:
            row = session.execute(select(core(BlobRow)).where(BlobRow.digest == digest)).mappings().one_or_none()
        return Blob(**row) if row else None

    def all(self) -> Iterator[Blob]:
        """All, by digest, as they are when their turn comes."""
        table = core(BlobRow)
        for page in pages(self._database, select(table), [table.c.digest], LISTED_AT_ONCE):
            yield from (Blob(**row._mapping) for row in page)

    def missing(self, digests: Iterable[str]) -> set[str]:
        """Those that have no row, or whose local file is gone or has another size. A remote store is not asked."""
        distinct = set(digests)
        with self._database.read() as session:
            rows = rows_among(session, select(BlobRow.digest, BlobRow.size), BlobRow.digest, distinct)
        return distinct - {digest for digest, size in rows if self._may_hold(digest, size)}

    def _may_hold(self, digest: str, size: int) -> bool:
        local = self._objects.local_path(blob_path(digest))
        with answered(local, may_be_missing=True):
            return local is None or (local.is_file() and local.stat().st_size == size)
        return False

    def path(self, digest: str) -> Path | None:
        """The file of a blob, checked just now; None where blobs are not local files. Raises as `get` does."""
        local = self._objects.local_path(blob_path(digest))
        if local is not None:
            self.get(digest)
        return local

    def try_out(self) -> None:
        """Keep some bytes and delete them. Raises what the store raises where it is away, full or read-only."""
        data = secrets.token_bytes(1 << 16)  # no other process stores these
        path = blob_path(hashlib.sha256(data).hexdigest())
        self._objects.put(path, data)
        self._objects.delete(path)

    def sweep(self, older_than_seconds: float = SWEEP_AGE) -> Swept:
        """Remove what no row names and is older than this, and what was set aside long ago."""
        now = self._database.clock.now()
        before = now - older_than_seconds
        old: list[StoredObject] = []
        aside: list[StoredObject] = []
        for entry in self._objects.list():
            if entry.path.startswith(f"{ASIDE}/") and float(entry.name.rpartition(".")[2]) < now - ASIDE_SECONDS:
                aside.append(entry)
            elif entry.path.startswith(PREFIX) and entry.modified_at < before:
                old.append(entry)
        for entry in aside:
            self._objects.delete(entry.path)
        files, size = len(aside), sum(entry.size for entry in aside)
        for some in chunks(self._unknown(old), SWEPT_AT_ONCE):
            # Inside a write transaction, so that no row can appear between the look and the deletion; and the age is
            # read again, because a put may have written the same bytes anew since the listing.
            with self._database.write() as session:
                recorded = _recorded(session, [entry.name for entry in some])
                deleted = [e for e in some if e.name not in recorded and self._objects.delete_older(e.path, before)]
            files, size = files + len(deleted), size + sum(entry.size for entry in deleted)
            self._database.pause()
        return Swept(files, size)

    def set_aside(self, digest: str) -> bool:
        """Move damaged bytes to where nothing reads them. False where they are good: they were put again since."""
        path, aside = blob_path(digest), f"{ASIDE}/{digest}.{self._database.clock.now():.0f}"
        self._objects.move(path, aside)
        data = self._objects.get(aside)
        if data is None or hashlib.sha256(data).hexdigest() != digest:
            return True
        self._objects.move(aside, path)
        return False

    def _unknown(self, entries: Sequence[StoredObject]) -> list[StoredObject]:
        """Those without a row, asked for in bulk: almost everything that is old has one."""
        with self._database.read() as session:
            recorded = _recorded(session, [entry.name for entry in entries])
        return [entry for entry in entries if entry.name not in recorded]


def add_blobs(session: Session, blobs: Iterable[Blob]) -> None:
    """Commit the rows of staged blobs with the caller's transaction."""
    insert_new(session, BlobRow, [asdict(blob) for blob in blobs])


def require_blobs(session: Session, digests: Iterable[str]) -> None:
    """What this transaction commits needs these. Raises `BlobMissing` for one that has no row."""
    needed = set(digests)
    for digest in needed - _recorded(session, needed):
        raise BlobMissing(digest)


def _recorded(session: Session, digests: Iterable[str]) -> set[str]:
    """Those that have a row."""
    return {digest for (digest,) in rows_among(session, select(BlobRow.digest), BlobRow.digest, digests)}


def blob_path(digest: str) -> str:
    """Of its bytes in the store."""
    return f"{PREFIX}/{digest[:2]}/{digest}"
