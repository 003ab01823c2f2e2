"""Landlock by system calls: a process gives up, for good and for all that it starts, the files, sockets and processes
that it does not name. Each kernel has an ABI version; what is used here is what that version has.

Numbers: linux/landlock.h; the system calls have the same numbers on every architecture.
"""

import contextlib
import ctypes
import os
import stat
from collections.abc import Iterable
from functools import cache

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1  # flag: answer the ABI version
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_DEVICE_NODES_AND_SOCKETS = 1 << 6 | 1 << 9 | 1 << 10
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
_FIRST_RIGHTS = (1 << 13) - 1
_LATER_RIGHTS = ((2, 1 << 13), (3, _TRUNCATE), (5, _IOCTL_DEVICE))  # ABI, right: 1 << 13 is to link across folders
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE  # others are refused for a plain file
_BIND_AND_CONNECT_TCP, _TCP_ABI = 1 << 0 | 1 << 1, 4
_ABSTRACT_SOCKETS_AND_SIGNALS, _SCOPE_ABI = 1 << 0 | 1 << 1, 6

LISTS = _READ_DIR
READS = _EXECUTE | _READ_FILE | _READ_DIR
WRITES = READS | (_FIRST_RIGHTS & ~_DEVICE_NODES_AND_SOCKETS) | 1 << 13 | _TRUNCATE
ALL = _FIRST_RIGHTS | 1 << 13 | _TRUNCATE | _IOCTL_DEVICE


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))


def abi_version() -> int:
    """0 where the kernel, or a container's filter of system calls, has none."""
    return max(0, int(_libc().syscall(_CREATE_RULESET, None, 0, _VERSION)))


def prepare() -> None:
    """Before the forks that use it."""
    _libc()


def restrict(abi: int, rules: Iterable[tuple[str, int]]) -> None:
    """From now on only what `rules` name: a path and its rights, for all beneath it. What is not there is left out. No
    TCP, no abstract socket and no signal to a process outside, as far as `abi` has them. The caller has set
    no_new_privs. Raises OSError."""
    files = _FIRST_RIGHTS
    for version, right in _LATER_RIGHTS:
        files |= right if abi >= version else 0
    ruleset = _Ruleset(
        files,
        _BIND_AND_CONNECT_TCP if abi >= _TCP_ABI else 0,
        _ABSTRACT_SOCKETS_AND_SIGNALS if abi >= _SCOPE_ABI else 0,
    )
    size = 8 if abi < _TCP_ABI else 16 if abi < _SCOPE_ABI else 24
    handle = _call(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), 0)
    try:
        for path, rights in rules:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
                allowed = rights & files
                if not stat.S_ISDIR(os.fstat(folder).st_mode):
                    allowed &= _OF_FILES
                _call(_ADD_RULE, handle, _PATH_BENEATH, ctypes.byref(_PathBeneath(allowed, folder)), 0)
                os.close(folder)
        _call(_RESTRICT_SELF, handle, 0)
    finally:
        os.close(handle)


def _call(number: int, *arguments: object) -> int:
    result = int(_libc().syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"system call {number} of Landlock failed")
    return result


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
