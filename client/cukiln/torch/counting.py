"""`counted`: how many calls ran a kernel, and how many PyTorch's own operators."""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from cukiln.torch.dispatch import Dispatcher, Key, Operator, Tensors, current, install, remove
from cukiln.torch.find_kernels import Entry
from cukiln.torch.plan import Plan


@dataclass
class Calls:
    """`kernels`: calls that a kernel computed; `own`: those that PyTorch's own operators did."""

    kernels: int = 0
    own: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def add(self, entry: Entry) -> None:
        with self._lock:
            if entry.call is None:
                self.own += 1
            else:
                self.kernels += 1


class _CountedTable(dict[Key, Entry]):
    """The table of another dispatcher, as a call reads it."""

    def __init__(self, table: dict[Key, Entry], count: Callable[[Entry], Entry]) -> None:
        super().__init__()
        self._table, self._count = table, count

    def get(self, key: Key, default: Entry | None = None) -> Entry | None:  # type: ignore[override]
        entry = self._table.get(key)
        return default if entry is None else self._count(entry)


class _Counting(Dispatcher):
    """Another dispatcher's kernels."""

    def __init__(self, of: Dispatcher, calls: Calls) -> None:
        super().__init__(of.options, of.load)
        self.table = _CountedTable(of.table, self._count)
        self._of, self._calls = of, calls

    def after_fork(self) -> None:
        super().after_fork()
        self._of.after_fork()
        self._calls.after_fork()
        self.table = _CountedTable(self._of.table, self._count)

    def computes(self, device: torch.device) -> bool:
        return self._of.computes(device)

    def first(self, key: Key, plan: Plan | None, device: torch.device) -> Entry:
        return self._count(self._of.first(key, plan, device))

    def has_kernel(self, operator: Operator, tensors: Tensors, options: Hashable) -> bool:
        return self._of.has_kernel(operator, tensors, options)  # of a compiler: no call

    def wait(self, entry: Entry) -> None:
        self._of.wait(entry)

    def again(self, entry: Entry) -> None:
        self._of.again(entry)

    def misses_are_due(self) -> None:
        self._of.misses_are_due()

    def settle(self, seconds: float | None) -> bool:
        return self._of.settle(seconds)

    def _count(self, entry: Entry) -> Entry:
        if entry.call is None and not entry.ready.is_set():
            self.wait(entry)  # as the call would; only then it is known what the call does
        self._calls.add(entry)
        return entry


@contextmanager
def counted() -> Iterator[Calls]:
    """Counts the calls inside the `with`, of all threads, for examples and tests: each takes longer by it."""
    calls = Calls()
    counting = _Counting(current(), calls)
    install(counting)
    try:
        yield calls
    finally:
        remove(counting)
