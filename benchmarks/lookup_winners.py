"""Winner records for `bench_lookup`: one real record, stored under the keys of any number of problems."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codegen.identity import winner_key
from codegen.operators import operator
from cukiln.types import WinnerRecord
from storage.database.session import Database
from storage.database.sql import chunks
from storage.entities.winners import get_winners, publish_winner

TARGET = "sm_90a"
PREDICTED = f"predicted:{TARGET}"
MEASURED = "NVIDIA H200"
AT_ONCE = 100
"""Records of one transaction."""


def problem(number: int) -> dict[str, Any]:
    """The problem of a record, as a request spells it."""
    m, n = 1 + number % 1000, 64 * (1 + number // 1000)
    return {"name": f"p{number}", "operator": "matmul", "layout": "nt", "dtype": "float16", "m": m, "n": n, "k": 256}


@dataclass(frozen=True)
class Place:
    """Where the record of a problem stands: every second one was measured, the others predicted."""

    number: int
    device_class: str

    @property
    def fields(self) -> dict[str, Any]:
        return {name: value for name, value in problem(self.number).items() if name != "name"}


def places(count: int) -> list[Place]:
    return [Place(number, MEASURED if number % 2 else PREDICTED) for number in range(count)]


def publish(database: Database, template: WinnerRecord, places: Sequence[Place]) -> list[str]:
    """Write the records that are not there yet; returns all keys in order."""
    keys = []
    for some in chunks(places, AT_ONCE):
        records = list(_records(template, some))
        keys += [record.key for record in records]
        with database.read() as session:
            stored = get_winners(session, [record.key for record in records])
        with database.write() as session:
            for record in records:
                if record.key not in stored:
                    publish_winner(session, record, attempt=uuid.uuid4().hex)
    return keys


def _records(template: WinnerRecord, some: Sequence[Place]) -> Iterator[WinnerRecord]:
    for place in some:
        parsed = operator("matmul").parse(place.fields)
        key = winner_key(parsed.digest, TARGET, place.device_class)
        changed = {"key": key, "revision": 0, "problem": parsed.canonical(), "device_class": place.device_class}
        yield template.model_copy(update=changed)


def write_files(database: Database, keys: Sequence[str], folder: Path) -> None:
    """Each record as a file, for the static file server."""
    folder.mkdir()
    for some in chunks(keys, 1000):
        with database.read() as session:
            for key, record in get_winners(session, some).items():
                (folder / f"{key}.json").write_bytes(record.model_dump_json().encode())


def body(numbers: Sequence[int]) -> bytes:
    """A lookup of these problems."""
    return json.dumps({"target": TARGET, "problems": [problem(number) for number in numbers]}).encode()
