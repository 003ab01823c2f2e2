"""Files in a folder that a fenced child writes into as well: what it left there may be a link, a pipe or endless."""

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

_READABLE = 0o644  # for a child's own user; the folder is its alone
_BLOCK_BYTES = 512  # of st_blocks


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """A new file in place of what was there. Raises OSError."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _READABLE)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, _READABLE)
        file.write(data)


def read_bytes(path: Path, most: int) -> bytes:
    """Raises OSError where it is no plain file, or longer than `most`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path.name} is no plain file")
        data = file.read(most + 1)
        if len(data) > most:
            raise OSError(f"{path.name} is longer than {most} bytes")
        return data


def disk_use(folders: Iterable[Path]) -> int:
    """Bytes that the files in the folders take, of those that are there long enough to be seen."""
    use = 0
    for folder in folders:
        for path, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(OSError):
                    use += os.lstat(os.path.join(path, name)).st_blocks * _BLOCK_BYTES  # noqa: PTH118 - every 50 ms
    return use
