"""Winner records: read by key, published with the token of the attempt as the next revision.

Of a record whose last kernel was withdrawn the row stays, with an empty `record`: revisions only ever grow, so a cache
never takes a later record for the one in memory. `winner_uses` holds, with each change of a record, the digests of the
files and of the code in its front.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, Text, bindparam, cast, func, insert, select
from sqlalchemy.dialects.postgresql import JSONB

from codegen.identity import CUDA, problem_digest, under_cuda
from codegen.kernel import Candidate
from codegen.neighbours import Place, stored_place
from codegen.operators import operator
from cukiln.types import Launch, LaunchFunction, LaunchTransform, Operand, WinnerRecord
from storage.database.session import Session, clock_of
from storage.database.sql import change, core, insert_new, is_postgres, is_predicted, remove, rows_among
from storage.database.tables import WinnerRow, WinnerUseRow

UNSETTLED = {"revision", "updated_at"}
"""Fields of a record that publishing sets: records that differ only here say the same."""
RUN = ("so_sha256", "cubin_sha256")
"""The files of an entry without which its kernel cannot be run; the others describe it."""
FILES = (*RUN, "source_sha256", "ptx_sha256", "sass_sha256")


Stamp = tuple[int, str]
"""Revision and attempt: what differs between any two states of a record, also where a backup was restored."""


@dataclass(frozen=True)
class Elsewhere:
    """A problem (by digest, `under_cuda`) on a target, to be found on the first device class, by name, that comes after
    `after`."""

    problem: str
    target: str
    after: str = ""


def get_winners(session: Session, keys: Iterable[str]) -> dict[str, WinnerRecord]:
    """The records there are, by key."""
    rows = rows_among(session, select(WinnerRow.key, WinnerRow.record), WinnerRow.key, keys)
    return {key: WinnerRecord.model_validate(record) for key, record in rows if record}


def usable(
    front: Iterable[dict[str, Any]], workspace_limit_bytes: int | None, deterministic: bool
) -> list[dict[str, Any]]:
    """The entries of a front as JSON that a policy allows, as `WinnerRecord.usable` has them of a record."""
    return [
        entry
        for entry in front
        if (workspace_limit_bytes is None or entry["workspace_bytes"] <= workspace_limit_bytes)
        and (entry["deterministic"] or not deterministic)
    ]


def stored_winners(session: Session, keys: Iterable[str]) -> dict[str, tuple[Stamp, bytes]]:
    """The records there are, by key, as JSON that is not parsed: a lookup sends most of them as they are."""
    rows = session.execute(_of_keys(is_postgres(session), with_record=True), {"keys": json.dumps(list(keys))}).all()
    return {key: ((revision, attempt), text.encode()) for key, revision, attempt, text in rows if text != "{}"}


def winner_stamps(session: Session, keys: Iterable[str]) -> dict[str, Stamp]:
    """By key, for what keeps records in memory; also of a record that was withdrawn."""
    rows = session.execute(_of_keys(is_postgres(session), with_record=False), {"keys": json.dumps(list(keys))}).all()
    return {key: (revision, attempt) for key, revision, attempt in rows}


@cache
def _of_keys(on_postgres: bool, *, with_record: bool) -> Select[Any]:
    """One parameter: to spell out a list of them costs SQLAlchemy more than the database's whole answer."""
    given, row = bindparam("keys", type_=Text), core(WinnerRow).c
    each = func.jsonb_array_elements_text(cast(given, JSONB)) if on_postgres else func.json_each(given)
    columns = [row.key, row.revision, row.attempt, *([cast(row.record, Text)] if with_record else [])]
    return select(*columns).where(row.key.in_(select(each.table_valued("value").c.value)))


def measured_elsewhere(session: Session, asked: Sequence[Elsewhere]) -> dict[int, tuple[str, str]]:
    """Device class and key of what each of `asked` finds, by its place in them.

    Two steps into an index for each, however many classes have records."""
    if not asked:
        return {}
    text = json.dumps([[place.problem, place.target, place.after] for place in asked])
    rows = session.execute(_elsewhere(is_postgres(session)), {"asked": text}).all()
    return {place: (device_class, key) for place, device_class, key in rows}


@cache
def _elsewhere(on_postgres: bool) -> Select[int, str, str]:
    """One parameter, so that the text is the same however many are asked for."""
    given = bindparam("asked", type_=Text)
    parts: list[ColumnElement[str]]
    if on_postgres:
        elements = func.jsonb_array_elements(cast(given, JSONB))
        each = elements.table_valued("value", with_ordinality="key").render_derived()
        place = each.c.key - 1
        parts = [each.c.value.op("->>")(part) for part in range(3)]
    else:
        each = func.json_each(given).table_valued("key", "value")
        place = each.c.key
        parts = [func.json_extract(each.c.value, f"$[{part}]") for part in range(3)]  # `->>` came with SQLite 3.38
    problem, target, after = parts
    first, winner = core(WinnerRow).alias("first").c, core(WinnerRow).c
    next_class = (
        select(func.min(first.device_class))
        .where(first.measured_problem == problem, first.target == target, first.device_class > after)
        .scalar_subquery()
    )
    here = (winner.measured_problem == problem) & (winner.target == target) & (winner.device_class == next_class)
    return select(place, winner.device_class, winner.key).select_from(each.join(core(WinnerRow), here))


Neighbour = Row[Any]
"""A record of a problem with the same signature on the same target: `key`, `device_class`, `problem` as JSON."""


def neighbours_of(session: Session, place: Place, target: str, at_most: int, cuda: int = CUDA) -> list[Neighbour]:
    """Of the records of this signature and CUDA those of the next sizes: at most so many to either side."""
    row = core(WinnerRow).c
    query = select(row.key, row.device_class, cast(row.problem, Text).label("problem")).where(
        row.signature == under_cuda(place.signature, cuda), row.target == target
    )
    larger = query.where(row.size >= place.size).order_by(row.size, row.key).limit(at_most)
    smaller = query.where(row.size < place.size).order_by(row.size.desc(), row.key).limit(at_most)
    return [row for side in (larger, smaller) for row in session.execute(side)]


def publish_winner(session: Session, record: WinnerRecord, *, attempt: str) -> None:
    """Make `record` the next revision, in the write transaction in which it was made of the one before; its revision
    and time are set here. Publishing twice with one `attempt`, or what the record says already, changes nothing."""
    now = clock_of(session).now()
    row = session.execute(
        select(WinnerRow.revision, WinnerRow.attempt, WinnerRow.record).where(WinnerRow.key == record.key)
    ).one_or_none()
    if row is not None and (row.attempt == attempt or _says(row.record) == _says(_as_json(record))):
        return
    revision = 1 if row is None else row.revision + 1
    revised = _as_json(record.model_copy(update={"revision": revision, "updated_at": now}))
    place, measured = stored_place(record.operator, record.problem), problem_digest(record.problem)
    values = {
        "revision": revision,
        "operator": record.operator,
        "target": record.target,
        "device_class": record.device_class,
        "problem": record.problem,
        "measured_problem": None if is_predicted(record.device_class) else under_cuda(measured, record.cuda),
        "signature": place and under_cuda(place.signature, record.cuda),
        "size": place and place.size,
        "record": revised,
        "searches": record.searches,
        "attempt": attempt,
        "updated_at": now,
    }
    if row is None:
        session.execute(insert(core(WinnerRow)).values(key=record.key, **values))
    else:
        change(session, WinnerRow, WinnerRow.key == record.key, **values)
    write_uses(session, record.key, [revised])


def withdraw_winner(session: Session, key: str, attempt: str) -> None:
    """Let the record, if there is one, answer nothing any more."""
    row = session.execute(select(WinnerRow.revision, WinnerRow.record).where(WinnerRow.key == key)).one_or_none()
    if row is None or not row.record:
        return
    empty: dict[str, Any] = {"record": {}, "searches": [], "measured_problem": None, "signature": None, "size": None}
    values = {**empty, "revision": row.revision + 1, "attempt": attempt, "updated_at": clock_of(session).now()}
    change(session, WinnerRow, WinnerRow.key == key, **values)
    write_uses(session, key, [])


def used_by(session: Session, digests: Iterable[str]) -> dict[str, list[str]]:
    """Keys of the records of which a part names these blobs or codes, by digest."""
    keys: dict[str, list[str]] = {}
    uses = select(WinnerUseRow.digest, WinnerUseRow.key).order_by(WinnerUseRow.key)
    for digest, key in rows_among(session, uses, WinnerUseRow.digest, digests):
        keys.setdefault(digest, []).append(key)
    return keys


def write_uses(session: Session, key: str, records: Iterable[Mapping[str, Any]]) -> None:
    """What these records as JSON name: the one that answers, and its parts."""
    digests = {digest for record in records for digest in uses_of(record)}
    remove(session, WinnerUseRow, WinnerUseRow.key == key)
    insert_new(session, WinnerUseRow, [{"digest": digest, "key": key} for digest in sorted(digests)])


def uses_of(record: Mapping[str, Any]) -> set[str]:
    """Digests of the files and of the code in the front of a record as JSON."""
    entries = record.get("front", [])
    return {entry[name] for entry in entries for name in (*FILES, "code_digest") if entry.get(name)}


def _as_json(record: WinnerRecord) -> dict[str, Any]:
    """By way of the text: a number that JSON cannot hold becomes null, and rows are sent as they are."""
    fields: dict[str, Any] = json.loads(record.model_dump_json())
    return fields


def _says(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in UNSETTLED}


def launch_of(candidate: Candidate, functions: Sequence[LaunchFunction], workspace_bytes: int) -> Launch:
    """How a candidate is called, as its record says it: what Python computes, beside the launches themselves.
    `functions` and `workspace_bytes`: as the launch code has them."""
    op, problem, schedule = operator(candidate.kernel.operator), candidate.problem, candidate.schedule
    transformed = op.transformed(candidate.kernel)
    operands = [
        Operand(name=o.name, dtype=o.dtype, role=o.role, shape=list(o.shape), strides=list(o.strides))
        for o in op.operands(problem)
    ]
    return Launch(
        operands=operands,
        extents=dict(zip(op.extent_names, op.extents(problem), strict=True)),
        attributes=dict(zip(op.attribute_names, op.attributes(problem), strict=True)),
        launch=dict(zip(op.launch_tunables, op.launch_values(schedule), strict=True)),
        scalars=op.scalars(problem),
        functions=list(functions),
        workspace_bytes=workspace_bytes,
        transform=LaunchTransform(operand=transformed, bytes=op.transformed_bytes(problem, schedule))
        if transformed
        else None,
    )
