"""Builds: a kernel's rendered slice under a toolchain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from storage.database import Session
from storage.rows import chunks, core
from storage.tables import BuildRow


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


@dataclass(frozen=True)
class Build:
    """`state`: pending, compiling, ok, compile_error, compile_timeout. `library`: blob digest of the group library that
    holds it."""

    id: str
    kernel: str
    slice: str
    toolchain: str
    target: str
    kernel_json: dict[str, Any] | None
    predicted_seconds: float
    predicted_bytes: float
    group_id: str | None
    state: str
    suspect: str | None
    attempts: int
    code_digest: str | None
    library: str | None
    resources: dict[str, Any] | None
    log: str | None
    created_at: float


def known_builds(session: Session, build_ids: Iterable[str]) -> dict[str, Build]:
    """Those of the builds that some job has needed, by id."""
    found: dict[str, Build] = {}
    for ids in chunks(set(build_ids)):
        rows = session.execute(select(core(BuildRow)).where(BuildRow.id.in_(ids))).mappings()
        found.update((row["id"], Build(**row)) for row in rows)
    return found
