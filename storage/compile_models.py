"""What compiles took, remembered by toolchain and family of kernels: what the next plan sizes its groups by."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import select, update

from codegen.compile_model import KEPT_RECORDS, CompiledFile, CompileModel, Record, fit
from storage.database import Session, clock_of
from storage.items import Claim
from storage.new_items import COMPILE, FINISH, UNENDED, VERIFY
from storage.rows import core, insert_new
from storage.tables import CompileModelRow, ItemRow

AT_WORK = (COMPILE, VERIFY, FINISH)
"""The kinds that a compile worker takes."""


def load_model(session: Session, toolchain: str, families: Collection[str] | None = None) -> CompileModel:
    """As learnt so far; before the first record, the operators' own estimates."""
    return CompileModel({family: fit(records) for family, records in _records(session, toolchain, families).items()})


def learn(session: Session, toolchain: str, files: Sequence[CompiledFile]) -> None:
    """Remember what these files took. Writers take turns, so none of it is lost to another."""
    now = clock_of(session).now()
    for file in files:
        known = _records(session, toolchain, list(file.estimates))
        model = CompileModel({family: fit(records) for family, records in known.items()})
        for family, record in model.records(file).items():
            records = [*known.get(family, []), record][-KEPT_RECORDS:]
            values = {
                "records": [[one.weight, one.seconds, one.memory] for one in records],
                "updated_at": now,
            }
            row, key = core(CompileModelRow), {"toolchain": toolchain, "family": family}
            if family in known:
                found = (row.c.toolchain == toolchain) & (row.c.family == family)
                session.execute(update(row).where(found).values(**values))
            else:
                insert_new(session, CompileModelRow, [{**key, **values}])


def idle_workers(session: Session, claim: Claim, target: str, workers: int) -> int:
    """How many of `workers` have nothing to do that goes before what `claim`'s job will bring; at least one: the first
    that ends what it does. What waits with a lower priority is overtaken."""
    item = core(ItemRow)
    mine = select(item.c.priority).where(item.c.id == claim.item_id).scalar_subquery()
    before = select(item.c.id).where(
        item.c.state.in_(UNENDED),
        item.c.kind.in_(AT_WORK),
        item.c.target == target,
        (item.c.state == "claimed") | (item.c.priority >= mine),
    )
    return max(1, workers - len(session.scalars(before.limit(workers)).all()))


def _records(session: Session, toolchain: str, families: Collection[str] | None) -> dict[str, list[Record]]:
    row = core(CompileModelRow)
    query = select(row.c.family, row.c.records).where(row.c.toolchain == toolchain)
    if families is not None:
        query = query.where(row.c.family.in_(families))
    return {family: [Record(*one) for one in records] for family, records in session.execute(query)}
