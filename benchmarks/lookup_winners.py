"""Winner records for `bench_lookup`: one real record, stored under the keys of any number of problems."""

import json
import uuid
from collections.abc import Sequence
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


def places(count: int) -> list[tuple[int, str]]:
    """Problems with the device class of their record: every second one was measured, the others predicted."""
    return [(number, MEASURED if number % 2 else PREDICTED) for number in range(count)]


def publish(database: Database, template: WinnerRecord, places: Sequence[tuple[int, str]]) -> list[str]:
    """Write a record for each; returns the keys in order."""
    keys = []
    for some in chunks(places, AT_ONCE):
        with database.write() as session:
            for number, device_class in some:
                fields = {name: value for name, value in problem(number).items() if name != "name"}
                parsed = operator("matmul").parse(fields)
                keys.append(winner_key(parsed.digest, TARGET, device_class))
                changed = {"key": keys[-1], "revision": 0, "problem": parsed.canonical(), "device_class": device_class}
                publish_winner(session, template.model_copy(update=changed), attempt=uuid.uuid4().hex)
    return keys


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
