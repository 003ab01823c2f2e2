"""`counted`: how many calls ran a kernel, and how many PyTorch's own operators."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from cukiln.torch.dispatch import Dispatcher, Key, current, install
from cukiln.torch.find_kernels import Entry
from cukiln.torch.plan import Plan


@dataclass
class Calls:
    """`kernels`: calls that a kernel computed; `own`: those that PyTorch's own operators did."""

    kernels: int = 0
    own: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, entry: Entry) -> Entry:
        with self._lock:
            if entry.call is None:
                self.own += 1
            else:
                self.kernels += 1
        return entry


class _CountedTable(dict[Key, Entry]):
    """The table of another dispatcher, as a call reads it."""

    def __init__(self, table: dict[Key, Entry], calls: Calls) -> None:
        super().__init__()
        self._table, self._calls = table, calls

    def get(self, key: Key, default: Entry | None = None) -> Entry | None:  # type: ignore[override]
        entry = self._table.get(key)
        return default if entry is None else self._calls.add(entry)


class _Counting(Dispatcher):
    """Another dispatcher's kernels."""

    def __init__(self, of: Dispatcher, calls: Calls) -> None:
        super().__init__(of.options, of.load)
        self.table = _CountedTable(of.table, calls)
        self._of, self._calls = of, calls

    def computes(self, device: torch.device) -> bool:
        return self._of.computes(device)

    def first(self, key: Key, plan: Plan | None, device: torch.device) -> Entry:
        return self._calls.add(self._of.first(key, plan, device))

    def again(self, entry: Entry) -> None:
        self._of.again(entry)

    def settle(self, seconds: float | None) -> bool:
        return self._of.settle(seconds)


@contextmanager
def counted() -> Iterator[Calls]:
    """Counts the calls inside the `with`, of all threads, for examples and tests: each takes longer by it."""
    calls = Calls()
    before = current()
    install(_Counting(before, calls))
    try:
        yield calls
    finally:
        install(before)
