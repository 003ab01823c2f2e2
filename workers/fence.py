"""The fence around a child that a fork server forks: the limits and namespaces that `workers.processes` gives a program
which it starts.

```
fork server ─ leader ─ process 1 of the namespace ─ the child ─ what it starts
```
The whole tree ends with process 1, which ends with the leader, which ends with the server.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from workers.tether import die_with_parent

CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000  # linux/sched.h


@dataclass(frozen=True)
class Fence:
    """What a child is fenced in with. `user`: namespaces need one of users around them."""

    user: bool
    network: bool  # one of its own, with nothing in it
    cpu_seconds: int
    file_bytes: int

    def enter(self) -> None:
        """Returns in the child alone: the calling process becomes the leader."""
        try:
            for limit, most in (
                (resource.RLIMIT_CORE, 0),
                (resource.RLIMIT_CPU, self.cpu_seconds),
                (resource.RLIMIT_FSIZE, self.file_bytes),
            ):
                resource.setrlimit(limit, (most, most))
            self._leave_namespaces()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            alive, held = os.pipe()
            first = os.fork()
        except OSError as error:
            os.write(2, f"cannot be fenced in: {error}\n".encode())
            os._exit(1)
        if first != 0:
            _end_like(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))
        os.close(held)
        die_with_parent(0)  # in its namespace a parent outside has no other number
        if select.select([alive], [], [], 0)[0]:  # the leader ended before the line above
            os._exit(125)
        os.close(alive)
        # Process 1 of a namespace ignores signals that it has no handler for, abort() included: the child is another.
        child = os.fork()
        if child != 0:
            while True:
                pid, status = os.wait()
                if pid == child:
                    code = os.waitstatus_to_exitcode(status)
                    os._exit(code if code >= 0 else 128 - code)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _leave_namespaces(self) -> None:
        """As `unshare [--user --map-root-user] [--net] --pid`. Raises OSError."""
        user, group = os.geteuid(), os.getegid()
        libc = ctypes.CDLL(None, use_errno=True)
        flags = CLONE_NEWPID | (CLONE_NEWNET if self.network else 0) | (CLONE_NEWUSER if self.user else 0)
        if libc.unshare(flags) != 0:
            raise OSError(ctypes.get_errno(), "unshare failed")
        if self.user:
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
                Path(f"/proc/self/{name}").write_text(text)


def _end_like(code: int) -> NoReturn:
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)
