"""Builds: a kernel's rendered slice under a toolchain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, select

from storage.database.session import Session
from storage.database.sql import core, rows_among
from storage.database.tables import BuildRow


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
