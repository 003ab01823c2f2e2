"""What code under test has left behind in this process: threads that run on, processes, open sockets, where they were
not there before it ran. The CUDA driver starts threads of its own when something is first needed, not all with a name.
So names cover a part; the rest is there before the first candidate (`workers.gpu.interface.Gpu.warm_up`)."""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from workers.processes import process_tree

# The CUDA driver's own threads, where it can name them, are called cuda-EvtHandlr, cuda00001400006 and the like.
DRIVER_THREADS = "cuda"
_PATIENCE_SECONDS = 0.5  # for a thread that is about to end


@dataclass(frozen=True)
class Belongings:
    """Of this process: its threads' numbers, its children's, the targets of its descriptors that are sockets."""

    threads: frozenset[int]
    children: frozenset[int]
    sockets: frozenset[str]


def belongings() -> Belongings:
    sockets = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that listed them
            target = str(descriptor.readlink())
            if target.startswith("socket:"):
                sockets.add(target)
    threads = frozenset(int(thread.name) for thread in Path("/proc/self/task").iterdir())
    return Belongings(threads, frozenset(process_tree.children(os.getpid())), frozenset(sockets))


def thread_names() -> list[str]:
    """Of all threads of this process, sorted."""
    return sorted(filter(None, (_name(int(thread.name)) for thread in Path("/proc/self/task").iterdir())))


def leftover(before: Belongings) -> str | None:
    """What is there that was not there before, and does not go away at once; null where nothing is."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (message := _leftover(before)) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    return message


def _leftover(before: Belongings) -> str | None:
    now = belongings()
    names = [_name(thread) for thread in sorted(now.threads - before.threads)]
    foreign = [name for name in names if name and not name.startswith(DRIVER_THREADS)]
    if foreign:
        return f"left a thread running: {', '.join(foreign)}"
    if now.children - before.children:
        return "left a process running"
    if now.sockets - before.sockets:
        return "left a socket open"
    return None


def _name(thread: int) -> str:
    """Empty where the thread has ended meanwhile."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/self/task/{thread}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return ""
