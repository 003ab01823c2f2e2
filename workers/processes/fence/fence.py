"""The fence around a child: limits, namespaces, a user, files and sockets of the compilers and kernels which run here.
What they may touch stands in `workers.processes.fence.access`, what a machine has to fence them in with in
`workers.processes.fence.means`.

```
fence server ─ leader ─ process 1 of the namespace ─ the child ─ what it starts
```
The whole tree ends with process 1, which ends with the leader, which ends with the server. Where there are no PID
namespaces the leader is a sub-reaper instead: it inherits every orphan below it and ends them all.
"""

import ctypes
import os
import resource
import select
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from workers.processes.die_with_parent import PR_SET_PDEATHSIG, die_with_parent
from workers.processes.fence import landlock
from workers.processes.fence.means import PR_SET_NO_NEW_PRIVS, Means
from workers.processes.fence.namespaces import cover, leave_namespaces, own_proc
from workers.processes.fence.no_sockets import refuse_sockets
from workers.processes.process_tree import sweep

FAILED = 128 + signal.SIGKILL
"""Exit status of what could not be fenced in: the machine's failure, never a verdict on the work."""
LEADER = "CUKILN_LEADER"
"""The variable in which a child that uses a GPU has its leader's number: its own says nothing outside its namespace."""
_PR_SET_CHILD_SUBREAPER, _PR_CAPBSET_DROP = 36, 24  # linux/prctl.h
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITY_VERSION_3 = 0x20080522  # linux/capability.h
_OF_FILES = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 27  # CHOWN, DAC_OVERRIDE, FOWNER, MKNOD: of a lease, a cache, a device
_OPEN_FILES = 1024
_UMASK = 0o022  # what one child writes, another with a user of its own may have to read; the folder is closed to others


@dataclass(frozen=True)
class Fence:
    """What a child is fenced in with. `rules`: paths with their rights of `workers.processes.fence.landlock`; `covers`:
    folders that it sees empty, but for the paths of each; `user`: the number of its own user and group, None for the
    caller's; `processes`: of its user at most, None without a bound; `device`: it uses a GPU, so that it keeps what a
    driver needs."""

    means: Means
    cpu_seconds: int
    file_bytes: int
    rules: Sequence[tuple[str, int]]
    covers: Mapping[str, Sequence[str]]
    user: int | None
    processes: int | None
    device: bool

    @classmethod
    def read(cls, data: Mapping[str, object]) -> "Fence":
        return cls(**{**data, "means": Means(**data["means"])})  # type: ignore[arg-type]

    def enter(self) -> int:
        """Returns in the child alone: the calling process becomes the leader. It ends with the child, and its number,
        which is answered, means the same outside of the child's namespace."""
        leader = os.getpid()
        try:
            for limit, most in (
                (resource.RLIMIT_CORE, 0),
                (resource.RLIMIT_CPU, self.cpu_seconds),
                (resource.RLIMIT_FSIZE, self.file_bytes),
            ):
                resource.setrlimit(limit, (most, most))
            self._enter_namespace() if self.means.namespaces else _stay_above()
            self._give_up_rights()
        except OSError as error:
            os.write(2, f"cannot be fenced in: {error}\n".encode())
            os._exit(FAILED)
        return leader

    def _enter_namespace(self) -> None:
        leave_namespaces(user=self.means.namespaces == "user", network=self.means.network)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        alive, held = os.pipe()
        first = os.fork()
        if first != 0:
            _end_like(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))
        os.close(held)
        die_with_parent(0)  # in its namespace a parent outside has no other number
        if select.select([alive], [], [], 0)[0]:  # the leader ended before the line above
            os._exit(125)
        os.close(alive)
        before = os.umask(0)
        for folder, shown in self.covers.items():
            cover(folder, shown)
        os.umask(before)
        if self.means.proc:
            own_proc()
        # Process 1 of a namespace ignores signals that it has no handler for, abort() included: the child is another.
        child = os.fork()
        if child != 0:
            while True:
                pid, status = os.wait()
                if pid == child:
                    code = os.waitstatus_to_exitcode(status)
                    os._exit(code if code >= 0 else 128 - code)
        _restore_signals()

    def _give_up_rights(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
        if not self.device:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        if self.means.users and not self.device:
            os.umask(_UMASK)
        if self.processes is not None:
            resource.setrlimit(resource.RLIMIT_NPROC, (self.processes, self.processes))
        if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS) failed")
        if self.means.landlock:
            landlock.restrict(self.means.landlock, self.rules)
        self._drop_capabilities(libc, _OF_FILES if self.device else 0)
        if self.means.sockets:
            refuse_sockets(device=self.device)

    def _drop_capabilities(self, libc: ctypes.CDLL, retained: int) -> None:
        capability = 0
        # Until it is not allowed, or past the last one.
        while retained >> capability & 1 or libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
            capability += 1
        libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
        if self.user is not None:
            os.setgroups([])
            os.setresgid(self.user, self.user, self.user)
            os.setresuid(self.user, self.user, self.user)
        header, sets = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
        libc.capget(ctypes.byref(header), ctypes.byref(sets))
        left = [word & mask for word, mask in zip(sets, (retained, retained, 0, 0, 0, 0), strict=True)]
        if libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)(*left))) != 0:
            raise OSError(ctypes.get_errno(), "capset failed")


def _stay_above() -> None:
    """Returns in the child; this process waits for its end, then ends whatever it left."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")

    def ended(number: int, frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sweep()
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, ended)
    parent = os.getppid()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # not SIGKILL: it has to sweep
    if os.getppid() != parent:
        os._exit(125)
    leader, child = os.getpid(), os.fork()
    if child == 0:
        die_with_parent(leader)
        os.setpgid(0, 0)  # a program that kills its own group does not kill the leader
        _restore_signals()
        return
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            break
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sweep()
    _end_like(os.waitstatus_to_exitcode(status))


def _restore_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_like(code: int) -> NoReturn:
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def processes_of_all() -> int:
    """Threads that run on this machine, of all users: the fourth field of proc_loadavg(5)."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
