"""The few statements that several modules share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import sqlalchemy
from sqlalchemy import Insert, Table, and_, func, tuple_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.elements import ColumnElement

from storage.database import Session
from storage.tables import Base

IDS_CHUNK = 10_000
"""Ids per `IN (…)`, one parameter each: SQLite allows 32,766, PostgreSQL 65,535."""

T = TypeVar("T")


def chunks(values: Iterable[T], size: int = IDS_CHUNK) -> Iterator[list[T]]:
    """Lists of at most `size`."""
    kept = list(values)
    for start in range(0, len(kept), size):
        yield kept[start : start + size]


def is_postgres(session: Session) -> bool:
    return session.get_bind().dialect.name == "postgresql"


def insert_new(session: Session, table: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert the rows whose unique keys are not taken yet."""
    if not rows:
        return
    statement: Insert
    if is_postgres(session):
        statement = postgresql.insert(core(table)).on_conflict_do_nothing()
    else:
        statement = sqlite.insert(core(table)).on_conflict_do_nothing()
    session.execute(statement, [dict(row) for row in rows])


def one_of(key: Sequence[ColumnElement[Any]], rows: Sequence[Sequence[Any]]) -> ColumnElement[bool]:
    """Of a row: its key, of one column or several, is one of these. SQLite looks at every row of a table for tuples
    alone, and by an index for their parts."""
    parts = [column.in_({row[place] for row in rows}) for place, column in enumerate(key)]
    return and_(*parts, tuple_(*key).in_([tuple(row) for row in rows])) if len(key) > 1 else and_(*parts)


def core(table: type[Base]) -> Table:
    """The table itself: its statements skip the ORM's bookkeeping, which thousands of rows would feel."""
    return cast(Table, table.__table__)


def day_of(session: Session, column: ColumnElement[float]) -> ColumnElement[int]:
    """Days since the epoch (UTC) of a column in seconds."""
    return whole(session, column / 86_400.0)


def whole(session: Session, number: ColumnElement[float]) -> ColumnElement[int]:
    """The integer part; a cast rounds on PostgreSQL and truncates on SQLite."""
    return sqlalchemy.cast(func.floor(number) if is_postgres(session) else number, sqlalchemy.Integer)
