"""A small file system at the data folder that may be full, or read-only where blobs lie, for a while.

It is mounted in a namespace of its own, which ends with the process that holds it and with what was started in it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SIZE = 256 << 20
# The folder comes by stdin: in the command it would make the holder one of the service's processes.
_HOLD = 'read folder && mount -t tmpfs -o size="$1",mode=700 none "$folder" && echo mounted && read line'


@dataclass(frozen=True)
class SmallDisk:
    """Mounted at `folder` for what `holder` and the commands `inside` see."""

    folder: Path
    holder: int

    def inside(self, *command: str) -> list[str]:
        return ["nsenter", f"--target={self.holder}", "--mount", "--", *command]

    @property
    def seen_from_here(self) -> Path:
        """The folder, for processes that are not inside; not for SQLite, which reads links itself."""
        return Path(f"/proc/{self.holder}/root{self.folder}")

    def fill(self) -> None:
        """Take every byte that is free."""
        with (self.seen_from_here / "filler").open("ab") as file:
            while (state := os.statvfs(self.seen_from_here)).f_bavail:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), state.f_bavail * state.f_frsize)
                except OSError:  # the service has taken some of it
                    return

    def empty(self) -> None:
        (self.seen_from_here / "filler").unlink(missing_ok=True)

    def close_blobs(self) -> None:
        """Make the blobs' folder read-only, also to processes that run."""
        blobs = str(self.folder / "blobs")
        self._run("mount", "--bind", blobs, blobs)
        self._run("mount", "-o", "remount,bind,ro", blobs)

    def open_blobs(self) -> None:
        self.unmount(self.folder / "blobs")

    def unmount(self, folder: Path) -> None:
        self._run("umount", "--lazy", str(folder))

    def _run(self, *command: str) -> None:
        subprocess.run(self.inside(*command), check=True, capture_output=True)


def is_possible() -> bool:
    """Whether this user may mount in a namespace of its own."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk | None]:
    """None where that is not possible."""
    if not is_possible():
        yield None
        return
    folder.mkdir(parents=True, exist_ok=True)
    command = ["unshare", "--mount", "--propagation=private", "sh", "-c", _HOLD, "sh", str(SIZE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        holder.stdin.write(f"{folder}\n".encode())
        assert holder.stdout.read(8) == b"mounted\n"
        disk = SmallDisk(folder, holder.pid)
        yield disk
        disk.unmount(folder)  # else the folder cannot be removed before the namespace has gone
