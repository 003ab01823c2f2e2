"""Toolchains that made builds here; a recent sign of life means that a worker with it is running."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Row, select, update

from storage.database import Session, clock_of
from storage.rows import core, insert_new
from storage.tables import PENDING_OR_GIVEN_UP, BuildRow, ToolchainRow

LiveToolchain = Row[Any]
"""Of `storage.tables.ToolchainRow`."""


def register_toolchain(session: Session, digest: str, description: dict[str, Any], targets: Sequence[str]) -> None:
    """Say that a worker with this toolchain is alive; called again and again while it is."""
    values = {"description": description, "targets": list(targets), "seen_at": clock_of(session).now()}
    insert_new(session, ToolchainRow, [{"digest": digest, **values}])
    session.execute(update(ToolchainRow).where(ToolchainRow.digest == digest).values(**values))


def live_toolchains(session: Session, within_seconds: float) -> list[LiveToolchain]:
    """Toolchains heard of within the last seconds, the latest first."""
    now = clock_of(session).now()
    # A sign from the future is from before the clock was set back: those that live give another.
    heard = ToolchainRow.seen_at.between(now - within_seconds, now + within_seconds)
    live = select(core(ToolchainRow)).where(heard)
    return list(session.execute(live.order_by(ToolchainRow.seen_at.desc(), ToolchainRow.digest)))


def gone_toolchains(session: Session, live: Collection[LiveToolchain]) -> list[tuple[str, str]]:
    """Targets and toolchains of pending builds that no live worker can compile, though one compiles for their target:
    it has another compiler."""
    digests, targets = {one.digest for one in live}, {target for one in live for target in one.targets}
    build = core(BuildRow).c
    pending = select(build.target, build.toolchain).where(PENDING_OR_GIVEN_UP, build.state == "pending").distinct()
    places = session.execute(pending)
    return [(target, toolchain) for target, toolchain in places if toolchain not in digests and target in targets]
