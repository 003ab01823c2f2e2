"""Files: closed to all other users, how many the API may have open, where the leases of GPUs lie."""

import contextlib
import os
import resource
import stat
from pathlib import Path

UMASK = 0o077
"""Of every process of the server: what it makes is its user's alone."""


def close_tree(folder: Path) -> None:
    """An existing folder and all in it; one that is closed already is not read. Other users' files stay as they are."""
    if not folder.stat().st_mode & UMASK:
        return
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            close(Path(place, name))
    close(folder)  # last: after a crash all is read again


def close(path: Path) -> None:
    """Does nothing where it is not there, or another user's. Devices stay as they are: they are the machine's."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        mode = path.lstat().st_mode
        is_ours = stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)
        if is_ours and mode & UMASK:
            path.chmod(stat.S_IMODE(mode) & ~UMASK)


ENOUGH = 65_536


def raise_descriptor_limit() -> int:
    """Up to the hard limit, where that is sensible; returns how many there may be now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return soft if soft > 0 else ENOUGH
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


# Not TMPDIR: two services with different ones would not see each other's leases. systemd gives a service a /tmp of its
# own where it is asked to (PrivateTmp), but the one /run/lock.
LOCK_FOLDERS = (Path("/run/lock"), Path("/tmp"))
_NAME = "cukiln-gpus"


def gpu_lock_folder(named: str | os.PathLike[str] | None = None) -> Path:
    """The folder that CUKILN_GPU_LOCKS names, absolute; else the machine's. Makes nothing."""
    if named:
        return Path(named).expanduser().absolute()
    return next((folder for folder in LOCK_FOLDERS[:-1] if _is_for_all(folder)), LOCK_FOLDERS[-1]) / _NAME


def _is_for_all(folder: Path) -> bool:
    """Whether every user may make a file there, not only this process: else root and others would take different
    folders where /run/lock is root's alone (Fedora), or is on a read-only file system (containers)."""
    try:
        status, system = folder.stat(), os.statvfs(folder)
    except OSError:
        return False
    shared = stat.S_IWOTH | stat.S_ISVTX
    return stat.S_ISDIR(status.st_mode) and status.st_mode & shared == shared and not system.f_flag & os.ST_RDONLY
