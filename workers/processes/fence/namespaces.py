"""Namespaces of a child's own: of processes, mounts, System V memory and, where allowed, of the network; folders that
it sees covered, and a /proc that shows it no process but its own."""

import ctypes
import os
import stat
from collections.abc import Sequence
from pathlib import Path

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000  # linux/sched.h
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
# linux/mount.h
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1 << 1, 1 << 2, 1 << 3, 1 << 12, 1 << 14, 1 << 18


def leave_namespaces(*, user: bool, network: bool) -> None:
    """Of processes that are forked from now on. `user`: inside one of users. Raises OSError."""
    number, group = os.geteuid(), os.getegid()
    flags = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC
    _call("unshare", flags | (CLONE_NEWNET if network else 0) | (CLONE_NEWUSER if user else 0))
    if user:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{number} {number} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            Path(f"/proc/self/{name}").write_text(text)
    make_private()


def make_private(flags: int = 0) -> None:
    """What is mounted from now on, no other namespace sees; after leaving those of `flags`. Raises OSError."""
    if flags:
        _call("unshare", flags)
    _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)


def own_proc() -> None:
    """For process 1. Raises OSError."""
    _call("mount", b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)


def cover(folder: str, shown: Sequence[str]) -> None:
    """An empty folder over `folder`, with the paths `shown` in it; over a file, one without content. Raises OSError."""
    if not Path(folder).is_dir():
        _call("mount", b"/dev/null", folder.encode(), None, MS_BIND, None)
        return
    handles = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in shown if Path(path).exists()]
    _call("mount", b"none", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"mode=755,size=1m")
    for path, handle in handles:
        place = Path(path)
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            place.mkdir(mode=0o755, parents=True, exist_ok=True)
        else:
            place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            place.touch()
        _call("mount", f"/proc/self/fd/{handle}".encode(), path.encode(), None, MS_BIND | MS_REC, None)
        os.close(handle)


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name} failed")
