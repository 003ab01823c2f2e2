"""Statements that several modules share."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import sqlalchemy
from sqlalchemy import ColumnElement, Insert, Table, and_, bindparam, delete, func, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite

from storage.database.session import Session
from storage.database.tables import Base, JobProblemRow

IDS_CHUNK = 10_000
"""Ids per `IN (…)`, one parameter each: SQLite allows 32,766, PostgreSQL 65,535."""

T = TypeVar("T")


def chunks(values: Iterable[T], size: int = IDS_CHUNK) -> Iterator[list[T]]:
    """Lists of at most `size`."""
    rest = list(values)
    for start in range(0, len(rest), size):
        yield rest[start : start + size]


def rows_among(session: Session, query: Any, column: Any, values: Iterable[Any]) -> list[Any]:
    """The rows of a query whose column has one of these values, however many: a statement for each chunk of them."""
    return [row for some in chunks(set(values)) for row in session.execute(query.where(column.in_(some)))]


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
    """Whether a row's key is one of these. SQLite uses an index for the parts of a tuple alone, not for tuples."""
    parts = [column.in_({row[place] for row in rows}) for place, column in enumerate(key)]
    return and_(*parts, tuple_(*key).in_([tuple(row) for row in rows])) if len(key) > 1 else and_(*parts)


def change(session: Session, table: type[Base] | Table, *which: ColumnElement[bool], **values: Any) -> None:
    """Update the rows that are such."""
    session.execute(update(core(table)).where(*which).values(**values))


def change_each(
    session: Session, table: type[Base], rows: Sequence[Mapping[str, Any]], *which: ColumnElement[bool]
) -> None:
    """Update each row by its primary key, all in the same columns. One that is gone, or is not such, is left out."""
    if not rows:
        return
    key = core(table).primary_key.columns
    statement = update(core(table)).where(*which, *(column == bindparam(f"key_{column.name}") for column in key))
    values = [{f"key_{name}" if name in key else name: value for name, value in row.items()} for row in rows]
    session.execute(statement, values)


def remove(session: Session, table: type[Base] | Table, *which: ColumnElement[bool]) -> int:
    """Delete the rows that are such; how many there were."""
    return int(session.execute(delete(core(table)).where(*which)).rowcount)  # type: ignore[attr-defined]


def core(table: type[Base] | Table) -> Table:
    """The table itself: its statements skip the ORM's bookkeeping, which thousands of rows would feel."""
    return table if isinstance(table, Table) else cast(Table, table.__table__)


def whole(session: Session, number: ColumnElement[float]) -> ColumnElement[int]:
    """The integer part; a cast rounds on PostgreSQL and truncates on SQLite."""
    return sqlalchemy.cast(func.floor(number) if is_postgres(session) else number, sqlalchemy.Integer)


PREDICTED = "predicted:"


def is_predicted(device_class: str) -> bool:
    """Whether candidates of this class are verified on the CPU and never measured."""
    return device_class.startswith(PREDICTED)


def asks_predicted() -> ColumnElement[bool]:
    """The same of a problem's row. For those on a GPU: `~asks_predicted()`."""
    return JobProblemRow.device_class.startswith(PREDICTED, autoescape=True)
