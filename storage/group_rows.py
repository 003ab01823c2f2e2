"""The rows of groups: added with their item and their builds, loaded, started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert, select, update

from storage.builds import NewBuild
from storage.database import Session, clock_of
from storage.items import Claim
from storage.new_items import COMPILE, NewItem, add_items
from storage.rows import chunks, core, insert_new
from storage.tables import BuildRow, GroupRow


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
    job_id: str | None
    target: str
    toolchain: str | None
    state: str
    joined_to: str | None
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
    started_at: float | None
    finished_at: float | None


def add_group(
    session: Session,
    kind: str,
    job_id: str,
    priority: int,
    target: str,
    toolchain: str,
    builds: Sequence[NewBuild],
    predicted_seconds: float,
) -> str:
    """Add a group with its item; returns its id. Kind `compile` owns these builds from now on, `verify` has old ones
    judged."""
    now = clock_of(session).now()
    group_id = clock_of(session).new_id()
    session.execute(
        insert(core(GroupRow)).values(
            id=group_id,
            job_id=job_id,
            target=target,
            toolchain=toolchain,
            state="waiting" if kind == COMPILE else "compiled",
            kernels=[_entry(build) for build in builds],
            predicted_seconds=predicted_seconds,
            created_at=now,
        )
    )
    if kind == COMPILE:
        rows = [
            {
                "id": build.id,
                "kernel": build.kernel,
                "slice": build.slice,
                "toolchain": toolchain,
                "target": target,
                "group_id": group_id,
                "verify_group_id": group_id,
                "state": "pending",
                "created_at": now,
            }
            for build in builds
        ]
        # One that stands already is compiled again, because its library was lost: it changes hands.
        for ids in chunks(build.id for build in builds):
            again = {"state": "pending", "group_id": group_id, "verify_group_id": group_id, "library": None}
            session.execute(update(core(BuildRow)).where(core(BuildRow).c.id.in_(ids)).values(**again))
        insert_new(session, BuildRow, rows)
    else:
        for ids in chunks(build.id for build in builds):
            session.execute(update(BuildRow).where(BuildRow.id.in_(ids)).values(verify_group_id=group_id))
    add_items(session, [NewItem(kind, group_id, target, job_id, priority, predicted_seconds)])
    return group_id


def _entry(build: NewBuild) -> dict[str, Any]:
    return {
        "build": build.id,
        "id": build.kernel,
        "slice": build.slice,
        "kernel": build.kernel_json,
        "predicted_seconds": build.predicted_seconds,
    }


def load_group(session: Session, group_id: str) -> Group | None:
    row = session.execute(select(core(GroupRow)).where(GroupRow.id == group_id)).mappings().one_or_none()
    if row is None:
        return None
    return Group(**{**row, "kernels": read_kernels(row["kernels"])})


def read_kernels(entries: Sequence[dict[str, Any]]) -> tuple[GroupKernel, ...]:
    return tuple(
        GroupKernel(entry["build"], entry["id"], entry["slice"], entry["kernel"], entry.get("predicted_seconds", 0.0))
        for entry in entries
    )


def jobs_that_share(session: Session, group_id: str) -> set[str]:
    """The jobs of the group and of those that joined it."""
    group = core(GroupRow).c
    mine = (group.id == group_id) | (group.joined_to == group_id)
    return {job for job in session.scalars(select(group.job_id).where(mine)) if job is not None}


def start_group(session: Session, claim: Claim) -> None:
    """Note when the compiler was first started on the group."""
    session.execute(
        update(GroupRow)
        .where(GroupRow.id == claim.ref, GroupRow.started_at.is_(None))
        .values(started_at=clock_of(session).now())
    )
