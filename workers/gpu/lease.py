"""The lease of a GPU: a lock on a file, held by one process at a time and given back by the kernel when that one ends.

The folder of the files is shared by all services on a machine, perhaps of several users. So a file is opened as it is
and never followed as a link, and a user who may only read it can still lock it.
"""

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

from workers.processes.fence.fence import LEADER

ASK_SECONDS = 0.2
TRIES_PER_WORD = 5
_SHARED_FOLDER = 0o1777  # as /tmp: all users may add files, each may remove its own alone
_SHARED_FILE = 0o666
_MOST_BYTES = 500


class LeaseRefused(Exception):
    """The lease file cannot be used; the message says why and what to do."""


class GpuLease:
    """Held until `release`, or until this process is gone."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        self._file = (status.st_dev, status.st_ino)

    def held(self) -> bool:
        """Whether the file is still open: code that shares this process can close it."""
        try:
            status = os.fstat(self._descriptor)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._file

    def release(self) -> None:
        os.close(self._descriptor)


def take_lease(
    path: Path, purpose: str, waiting: Callable[[str], None], *, sleep: Callable[[float], None] = time.sleep
) -> GpuLease:
    """Wait for the lease; `waiting` gets its holder every second, the file `purpose`. Raises LeaseRefused."""
    make_folder(path.parent)
    descriptor = _open(path)
    for tries in count():
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if tries % TRIES_PER_WORD == 0:
                waiting(_holder(descriptor))
            sleep(ASK_SECONDS)
            continue
        _write(descriptor, f"{os.environ.get(LEADER, os.getpid())}\n{purpose}\n")
        return GpuLease(descriptor)
    raise AssertionError("count() does not end")


def is_leased(path: Path) -> bool:
    """Whether a process holds the lease now."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def make_folder(folder: Path) -> None:
    """Of lease files, for all users of the machine. Raises LeaseRefused."""
    try:
        folder.mkdir(mode=_SHARED_FOLDER, parents=True)
        folder.chmod(_SHARED_FOLDER)  # the umask took some of it away
    except FileExistsError:
        pass
    except OSError as error:
        raise LeaseRefused(f"the folder of the GPU leases cannot be made: {error}; set CUKILN_GPU_LOCKS") from error
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise LeaseRefused(f"{folder} is no folder, or a link: remove it, or set CUKILN_GPU_LOCKS to another folder")
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise LeaseRefused(f"any user may remove files of others in {folder}: chmod 1777 it, or set CUKILN_GPU_LOCKS")


def _open(path: Path) -> int:
    """Opens before it makes a file: Linux refuses O_CREAT on another user's file in /tmp (fs.protected_regular)."""
    ways = (os.O_RDWR, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDWR, os.O_RDONLY)
    problem: OSError | None = None
    for way in ways:
        try:
            descriptor = os.open(path, way | os.O_NOFOLLOW | os.O_CLOEXEC, _SHARED_FILE)
        except OSError as error:
            problem = error
            if error.errno == errno.ELOOP:
                raise LeaseRefused(f"{path} is a link: remove it; a lease is a plain file") from error
            continue
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise LeaseRefused(f"{path} is no plain file: remove it")
        if way & os.O_CREAT:
            os.fchmod(descriptor, _SHARED_FILE)
        return descriptor
    raise LeaseRefused(f"the lease {path} cannot be opened: {problem}; set CUKILN_GPU_LOCKS to a folder that can")


def _write(descriptor: int, text: str) -> None:
    with contextlib.suppress(OSError):  # opened to read only: the lock counts, the text is for people
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _holder(descriptor: int) -> str:
    """The holder, as the file names it; it may be half written."""
    lines = os.pread(descriptor, _MOST_BYTES, 0).decode("utf-8", "replace").split("\n")
    return f"process {lines[0]}: {lines[1]}" if len(lines) > 1 else "another process"


def lease_file(folder: Path, uuid: str) -> Path:
    """What is locked while the GPU is used: the same file for all services of the machine."""
    return folder / f"{uuid}.lock"
