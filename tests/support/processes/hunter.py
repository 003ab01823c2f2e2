"""Kill children of the compilers under test: the real ones, by name, wherever they stand below this process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from workers.processes import process_tree

T = TypeVar("T")
LOOK_SECONDS = 0.001
TRIES = 40
"""Of a tool that lives for some milliseconds, and may end before it is found."""


class Hunter(threading.Thread):
    """Sends a signal to processes named `victim` below `root`, to at most so many. `hit`: their pids."""

    def __init__(self, victim: str, number: int, most: int = 1, root: int | None = None) -> None:
        super().__init__(daemon=True)
        self.hit: list[int] = []
        self._victim, self._number, self._most, self._root = victim, number, most, root or os.getpid()
        self._enough = threading.Event()

    def run(self) -> None:
        while not self._enough.is_set() and len(self.hit) < self._most:
            time.sleep(LOOK_SECONDS)
            for pid in process_tree.descendants(self._root)[1:]:
                if pid not in self.hit and _name(pid) == self._victim:
                    try:
                        os.kill(pid, self._number)
                    except ProcessLookupError:
                        continue
                    self.hit.append(pid)
                    break

    def stop(self) -> None:
        self._enough.set()
        self.join()


@contextmanager
def hunting(victim: str, number: int, most: int = 1) -> Iterator[Hunter]:
    hunter = Hunter(victim, number, most)
    hunter.start()
    try:
        yield hunter
    finally:
        hunter.stop()


def until_hit(
    work: Callable[[], T], victim: str, number: signal.Signals, *, counts: Callable[[T | Exception], bool]
) -> T | Exception:
    """What `work` returned, or raised, while one `victim` was killed under it; again where none was found in time, and
    where what came out does not count: a tool that is killed as it ends has done its work."""
    for _ in range(TRIES):
        result: T | Exception
        with hunting(victim, number) as hunter:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - whatever came of it
                result = error
        if hunter.hit and counts(result):
            return result
    raise AssertionError(f"in {TRIES} runs no {victim} was found, or none that mattered")


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
