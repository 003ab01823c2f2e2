"""Look at and end a tree of processes, through /proc. Used by `workers.processes` alone."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PATIENCE_SECONDS = 1.0


@dataclass(frozen=True)
class Usage:
    """Of a whole tree: CPU seconds of the living and of those they reaped; resident anonymous bytes of the living."""

    cpu_seconds: float
    memory_bytes: int


def children(pid: int) -> list[int]:
    """Direct children of all threads of `pid`; empty where it is gone (or the kernel lacks CONFIG_PROC_CHILDREN)."""
    found: list[int] = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return found
    return found


def descendants(pid: int) -> list[int]:
    """`pid` and everything below it, parents first."""
    tree = [pid]
    for member in tree:  # grows while it is read
        tree += children(member)
    return tree


def usage(pid: int) -> Usage:
    """What the tree of `pid` has used so far. A process that ends meanwhile is counted through its parent next time."""
    cpu = memory = 0
    for member in descendants(pid):
        try:
            # The name in parentheses may hold anything: fields are counted from the last parenthesis. proc(5): 14-17
            # are utime, stime, cutime, cstime.
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            pages = Path(f"/proc/{member}/statm").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        cpu += sum(map(int, fields[11:15]))
        memory += max(0, int(pages[1]) - int(pages[2]))
    return Usage(cpu / _TICKS, memory * _PAGE)


def kill_namespace(leader: int) -> None:
    """Kill process 1 of the namespace below unshare (`leader`), and with it everything inside. `leader` then reaps it
    and ends by itself. A leader that has not forked yet is killed itself."""
    deadline = time.monotonic() + 0.1
    while not (below := children(leader)) and _alive(leader) and time.monotonic() < deadline:
        time.sleep(0.002)
    for pid in below:
        _signal(pid, signal.SIGKILL)
    if not _ends(leader, _PATIENCE_SECONDS):
        _signal(leader, signal.SIGKILL)


def end_sweeper(leader: int) -> None:
    """Ask the sub-reaper to sweep and end; where it does not, kill all that is seen below it, then itself."""
    _signal(leader, signal.SIGTERM)
    if not _ends(leader, 2 * _PATIENCE_SECONDS):
        for pid in reversed(descendants(leader)):
            _signal(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    """Not gone and not a zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _ends(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while _alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended by itself meanwhile
