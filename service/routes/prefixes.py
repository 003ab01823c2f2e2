"""Builds, winner records and candidates are named by their id, or by 8 or more digits that no other's begins with."""

from __future__ import annotations

import re

from service.http.errors import refuse
from storage.database.prefixes import Named, ids_beginning
from storage.database.session import Session

_PREFIX = re.compile(r"[0-9a-f]{8,64}")


def require_one(session: Session, kind: Named, prefix: str, job: str | None = None) -> str:
    """The id that is meant; `job`: of a candidate of that job. Raises `Refused`."""
    field = "key" if kind == "kernel" else kind
    if not _PREFIX.fullmatch(prefix):
        detail = f"{prefix[:80]!r} names no {kind}: give 64 lower-case hexadecimal digits, or the first 8 or more."
        raise refuse(f"{kind}-not-found", detail, field=field)
    of_job = f" in job {job}" if job else ""
    ids = ids_beginning(session, kind, prefix, job)
    if len(ids) > 1:
        detail = f"{len(ids)} or more {kind}s{of_job} begin with {prefix!r}: give more digits."
        raise refuse("ambiguous-prefix", detail, field=field, allowed=ids)
    if not ids:
        raise refuse(f"{kind}-not-found", f"There is no {kind} {prefix!r}{of_job}.", field=field)
    return ids[0]
