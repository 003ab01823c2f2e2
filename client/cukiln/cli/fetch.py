"""`cukiln fetch`: a winner record and its blobs, into a folder that `cukiln.load` reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cukiln.blob_cache import write_atomically
from cukiln.client import Client
from cukiln.load_kernel import RECORD_FILE
from cukiln.types import LookupResult, WinnerRecord


def fetch_record(client: Client, record: WinnerRecord, folder: Path) -> Path:
    """Write every file of the record as `<sha256>.so`, `.cubin` and so on, and last the record; returns its path.

    A folder that is read meanwhile, or left by an interrupted call, holds a record only together with its blobs: the
    files are named after their content, and the record is replaced when all of them are there.
    """
    for entry in record.front:
        for kind, digest in entry.files.items():
            path = folder / f"{digest}.{kind}"
            write_atomically(path, client.blob(digest, kind))
    path = folder / RECORD_FILE
    write_atomically(path, (record.model_dump_json(indent=2) + "\n").encode())
    return path


def lookup_request(client: Client, request: Mapping[str, Any]) -> list[LookupResult]:
    """Look up the problems of a job request; where it names targets, each problem is looked up for its own."""
    return client.lookup(
        request["problems"],
        target=request.get("target"),
        device_class=request.get("device_class"),
        workspace_limit_bytes=request.get("workspace_limit_bytes"),
        deterministic=request.get("deterministic", False),
        refresh=True,
    )


def folder_name(result: LookupResult) -> str:
    """A problem's name where it is a plain file name, else the start of its key."""
    name = result.name or ""
    plain = name and len(name) <= 100 and all(c.isalnum() or c in "._- " for c in name) and not name.startswith(".")
    return name if plain else result.key[:16]
