"""What compiles took, remembered by toolchain and family of kernels: what the next plan predicts by."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import select, update

from codegen.compile_model import KEPT_RECORDS, CompiledFile, CompileModel, Record, fit
from storage.database import Session, clock_of
from storage.rows import core, insert_new
from storage.tables import CompileModelRow


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


def _records(session: Session, toolchain: str, families: Collection[str] | None) -> dict[str, list[Record]]:
    row = core(CompileModelRow)
    query = select(row.c.family, row.c.records).where(row.c.toolchain == toolchain)
    if families is not None:
        query = query.where(row.c.family.in_(families))
    return {family: [Record(*one) for one in records] for family, records in session.execute(query)}
