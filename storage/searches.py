"""Which searches a winner record has covered: what the next job need not do again.

An entry is `{"search", "generator", "workspace_limit_bytes"}`: a canonical search, the code that made its candidates,
and the workspace above which it rejected them (null: none).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from codegen.search import Search, covers

Entry = Mapping[str, Any]


def search_entry(search: Mapping[str, Any], generator: str, workspace_limit_bytes: int | None) -> dict[str, Any]:
    """The entry of a search that was done; `search` is canonical."""
    return {"search": dict(search), "generator": generator, "workspace_limit_bytes": workspace_limit_bytes}


def is_covered(done: Iterable[Entry], asked: Entry) -> bool:
    """Whether one of these searches, by the same generator, tried every schedule that `asked` tries."""
    return any(entry["generator"] == asked["generator"] and _contains(entry, asked) for entry in done)


def merge_searches(old: Sequence[Entry], new: Sequence[Entry]) -> list[dict[str, Any]]:
    """Both lists in order, without what another entry says too.

    The generators of `new` are the present ones: they replace a search of an older generator that they cover.
    """
    present = {entry["generator"] for entry in new}
    kept: list[Entry] = []
    for entry in (*new, *old):
        if any(_replaces(other, entry, present) for other in kept):
            continue
        kept = [*(other for other in kept if not _replaces(entry, other, present)), entry]
    # Chronological, and the older of two that are equal, so that a record that gains nothing stays as it is.
    ordered = {_text(entry): dict(entry) for entry in (*old, *new)}
    remaining = {_text(entry) for entry in kept}
    return [entry for text, entry in ordered.items() if text in remaining]


def _replaces(better: Entry, entry: Entry, present: set[str]) -> bool:
    newest = better["generator"] in present
    return (better["generator"] == entry["generator"] or newest) and _contains(better, entry)


def _contains(done: Entry, asked: Entry) -> bool:
    """Whether `done` tried every schedule that `asked` tries, generators aside."""
    searched = done["search"]
    # Equal searches are equal JSON: 10,000 problems of one job need not be parsed to see it.
    if searched != asked["search"] and not covers(
        Search.model_validate(searched), Search.model_validate(asked["search"])
    ):
        return False
    # A record without the field is of a release that did not say what it had rejected: it covers nothing large.
    within, wanted = done.get("workspace_limit_bytes", 0), asked.get("workspace_limit_bytes", 0)
    if within == wanted:
        return True
    # A sample stops at its number of accepted schedules: under another limit other schedules take the places of those
    # that are rejected.
    return "limit" not in searched and (within is None or (wanted is not None and wanted <= within))


def _text(entry: Entry) -> str:
    return json.dumps(entry, sort_keys=True)
