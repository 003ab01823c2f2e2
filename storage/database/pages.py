"""Pages of lists, their opaque cursors (where the page before ended), and ids by their first digits."""

import base64
import binascii
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from sqlalchemy import ColumnElement, Row, RowMapping, Select, Text, cast, literal, select, tuple_

from storage.database.session import Database, Session
from storage.database.tables import BuildRow, CandidateRow, JobProblemRow, JobRow, WinnerRow
from storage.errors import BadCursor

LARGEST_POSITION = 2**31 - 1
_ID = re.compile(r"[0-9a-f]{1,64}")


def make_cursor(*parts: str | int | float) -> str:
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


def read_cursor(cursor: str, types: Sequence[type]) -> list[Any]:
    """The parts that `make_cursor` was given, if they fit a database's columns. Raises `BadCursor`."""
    try:
        parts = json.loads(base64.urlsafe_b64decode(cursor.encode() + b"=" * (-len(cursor) % 4)))
    except (ValueError, binascii.Error, RecursionError) as error:
        raise BadCursor(cursor) from error
    if not isinstance(parts, list) or [type(part) for part in parts] != list(types) or not all(map(_fits, parts)):
        raise BadCursor(cursor)
    return parts


def read_page(
    session: Session,
    query: Any,
    key: tuple[ColumnElement[Any], ColumnElement[Any]],
    types: tuple[type, type],
    limit: int,
    cursor: str | None,
    *,
    descending: bool = False,
) -> tuple[Sequence[RowMapping], str | None]:
    """The next rows of a query in the unique order of `key`, and the cursor of the page after. Raises `BadCursor`."""
    if cursor is not None:
        after = tuple_(*(literal(part) for part in read_cursor(cursor, types)))
        query = query.where(tuple_(*key) < after if descending else tuple_(*key) > after)
    ordered = query.order_by(*(column.desc() if descending else column for column in key))
    rows = session.execute(ordered.limit(limit + 1)).mappings().all()
    shown = rows[:limit]
    more = len(rows) > limit
    return shown, make_cursor(*(shown[-1][str(column.key)] for column in key)) if more else None


def pages(
    database: Database, query: Select[Any], key: Sequence[ColumnElement[Any]], size: int
) -> Iterator[Sequence[Row[Any]]]:
    """All rows of a query in the unique order of `key`, so many at a time, as they are when their turn comes."""
    after: ColumnElement[bool] = literal(True)
    while True:
        with database.read() as session:
            rows = session.execute(query.where(after).order_by(*key).limit(size)).all()
        if not rows:
            return
        yield rows
        after = tuple_(*key) > tuple_(*(literal(rows[-1]._mapping[column]) for column in key))


def _fits(part: str | int | float) -> bool:
    if isinstance(part, str):
        return _ID.fullmatch(part) is not None
    return math.isfinite(part) if isinstance(part, float) else 0 <= part <= LARGEST_POSITION


MOST_NAMED = 10
"""Of the ids that a short prefix could mean."""
IDS = {"build": BuildRow.id, "candidate": CandidateRow.candidate, "job": JobRow.id, "kernel": WinnerRow.key}

Named = Literal["build", "candidate", "job", "kernel"]


def ids_beginning(session: Session, kind: Named, prefix: str, job: str | None = None) -> list[str]:
    """Ids that begin so, in order, MOST_NAMED at most: of records those that answer, of candidates those of the job."""
    id = IDS[kind]
    # A range, and not LIKE, which no index of SQLite's answers; "g" comes after every hexadecimal digit.
    query = select(id).distinct().where(id >= prefix, id < prefix + "g").order_by(id).limit(MOST_NAMED)
    if kind == "kernel":
        query = query.where(cast(WinnerRow.record, Text) != "{}")
    if job is not None:
        problems = select(JobProblemRow.id).where(JobProblemRow.job_id == job)
        query = query.where(CandidateRow.job_problem_id.in_(problems))
    return list(session.scalars(query))
