"""What this machine has to fence a child in with; run as a program, it tries it and prints it as JSON."""

import contextlib
import ctypes
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

from workers.processes.fence import landlock, no_sockets
from workers.processes.fence.namespaces import leave_namespaces, own_proc
from workers.processes.fence.no_sockets import refuse_sockets

PR_SET_NO_NEW_PRIVS = 38
# CHOWN, DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID: to hand a folder over, take it back, and end its user's processes
_TO_CHANGE_USER = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 7
# systemd's table of user numbers (systemd.io/UIDS-GIDS) leaves the first unused; containers often have 65,536 alone,
# where the second range is that of services without a user of their own.
_WIDE, _NARROW = (1879048192, 1 << 22), (61184, 4336)


@dataclass(frozen=True)
class Means:
    """`namespaces` of processes and mounts: root's own, inside one of users, or none. `network`: one of its own.
    `proc`: a /proc of its own. `landlock`: its ABI version, 0 for none. `sockets`: they can be refused. `users`: first
    and count of the numbers that a child's own user is taken from; empty where it stays the caller's."""

    namespaces: Literal["root", "user", ""] = ""
    network: bool = False
    proc: bool = False
    landlock: int = 0
    sockets: bool = False
    users: tuple[int, ...] = ()

    def in_force(self) -> list[tuple[str, bool, str]]:
        """For people, one for each means: its name, whether it is there, and what it does or what is left without."""
        processes = {
            "root": "a child is in a namespace of its own",
            "user": "a child is in a namespace of its own, inside one of users",
            "": "none allowed: a child's tree is found through a sub-reaper",
        }[self.namespaces]
        proc = "; it sees no process but its own" if self.proc else "; its /proc is this machine's"
        files = f"ABI {self.landlock}" if self.landlock else "not in this kernel, or not allowed: file modes are left"
        user = "each child has a user of its own" if self.users else "a child has this user's number"
        return [
            ("pid namespace", bool(self.namespaces and self.proc), processes + proc),
            ("network namespace", self.network, "of its own, empty" if self.network else "none allowed"),
            ("sockets", self.sockets, "refused" if self.sockets else "the kernel cannot refuse them"),
            ("Landlock", bool(self.landlock), files),
            ("own user", bool(self.users), user),
            ("pids limit", self.bounds_processes != "", self.bounds_processes or "none: it would not bind root"),
        ]

    @property
    def bounds_processes(self) -> str:
        """What RLIMIT_NPROC counts; empty where it binds nothing."""
        if self.users:
            return "RLIMIT_NPROC of the child's own user"
        if os.geteuid() == 0:
            return ""
        return "RLIMIT_NPROC of the " + ("namespace of users" if self.namespaces == "user" else "whole machine")

    def user_of(self, pid: int) -> int | None:
        """A number that no other living process of ours has, but where the range is narrow."""
        return self.users[0] + pid % self.users[1] if self.users else None


def find_means() -> Means:
    """Tried in forks of this process, which has one thread."""
    rest = Means(landlock=landlock.abi_version(), sockets=_works(_refused), users=_users())
    kinds: tuple[Literal["root", "user"], ...] = ("root", "user")
    for namespaces, network, proc in product(kinds, (True, False), (True, False)):
        users = rest.users if namespaces == "root" else ()  # in a namespace of users there is but one
        means = replace(rest, namespaces=namespaces, network=network, proc=proc, users=users)
        if _works(partial(_leave, means)):
            return means
    return rest


def _works(attempt: Callable[[], object]) -> bool:
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            attempt()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _leave(means: Means) -> None:
    leave_namespaces(user=means.namespaces == "user", network=means.network)
    if not _works(own_proc if means.proc else lambda: None):
        raise OSError("no process, or no /proc of its own")


def _refused() -> None:
    ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    refuse_sockets()
    try:
        socket.socket().close()
    except PermissionError:
        return
    raise OSError("the filter does not work")


def _users() -> tuple[int, ...]:
    """Of root alone, and where such numbers are mapped and its rights are whole."""
    if os.geteuid() != 0:
        return ()
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    if int(lines["CapEff"], 16) & _TO_CHANGE_USER != _TO_CHANGE_USER:
        return ()
    for first, count in (_WIDE, _NARROW):
        if all(_is_mapped(name, first, count) for name in ("uid_map", "gid_map")):
            return (first, count)
    return ()


def _is_mapped(name: str, first: int, count: int) -> bool:
    ranges = [map(int, line.split()) for line in Path(f"/proc/self/{name}").read_text().splitlines()]
    return any(inside <= first and first + count <= inside + length for inside, _, length in ranges)


def prepare() -> None:
    """Where this module is forked: make once what each fence needs."""
    landlock.prepare()
    no_sockets.prepare()


def main() -> None:
    sys.stdout.write(json.dumps(asdict(find_means())))


if __name__ == "__main__":
    main()
