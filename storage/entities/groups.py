"""Builds (a kernel's rendered slice under a toolchain), and the groups (files) that they are compiled in."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, select

from storage.database.session import Session
from storage.database.sql import core, rows_among
from storage.database.tables import BuildRow, GroupRow, TaskJobRow, TaskRow
from storage.entities.task_kinds import COMPILE

FILES_OF_GROUPS = ("source", "log", "library", "cubin", "ptx", "sass")


@dataclass(frozen=True)
class GroupKernel:
    """`kernel` is the kernel's id, `kernel_json` the kernel itself; `predicted_seconds` of compiling it, or 0."""

    build: str
    kernel: str
    slice: str
    kernel_json: dict[str, Any]
    predicted_seconds: float = 0.0


Group = Row[Any]
"""Of `storage.database.tables.GroupRow`."""


def load_group(session: Session, group_id: str) -> Group | None:
    return session.execute(select(core(GroupRow)).where(GroupRow.id == group_id)).one_or_none()


def kernels_of(group: Group) -> list[GroupKernel]:
    """In render order."""
    return [
        GroupKernel(entry["build"], entry["id"], entry["slice"], entry["kernel"], entry.get("predicted_seconds", 0.0))
        for entry in group.kernels
    ]


def compiled_for(session: Session, group_id: str) -> dict[str, float]:
    """The jobs that a group was compiled for, with the seconds that their builds had been pending."""
    needed_by, task = core(TaskJobRow).c, core(TaskRow).c
    rows = session.execute(
        select(needed_by.job_id, needed_by.waited_seconds)
        .join(core(TaskRow), task.id == needed_by.task_id)
        .where(task.kind == COMPILE, task.ref == group_id)
        .order_by(needed_by.job_id)
    )
    return dict(rows.all())


@dataclass(frozen=True)
class NewBuild:
    """`kernel_json` is the kernel itself; seconds and bytes are predicted of compiling it."""

    id: str
    kernel: str
    slice: str
    kernel_json: dict[str, Any]
    target: str
    toolchain: str
    predicted_seconds: float = 0.0
    predicted_bytes: float = 0.0


Build = Row[Any]
"""Of `storage.database.tables.BuildRow`."""


def known_builds(session: Session, build_ids: Iterable[str]) -> dict[str, Build]:
    """Those of the builds that some job has needed, by id."""
    return {row.id: row for row in rows_among(session, select(core(BuildRow)), BuildRow.id, build_ids)}
