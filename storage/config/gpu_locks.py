"""The folder of the GPUs' lease files: one for all services of a machine."""

from __future__ import annotations

import os
import stat
from pathlib import Path

# Not TMPDIR: two services with different ones would not see each other's leases. systemd gives a service a /tmp of its
# own where it is asked to (PrivateTmp), but the one /run/lock.
_FOLDERS = (Path("/run/lock"), Path("/tmp"))
_NAME = "cukiln-gpus"


def gpu_lock_folder(named: str | os.PathLike[str] | None = None) -> Path:
    """The folder that CUKILN_GPU_LOCKS names, absolute; else the machine's. Makes nothing."""
    if named:
        return Path(named).expanduser().absolute()
    return next((folder for folder in _FOLDERS[:-1] if _is_for_all(folder)), _FOLDERS[-1]) / _NAME


def _is_for_all(folder: Path) -> bool:
    """Whether every user may make a file there, not only this process: else root and others would take different
    folders where /run/lock is root's alone (Fedora), or is on a read-only file system (containers)."""
    try:
        status, system = folder.stat(), os.statvfs(folder)
    except OSError:
        return False
    shared = stat.S_IWOTH | stat.S_ISVTX
    return stat.S_ISDIR(status.st_mode) and status.st_mode & shared == shared and not system.f_flag & os.ST_RDONLY
