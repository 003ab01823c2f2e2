"""The database: SQLite in WAL mode by default, PostgreSQL where the URL says so.

Writers are serialised on both: SQLite has one writer anyway, and on PostgreSQL every write transaction takes one
advisory lock first. So a rule such as "the last candidate with a verdict adds the finish task" needs one argument, not
one per isolation level. The work of this service is compiling; its rows are few.

Alembic takes 0.2 s to import, so only an upgrade of the schema does.
"""

import fcntl
import functools
import json
import logging
import os
import re
import sqlite3
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    Column,
    Connection,
    Engine,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    create_engine,
    event,
    insert,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.pool import Pool

from storage.config.files import close
from storage.database.tables import Base
from storage.errors import DatabaseUnusable, SchemaMissing

__all__ = ["Clock", "Database", "Session", "clock_of"]

BUSY_SECONDS = 60.0
"""Transactions take milliseconds: only a stuck machine needs more."""
PAUSE_SECONDS = 0.02
LONG_SECONDS = 0.25
WRITE_LOCK = 0x63756B696C6E
MIGRATE_LOCK = WRITE_LOCK + 1

# Lookups send records as they are stored.
_as_json = functools.partial(json.dumps, separators=(",", ":"))

log = logging.getLogger("cukiln.database")

_abandoned: list[Pool] = []


class Clock:
    """The machine's clock and randomness: the one interface for both, which tests replace."""

    def now(self) -> float:
        """Seconds since the epoch, UTC."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds since some moment, of this process alone: never set back or forward."""
        return time.monotonic()

    def new_id(self) -> str:
        """32 hexadecimal digits that nothing else has: job ids, group ids, attempt tokens."""
        return uuid.uuid4().hex


class Database:
    """Sessions on one database. Safe to keep across `fork`: a child opens its own connections."""

    def __init__(self, url: str, clock: Clock | None = None, busy_seconds: float = BUSY_SECONDS) -> None:
        """`busy_seconds`: how long a writer of SQLite waits for the one before it."""
        self.url = make_url(re.sub("^postgres(ql)?://", "postgresql+psycopg://", url))
        self.clock = clock or Clock()
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        path = str(self.url.database)
        self.engine = _sqlite_engine(path, busy_seconds) if self.is_sqlite else _postgres_engine(self.url)
        self._writer = self.engine.execution_options(cukiln_write=True)
        self._reader = (
            self.engine if self.is_sqlite else self.engine.execution_options(isolation_level="REPEATABLE READ")
        )
        _abandon_after_fork(self.engine)

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A write transaction: committed at the end, rolled back by any exception. There is one: keep it short."""
        with Session(self._writer, expire_on_commit=False, info={"clock": self.clock}) as session:
            with session.begin():
                session.connection()  # waits for the lock
                since = time.monotonic()
                yield session
            if (held := time.monotonic() - since) > LONG_SECONDS:
                log.info("a write transaction held the lock for %.0f ms", 1e3 * held)

    def in_parts(self, find_next: Callable[[Session], Callable[[Session], object] | None]) -> None:
        """All that `find_next` finds, each part in a write transaction of its own, until it finds nothing."""
        while True:
            with self.read() as session:
                part = find_next(session)
            if part is None:
                return
            with self.write() as session:
                part(session)
            self.pause()

    def pause(self) -> None:
        """Between two write transactions: SQLite keeps no queue, and a writer that begins at once delays others."""
        time.sleep(PAUSE_SECONDS)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """One unchanging snapshot; what is written here is thrown away."""
        with Session(self._reader, expire_on_commit=False, info={"clock": self.clock}) as session:
            yield session

    def migrate(self) -> None:
        """Bring the schema up to date, also from several processes at once. Raises DatabaseUnusable."""
        try:
            self._migrate()
        except (SQLAlchemyError, sqlite3.Error, OtherRelease, OSError) as error:
            raise self._unusable(error) from error

    def _migrate(self) -> None:
        if self.is_sqlite:
            path = Path(str(self.url.database))
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.with_name(path.name + ".migrate.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                path.touch(mode=0o600)
                for ending in ("", "-wal", "-shm", ".migrate.lock"):
                    close(path.with_name(path.name + ending))
                # The file keeps the mode. Set under the lock: a change of mode does not wait for others, it fails.
                with closing(sqlite3.connect(path)) as connection:
                    connection.execute("PRAGMA journal_mode=WAL")
                with self.engine.connect() as migrating:
                    upgrade(migrating)
        else:
            with self.engine.connect() as migrating:
                migrating.execute(text("SELECT pg_advisory_lock(:key)"), {"key": MIGRATE_LOCK})
                migrating.commit()
                try:
                    upgrade(migrating)
                finally:
                    migrating.rollback()
                    migrating.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": MIGRATE_LOCK})
                    migrating.commit()

    def _unusable(self, error: Exception) -> DatabaseUnusable:
        """For the operator: where, why, and what to do, without the password."""
        # A query may name a password too.
        where = str(self.url.database) if self.is_sqlite else self.url.set(query={}).render_as_string()
        reason = str(error.orig if isinstance(error, DBAPIError) else error).strip() or type(error).__name__
        other = "set CUKILN_DATA or DATABASE_URL to another" if self.is_sqlite else "set DATABASE_URL to another"
        if isinstance(error, OtherRelease):
            advice = f"another release of cukiln made its schema; run that release, or {other}"
        elif self.is_sqlite:
            advice = f"make it a file that can be read and written, restore it from a backup, or {other}"
        else:
            advice = "start the server, or correct DATABASE_URL"
        return DatabaseUnusable(where, reason.splitlines()[0].rstrip(".:"), advice)

    def check(self) -> None:
        """Answer a query; `SchemaMissing` unless the schema is the one this code was written for."""
        with self.engine.connect() as connection:
            present = revision(connection)
        if present != HEAD:
            raise SchemaMissing(present, HEAD)

    def dispose(self) -> None:
        """Close the connections; the next transaction opens new ones."""
        self.engine.dispose()


def clock_of(session: Session) -> Clock:
    """The clock of the session's database."""
    clock: Clock = session.info["clock"]
    return clock


def _sqlite_engine(path: str, busy_seconds: float) -> Engine:
    # Not a URL text: a folder's name may hold what a URL reads otherwise.
    engine = create_engine(
        URL.create("sqlite", database=path), connect_args={"timeout": busy_seconds}, json_serializer=_as_json
    )

    @event.listens_for(engine, "connect")
    def _configure(connection: sqlite3.Connection, _record: Any) -> None:
        # Python's own BEGIN is deferred: a transaction that reads first and then writes would fail with SQLITE_BUSY
        # at once, whatever the timeout. So Python begins nothing here, and _begin below names the kind.
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA synchronous=FULL")  # in WAL mode NORMAL may lose acknowledged commits at power loss
        connection.execute("PRAGMA temp_store=MEMORY")  # a full folder of temporary files stops compilers, not commits

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        write = connection.get_execution_options().get("cukiln_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def _postgres_engine(url: Any) -> Engine:
    engine = create_engine(url, pool_pre_ping=True, json_serializer=_as_json)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if connection.get_execution_options().get("cukiln_write", False):
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITE_LOCK})")

    return engine


def _abandon_after_fork(engine: Engine) -> None:
    """In a child, forget the parent's connections without closing them.

    Closing would end the session on a socket that the parent still uses (PostgreSQL), and SQLite forbids even `close`
    on a connection carried over a fork (https://www.sqlite.org/howtocorrupt.html, 2.6).
    """
    alive = weakref.ref(engine)

    def abandon() -> None:
        live = alive()
        if live is not None:
            _abandoned.append(live.pool)
            live.dispose(close=False)

    os.register_at_fork(after_in_child=abandon)


MIGRATIONS = Path(__file__).parents[1] / "migrations"
HEAD = "0018"
"""The last of `storage/migrations/versions`."""

# As Alembic makes it.
_VERSION = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)


class OtherRelease(Exception):
    """The database has a revision that this release does not have."""


def revision(connection: Connection) -> str | None:
    """Of the database's schema; None where it has none."""
    if not connection.dialect.has_table(connection, _VERSION.name):
        return None
    return connection.scalar(select(_VERSION.c.version_num))


def upgrade(connection: Connection) -> None:
    """Bring the schema to `HEAD`. Raises OtherRelease."""
    present = revision(connection)
    if present is None:
        Base.metadata.create_all(connection, checkfirst=False)
        _VERSION.create(connection, checkfirst=True)
        connection.execute(insert(_VERSION).values(version_num=HEAD))
    elif present != HEAD:
        _migrate(connection)
    connection.commit()


def _migrate(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise OtherRelease(str(error)) from error
