"""Which searches a winner record has covered: what the next job need not do again.

An entry is a canonical `search`; the `generator`, which is the code that made its candidates; what it rejected:
candidates over `workspace_limit_bytes` (null: none), and where `deterministic` is set those whose bits differ from run
to run; `ptx`: "all" where every candidate was run from its PTX, else missing; `whole`: whether every point of its
Pareto front was published; and on a GPU under what it was `measured`: times of another driver or another verification
plan say nothing of today's.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from codegen.search.search import Search, covers

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class MeasuredUnder:
    """The driver of a GPU, and the version of its verification plan; None: not known."""

    driver: str
    plan_version: str | None


def search_entry(
    search: Mapping[str, Any],
    generator: str,
    workspace_limit_bytes: int | None,
    *,
    deterministic: bool = False,
    whole: bool = True,
    every_ptx: bool = False,
    measured: MeasuredUnder | None = None,
) -> dict[str, Any]:
    """The entry of a search that was done, or (without `whole` and `measured`) is asked for; `search` is canonical."""
    return {
        "search": dict(search),
        "generator": generator,
        "workspace_limit_bytes": workspace_limit_bytes,
        "deterministic": deterministic,
        "whole": whole,
        **({"ptx": "all"} if every_ptx else {}),
        **({"measured": asdict(measured)} if measured is not None else {}),
    }


def is_covered(done: Iterable[Entry], asked: Entry, live: Collection[MeasuredUnder] = ()) -> bool:
    """Whether one of these searches, by the same generator, tried every schedule that `asked` tries.

    `live`: of the GPUs of the device class that could measure now; one of them must have the driver and the plan
    of the search. Where there is none, because it is predicted or was imported, whatever is recorded counts."""
    return any(
        entry["generator"] == asked["generator"] and _is_of_today(entry, live) and _contains(entry, asked)
        for entry in done
    )


def merge_searches(old: Sequence[Entry], new: Sequence[Entry]) -> list[dict[str, Any]]:
    """Both lists in order, without what another entry says too.

    The generators of `new` are the present ones, and so are the driver and the plan that it was measured under:
    they replace a search of older ones that they cover.
    """
    present = {_made_by(entry) for entry in new}
    remaining: list[Entry] = []
    for entry in (*new, *old):
        if any(_replaces(other, entry, present) for other in remaining):
            continue
        remaining = [*(other for other in remaining if not _replaces(entry, other, present)), entry]
    # Chronological, and the older of two that are equal, so that a record that gains nothing stays as it is.
    ordered = {_text(entry): dict(entry) for entry in (*old, *new)}
    texts = {_text(entry) for entry in remaining}
    return [entry for text, entry in ordered.items() if text in texts]


def _replaces(better: Entry, entry: Entry, present: set[str]) -> bool:
    newest = _made_by(better) in present
    as_whole = better.get("whole", True) or not entry.get("whole", True)
    return (_made_by(better) == _made_by(entry) or newest) and as_whole and _contains(better, entry)


def _made_by(entry: Entry) -> str:
    return json.dumps([entry["generator"], entry.get("measured")], sort_keys=True)


def _is_of_today(entry: Entry, live: Collection[MeasuredUnder]) -> bool:
    measured = entry.get("measured") or {}
    return not live or any(
        gpu.driver == measured.get("driver") and gpu.plan_version in (None, measured.get("plan_version"))
        for gpu in live
    )


def _contains(done: Entry, asked: Entry) -> bool:
    """Whether `done` tried every schedule that `asked` tries, generators aside."""
    if asked.get("ptx") == "all" and done.get("ptx") != "all":
        return False
    searched = done["search"]
    # Equal searches are equal JSON: 10,000 problems of one job need not be parsed.
    if searched != asked["search"] and not covers(
        Search.model_validate(searched), Search.model_validate(asked["search"])
    ):
        return False
    if _policy(done) == _policy(asked):
        return True  # the fastest that the policy allows is always published
    # Under a narrower policy some other point of the front answers, if it was published. A sample stops at its number
    # of accepted schedules, and so does what keeps the best: under another policy other schedules take the places of
    # those that are rejected.
    if {"limit", "keep"} & searched.keys():
        return False
    return bool(done.get("whole", True)) and _allows(done, asked)


def _policy(entry: Entry) -> tuple[int | None, bool]:
    # A record without the fields is of a release that did not record what it rejected: it covers nothing large.
    return entry.get("workspace_limit_bytes", 0), bool(entry.get("deterministic", False))


def _allows(done: Entry, asked: Entry) -> bool:
    """Whether `done` rejected nothing that `asked` does not reject too."""
    (bytes_done, only_done), (bytes_asked, only_asked) = _policy(done), _policy(asked)
    if only_done and not only_asked:
        return False
    return bytes_done is None or (bytes_asked is not None and bytes_asked <= bytes_done)


def _text(entry: Entry) -> str:
    return json.dumps(entry, sort_keys=True)
