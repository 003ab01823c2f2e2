"""Whether this machine can do a worker's work now: room for temporary files, and a blob store that takes bytes."""

from __future__ import annotations

import os
from pathlib import Path

from storage.blobs import BlobStore
from workers.processes import InfrastructureError, Processes

ROOM_BYTES = 4 << 20
"""A group's source, PTX, cubin and library together take less."""


def why_unable(processes: Processes, blobs: BlobStore) -> str | None:
    """What is wrong, and what to do; None where all is well."""
    try:
        with processes.private_folder("room") as folder:
            _write(folder / "room")
    except (OSError, InfrastructureError) as error:
        return f"temporary files cannot be written ({_words(error)}): make room, or set TMPDIR to another disk"
    try:
        blobs.try_out()
    except Exception as error:  # noqa: BLE001 - each kind of store has its own
        return f"the blob store takes no bytes ({_words(error)}): make room in it, or bring it back"
    return None


def _write(path: Path) -> None:
    with path.open("wb") as file:
        file.write(bytes(ROOM_BYTES))
        file.flush()
        os.fsync(file.fileno())


def _words(error: BaseException) -> str:
    """Without the path, which is another one each time."""
    reason = error.__cause__ if isinstance(error, InfrastructureError) and error.__cause__ is not None else error
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return type(reason).__name__
