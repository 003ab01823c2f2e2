"""What a database error means to callers that import no database library: try again later, or make room.

Sources of the codes: https://www.sqlite.org/rescode.html; PostgreSQL's manual, appendix A (classes 08, 40, 53, 55, 57).
"""

import errno
import sqlite3
from enum import Enum

from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from storage.errors import StorageError


class Failure(Enum):
    """FULL: the disk has no room. UNAVAILABLE: locked, away, or too busy for now."""

    FULL = "full"
    UNAVAILABLE = "unavailable"


DATABASE_ERRORS: tuple[type[Exception], ...] = (DBAPIError, PoolTimeout)
"""What a transaction may raise beside StorageError."""
WrittenMeanwhile = IntegrityError
"""Raised where another process has written a row with the same key since a transaction looked for it."""
DATABASE_AWAY: tuple[type[Exception], ...] = (*DATABASE_ERRORS, StorageError, OSError)
"""Raised in a worker where the database or its disk is away: it tries again, or gives its leases up."""

_SQLITE_UNAVAILABLE = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_CORRUPT,
}
_POSTGRES_FULL = {"53100"}  # disk_full
_POSTGRES_UNAVAILABLE = ("08", "40", "53", "55", "57")


def failure_of(error: BaseException) -> Failure | None:
    """Which of the two `error` is; None for anything else, which is a defect and not a state of the machine."""
    if isinstance(error, PoolTimeout):
        return Failure.UNAVAILABLE
    if isinstance(error, OSError):
        return Failure.FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
    if not isinstance(error, DBAPIError):
        return None
    original = error.orig
    if isinstance(original, sqlite3.Error):
        return _sqlite_failure(original)
    state = getattr(original, "sqlstate", None)
    if state in _POSTGRES_FULL:
        return Failure.FULL
    if error.connection_invalidated or (state is None and type(original).__name__ == "OperationalError"):
        return Failure.UNAVAILABLE  # psycopg reports a refused connection without a code
    return Failure.UNAVAILABLE if state is not None and state[:2] in _POSTGRES_UNAVAILABLE else None


def _sqlite_failure(error: sqlite3.Error) -> Failure | None:
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return None
    primary = code & 0xFF  # extended codes keep the primary one in their low byte
    if primary == sqlite3.SQLITE_FULL:
        return Failure.FULL
    return Failure.UNAVAILABLE if primary in _SQLITE_UNAVAILABLE else None
