"""Files that are the service's own: closed to all other users of the machine."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

UMASK = 0o077
"""Of every process of the server: what it makes is its user's alone."""


def close_tree(folder: Path) -> None:
    """An existing folder and all in it, which older releases left open. A closed folder is not read: what was made
    in it since is closed, too. Files of other users are left as they are."""
    if not folder.stat().st_mode & UMASK:
        return
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            close(Path(place, name))
    close(folder)  # last: after a crash all is read again


def close(path: Path) -> None:
    """Does nothing where it is not there, or another user's."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode) and mode & UMASK:
            path.chmod(stat.S_IMODE(mode) & ~UMASK)
