"""Toolchains that made builds here; a recent sign of life means that a worker with it is running."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, update

from storage.database import Session, clock_of
from storage.rows import core, insert_new
from storage.tables import ToolchainRow


@dataclass(frozen=True)
class LiveToolchain:
    digest: str
    description: dict[str, Any]
    targets: list[str]
    seen_at: float


def register_toolchain(session: Session, digest: str, description: dict[str, Any], targets: Sequence[str]) -> None:
    """Say that a worker with this toolchain is alive; called again and again while it is."""
    values = {"description": description, "targets": list(targets), "seen_at": clock_of(session).now()}
    insert_new(session, ToolchainRow, [{"digest": digest, **values}])
    session.execute(update(ToolchainRow).where(ToolchainRow.digest == digest).values(**values))


def describe_toolchain(session: Session, digest: str, description: dict[str, Any]) -> None:
    """Say what a toolchain is, once, without a sign of life: requests are not offered one that only screens."""
    insert_new(session, ToolchainRow, [{"digest": digest, "description": description, "targets": [], "seen_at": 0.0}])


def live_toolchains(session: Session, within_seconds: float) -> list[LiveToolchain]:
    """Toolchains heard of within the last seconds, the latest first."""
    since = clock_of(session).now() - within_seconds
    rows = session.execute(
        select(core(ToolchainRow))
        .where(ToolchainRow.seen_at >= since)
        .order_by(ToolchainRow.seen_at.desc(), ToolchainRow.digest)
    ).mappings()
    return [LiveToolchain(**row) for row in rows]
