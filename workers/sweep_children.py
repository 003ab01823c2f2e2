"""Run a program and, when it ends or the caller dies, everything it started. The stand-in for a PID namespace.

usage: sweep_children.py CALLER_PID CPU_SECONDS FILE_BYTES network|no-network PROGRAM [ARGUMENT …]

A sub-reaper inherits every orphan below it, also those that made a session of their own: what is below it at the end is
what the program left behind. Ends with the program's exit code, or 128 + signal.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from types import FrameType
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h


def children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123 - runs with -S, keeps its imports few
            return [int(word) for word in file.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def sweep() -> None:
    """Kill all children until none is left. Killing a parent hands its children to us: the loop ends with the last."""
    while True:
        for pid in children(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def ended(number: int, frame: FrameType | None) -> NoReturn:
    sweep()
    os._exit(128 + number)


def leave_network(libc: ctypes.CDLL) -> None:
    """Move to a network namespace of our own, where that is allowed: for root, or in a user namespace of our own, where
    we keep our ids. Tried in a child first: who has left his user namespace but may not name himself is nobody."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if _left_network(libc) else 1)
        except OSError:
            os._exit(1)
    if os.waitpid(child, 0)[1] == 0:
        _left_network(libc)


def _left_network(libc: ctypes.CDLL) -> bool:
    if libc.unshare(CLONE_NEWNET) == 0:
        return True
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
            file.write(text)
    return True


def main(argv: list[str]) -> NoReturn:
    caller, cpu_seconds, file_bytes, network, program = int(argv[0]), int(argv[1]), int(argv[2]), argv[3], argv[4:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        sys.exit("sweep_children: no sub-reaper on this kernel")
    signal.signal(signal.SIGTERM, ended)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != caller:  # it died before the line above
        sys.exit(125)
    if network == "no-network":
        leave_network(libc)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    # A new process group keeps a program that kills its own group from killing the sweeper.
    child = os.posix_spawn(program[0], program, os.environ, setpgroup=0, setsigdef=[signal.SIGXFSZ, signal.SIGPIPE])
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            break
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sweep()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(sys.argv[1:])
