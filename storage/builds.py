"""Builds: a kernel's rendered slice under a toolchain, owned by the one group that compiles it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from storage.database import Session
from storage.rows import chunks, core
from storage.tables import BuildRow


@dataclass(frozen=True)
class NewBuild:
    """`kernel_json` is the kernel itself, kept with the group that compiles it; `predicted_seconds` of compiling it."""

    id: str
    kernel: str
    slice: str
    kernel_json: dict[str, Any]
    predicted_seconds: float = 0.0


@dataclass(frozen=True)
class Build:
    """`state`: pending, ok, compile_error, compile_timeout. `verify_group_id`: the group that gets it judged.
    `library`: blob digest of the group library that holds it."""

    id: str
    kernel: str
    slice: str
    toolchain: str
    target: str
    group_id: str | None
    verify_group_id: str | None
    state: str
    code_digest: str | None
    library: str | None
    resources: dict[str, Any] | None
    log: str | None
    created_at: float


def known_builds(session: Session, build_ids: Iterable[str], *, with_library: Collection[str] = ()) -> dict[str, Build]:
    """Those of the builds that some group compiles, or has compiled, by id.

    Without those of `with_library` that compiled and whose library is not kept (its blob was lost, or it is older than
    the keeping): they can be proved on the CPU, but to be measured they must be compiled again.
    """
    found: dict[str, Build] = {}
    for ids in chunks(set(build_ids)):
        rows = session.execute(select(core(BuildRow)).where(BuildRow.id.in_(ids))).mappings()
        found.update((row["id"], Build(**row)) for row in rows)
    return {
        build.id: build
        for build in found.values()
        if build.state != "ok" or build.library is not None or build.id not in with_library
    }
