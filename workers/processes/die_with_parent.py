"""Start a program that dies with the process that started it, also where that one is SIGKILLed.

usage: die_with_parent.py PARENT_PID PROGRAM [ARGUMENT …]

The kernel sends the death signal when the *thread* that started this one ends: start from a thread that lives as long
as the program should.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_NAME = 15


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends. Exits where `parent` has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the line above
        os._exit(125)


def name_process(name: str) -> None:
    """What `ps -o comm` and `top` call this process; the kernel keeps 15 bytes."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def tethered(argv: Sequence[str]) -> list[str]:
    """The command line that runs `argv` (an absolute program path first) tied to this process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *argv]


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    # Python ignores SIGPIPE, and what is ignored stays ignored over exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
