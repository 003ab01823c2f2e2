"""The rows of groups, and what the kernels in them are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from storage.database import Session
from storage.new_items import COMPILE
from storage.rows import core
from storage.tables import GroupRow, ItemJobRow, ItemRow


@dataclass(frozen=True)
class GroupKernel:
    """`kernel` is the kernel's id, `kernel_json` the kernel itself; `predicted_seconds` of compiling it, or 0."""

    build: str
    kernel: str
    slice: str
    kernel_json: dict[str, Any]
    predicted_seconds: float = 0.0


@dataclass(frozen=True)
class Group:
    """`source`, `log`, `library`, `cubin`, `ptx`, `sass` are blob digests; None before it is compiled."""

    id: str
    target: str
    toolchain: str | None
    state: str
    kernels: tuple[GroupKernel, ...]
    predicted_seconds: float
    source: str | None
    log: str | None
    library: str | None
    cubin: str | None
    ptx: str | None
    sass: str | None
    phases: list[dict[str, Any]]
    codegen_seconds: dict[str, Any]
    compile_seconds: dict[str, Any]
    verify_seconds: dict[str, Any]
    created_at: float
    finished_at: float | None


def load_group(session: Session, group_id: str) -> Group | None:
    row = session.execute(select(core(GroupRow)).where(GroupRow.id == group_id)).mappings().one_or_none()
    if row is None:
        return None
    return Group(**{**row, "kernels": _read_kernels(row["kernels"])})


def _read_kernels(entries: Sequence[dict[str, Any]]) -> tuple[GroupKernel, ...]:
    return tuple(
        GroupKernel(entry["build"], entry["id"], entry["slice"], entry["kernel"], entry.get("predicted_seconds", 0.0))
        for entry in entries
    )


def compiled_for(session: Session, group_id: str) -> dict[str, float]:
    """The jobs that a group was compiled for, with the seconds that their builds had been pending."""
    wanting, item = core(ItemJobRow).c, core(ItemRow).c
    rows = session.execute(
        select(wanting.job_id, wanting.waited_seconds)
        .join(core(ItemRow), item.id == wanting.item_id)
        .where(item.kind == COMPILE, item.ref == group_id)
        .order_by(wanting.job_id)
    )
    return dict(rows.all())
