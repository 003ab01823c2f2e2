"""Look at and end a tree of processes, through /proc."""

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PATIENCE_SECONDS = 1.0
_ROUNDS = 30


@dataclass(frozen=True)
class Usage:
    """CPU seconds of the living and of those they reaped; of the work alone, resident anonymous bytes and number of
    the living."""

    cpu_seconds: float
    memory_bytes: int
    processes: int


def children(pid: int) -> list[int]:
    """Direct children of all threads of `pid`; empty where it is gone (or the kernel lacks CONFIG_PROC_CHILDREN)."""
    pids: list[int] = []
    try:
        with os.scandir(f"/proc/{pid}/task") as threads:  # takes half as long as by Path, and is done all along
            for thread in threads:
                with open(f"{thread.path}/children", "rb", 0) as file:  # noqa: PTH123
                    pids += map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return pids
    return pids


def descendants(pid: int) -> list[int]:
    """`pid` and everything below it, parents first."""
    tree = [pid]
    for member in tree:  # grows while it is read
        tree += children(member)
    return tree


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped it: it does nothing, and does not end."""
    with contextlib.suppress(OSError):  # it cannot be looked at, without a descriptor that is free, and may run
        return _state(pid) == "T"
    return False


def _state(pid: int) -> str | None:
    """The letter of proc(5); None where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def usage(pid: int, fence: int = 0) -> Usage:
    """Of the tree of `pid`. `fence`: as many of the first processes belong to it, and are not the work's."""
    cpu = memory = 0
    tree = descendants(pid)
    for number, member in enumerate(tree):
        try:
            # The name in parentheses may hold anything: fields are counted from the last parenthesis. proc(5): 14-17
            # are utime, stime, cutime, cstime.
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            pages = Path(f"/proc/{member}/statm").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        cpu += sum(map(int, fields[11:15]))
        memory += max(0, int(pages[1]) - int(pages[2])) if number >= fence else 0
    return Usage(cpu / _TICKS, memory * _PAGE, max(0, len(tree) - fence))


def kill_namespace(leader: int) -> None:
    """Kill process 1 of the namespace below its `leader`, and with it everything inside. `leader` then reaps it
    and ends by itself. A leader that has not forked yet is killed itself."""
    deadline = time.monotonic() + 0.1
    while not (below := children(leader)) and _alive(leader) and time.monotonic() < deadline:
        time.sleep(0.002)
    for pid in below:
        _signal(pid, signal.SIGKILL)
    if not _ends(leader, _PATIENCE_SECONDS):
        _signal(leader, signal.SIGKILL)


def end_sweeper(leader: int) -> None:
    """Ask the sub-reaper to sweep and end, and help it. It is killed last: what it has not ended would be lost."""
    _signal(leader, signal.SIGTERM)
    for _ in range(_ROUNDS):
        if _ends(leader, 2 * _PATIENCE_SECONDS):
            return
        _stop_below(leader)
        for pid in reversed(descendants(leader)[1:]):
            _signal(pid, signal.SIGKILL)
    _signal(leader, signal.SIGKILL)


def sweep() -> None:
    """End and reap everything below this process, a sub-reaper."""
    while below := children(os.getpid()):
        _stop_below(os.getpid())
        for pid in below:
            _signal(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _stop_below(pid: int) -> None:
    """One that is stopped does not fork while others are killed."""
    stopped: set[int] = set()
    while fresh := set(descendants(pid)[1:]) - stopped:
        for member in fresh:
            _signal(member, signal.SIGSTOP)
        stopped |= fresh


def _alive(pid: int) -> bool:
    """Not gone and not a zombie that waits for its parent."""
    return _state(pid) not in (None, "Z")


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
