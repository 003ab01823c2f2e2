"""Blobs that are damaged or gone: found by reading all, and removed with whatever answered with them (kernels in winner
records, libraries, the files of a group's report), so that the next job builds them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import or_, select

from storage.blobs.blob_store import Blob, BlobStore
from storage.database.session import Database, Session
from storage.database.sql import change, core, remove
from storage.database.tables import BlobRow, BuildRow, GroupRow, LibraryRow
from storage.entities.groups import FILES_OF_GROUPS
from storage.entities.libraries import FILES_OF_LIBRARIES
from storage.entities.record_parts import withdraw_files
from storage.entities.winners import used_by
from storage.errors import BlobCorrupt, BlobMissing
from storage.transitions.measure import forget_group_library

MOST_NAMED = 20
"""Builds, and groups, that are listed as users of one blob."""


@dataclass(frozen=True)
class Damage:
    """A blob that cannot be served, why, and what needs it: keys of winner records, ids of builds and of groups."""

    blob: Blob
    why: str
    winners: tuple[str, ...] = ()
    builds: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()


def check_blobs(database: Database, blobs: BlobStore) -> Iterator[tuple[Blob, Damage | None]]:
    """Read every blob; None: its bytes have their digest. One that is removed meanwhile is left out."""
    for blob in blobs.all():
        why = why_damaged(blobs, blob.digest)
        if why is None:
            yield blob, None
        elif blobs.head(blob.digest) is not None:
            yield blob, _needed_by(database, blob, why)


def why_damaged(blobs: BlobStore, digest: str) -> str | None:
    """None where the bytes are there and have their digest. Raises what the store raises where it is away."""
    try:
        blobs.get(digest)
    except BlobMissing:
        return "its bytes are gone"
    except BlobCorrupt as error:
        return f"its bytes have the digest {error.found}"
    return None


def _needed_by(database: Database, blob: Blob, why: str) -> Damage:
    build, group = core(BuildRow), core(GroupRow)
    named = or_(*(group.c[name] == blob.digest for name in FILES_OF_GROUPS))
    with database.read() as session:
        return Damage(
            blob,
            why,
            winners=tuple(used_by(session, [blob.digest]).get(blob.digest, ())),
            builds=_ids(session, select(build.c.id).where(build.c.library == blob.digest)),
            groups=_ids(session, select(group.c.id).where(named)),
        )


def _ids(session: Session, query: Any) -> tuple[str, ...]:
    return tuple(session.scalars(query.limit(MOST_NAMED)))


def repair(database: Database, blobs: BlobStore, digest: str) -> list[str] | None:
    """Remove a blob that, read once more, cannot be served. Returns the keys of its records; None: it can."""
    if blobs.head(digest) is None or why_damaged(blobs, digest) is None:
        return None
    if not blobs.set_aside(digest):
        return None
    with database.write() as session:
        remove(session, BlobRow, BlobRow.digest == digest)
        keys = withdraw_files(session, [digest])
        library, group = core(LibraryRow).c, core(GroupRow).c
        remove(session, LibraryRow, or_(*(library[name] == digest for name in FILES_OF_LIBRARIES)))
        for name in FILES_OF_GROUPS:
            change(session, GroupRow, group[name] == digest, **{name: None})
    more = True
    while more:
        database.pause()
        with database.write() as session:
            _, more = forget_group_library(session, digest)
    return keys
