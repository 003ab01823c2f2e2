"""A filter of system calls after which no socket can be opened: by name, abstract or of a network, whatever namespaces
and Landlock leave open, and on machines that have neither.

For a process that uses a GPU a weaker one: CUDA's driver binds a unix socket of its own, so those may be made, and
connecting is refused.
"""

import contextlib
import ctypes
import errno
import os
from functools import cache

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2  # linux/prctl.h, linux/seccomp.h
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # linux/bpf_common.h: BPF_LD|W|ABS, BPF_JMP|…
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data, little-endian
_ALLOW, _FAIL_WITH = 0x7FFF0000, 0x00050000
_X32 = 0x40000000
_AF_UNIX = 1
_IO_URING_SETUP = 425  # it opens sockets without their system calls
# linux/audit.h; socket, connect, socketpair
_CALLS = {"x86_64": (0xC000003E, 41, 42, 53), "aarch64": (0xC00000B7, 198, 203, 199)}

_Instruction = tuple[int, int, int, int]


class _Filter(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("value", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filters", ctypes.POINTER(_Filter)))


def prepare() -> None:
    """Before the forks that use it. Where there is no filter nothing is made: `refuse_sockets` says so."""
    with contextlib.suppress(OSError):
        _program(False), _program(True)


def refuse_sockets(*, device: bool = False) -> None:
    """For this process and all that it starts, for good. `device`: the weaker filter. The caller has set no_new_privs.
    Raises OSError where the machine has no such filters."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(_program(device)), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP) failed")


@cache
def _program(device: bool) -> _Program:
    machine = os.uname().machine
    if machine not in _CALLS:
        raise OSError(errno.ENOSYS, f"the numbers of {machine}'s system calls are not known here")
    instructions = _device_filter(*_CALLS[machine]) if device else _filter(*_CALLS[machine])
    return _Program(
        len(instructions), (_Filter * len(instructions))(*(_Filter(*instruction) for instruction in instructions))
    )


def _filter(architecture: int, socket: int, connect: int, socketpair: int) -> list[_Instruction]:
    # A datagram socket of a pair could send elsewhere.
    return [*_head(architecture), *_refuse(socket, errno.EACCES), *_refuse(socketpair, errno.EACCES), _allow()]


def _device_filter(architecture: int, socket: int, connect: int, socketpair: int) -> list[_Instruction]:
    return [
        *_head(architecture),
        *_refuse(connect, errno.ECONNREFUSED),
        (_IF_EQUAL, 1, 0, socket),
        _allow(),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_IF_EQUAL, 0, 1, _AF_UNIX),
        _allow(),
        (_RETURN, 0, 0, _FAIL_WITH | errno.EACCES),
    ]


def _head(architecture: int) -> list[_Instruction]:
    """Of another architecture, and of x32, the numbers mean other calls: all fail."""
    return [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _FAIL_WITH | errno.ENOSYS),
        (_LOAD, 0, 0, _NUMBER),
        (_IF_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _FAIL_WITH | errno.ENOSYS),
        *_refuse(_IO_URING_SETUP, errno.ENOSYS),
    ]


def _refuse(number: int, code: int) -> list[_Instruction]:
    return [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL_WITH | code)]


def _allow() -> _Instruction:
    return (_RETURN, 0, 0, _ALLOW)
