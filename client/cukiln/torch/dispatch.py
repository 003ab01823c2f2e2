"""Which kernel a call runs, decided before PyTorch's dispatcher: by a small key, from a dict."""

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, TypeAlias, Unpack

import torch

from cukiln.http.seconds import check_seconds
from cukiln.torch.find_kernels import Entry, Finder, Load, load_entry
from cukiln.torch.options import Options, OptionsGiven
from cukiln.torch.plan import Plan

Key: TypeAlias = Hashable
Tensors: TypeAlias = tuple[torch.Tensor, ...]
COMPILER_SECONDS = 5.0  # that a compiler waits for a kernel
MOST_KEYS = 100_000  # kinds of calls that are remembered; those beyond run PyTorch's own


class Dispatcher:
    """The kernels of all calls under some options."""

    def __init__(self, options: Options, load: Load = load_entry) -> None:
        self.options, self.load = options, load
        self.table: dict[Key, Entry] = {}
        self.of_gpus = False  # whether tensors of a CPU stand for those of a GPU
        self.finder = Finder(options, load)
        self._late_until = 0.0  # calls waited in vain, and do not wait again until then
        self._lock = threading.Lock()

    def after_fork(self) -> None:
        """Without kernels: the thread that finds them is not there, and locks may be held for ever."""
        self.table = {}
        self.finder = Finder(self.options, self.load)
        self._lock = threading.Lock()

    def first(self, key: Key, plan: Plan | None, device: torch.device) -> Entry:
        """The entry of a key that the table lacks; it is filled in behind the caller's back."""
        entry = Entry(plan, device)
        if plan is None or not self.computes(device):
            entry.ready.set()
            return self._keep(key, entry)
        if _capturing(device):
            entry.ready.set()  # nothing may be loaded now; the next call asks
            return entry
        stored = self._keep(key, entry)
        if stored is entry:
            self.finder.find(entry)
        return stored

    def has_kernel(self, operator: "Operator", tensors: Tensors, options: Hashable) -> bool:
        """Whether calls of tensors like these, which have no data, run a kernel. It is looked up, again where its time
        has come, and waited for, longer than by a call: what asks here compiles."""
        key = (operator.name, options, *[(t.shape, t.stride(), t.dtype, t.device, 0, t.is_neg()) for t in tensors])
        entry = self.table.get(key)
        if entry is None:
            plan = None if _unlike(tensors) else operator.plan(tensors, options)
            entry = self.first(key, plan, tensors[0].device)
        elif entry.until <= time.monotonic():
            self.again(entry)
        # A call that came too early says nothing of what a compiler may wait for: only a service without answers does.
        if time.monotonic() >= self.finder.failed_until:
            self.finder.wait(entry, max(self.options.wait_seconds, COMPILER_SECONDS))
        return entry.call is not None

    def wait(self, entry: Entry) -> None:
        """Wait for an entry that is being filled in, as long as the options say, unless that was in vain lately."""
        in_vain_until = max(self._late_until, self.finder.failed_until)
        if time.monotonic() >= in_vain_until and not entry.ready.wait(self.options.wait_seconds):
            self._late_until = time.monotonic() + self.options.retry_seconds

    def again(self, entry: Entry) -> None:
        """Ask for an entry whose time has come, behind the caller's back."""
        if _capturing(entry.device):
            return
        with self._lock:
            due = entry.until <= time.monotonic()
            entry.until = time.monotonic() + self.options.retry_seconds
        if due:
            self.finder.find(entry)

    def misses_are_due(self) -> None:
        """Each miss, and each neighbour's kernel, is asked for again when it is needed next."""
        with self._lock:
            for entry in self.table.values():
                if entry.until != inf:
                    entry.until = 0.0

    def settle(self, seconds: float | None) -> bool:
        return self.finder.settle(seconds)

    def close(self) -> None:
        self.finder.close()

    def computes(self, device: torch.device) -> bool:
        """Whether calls on tensors of this device may run kernels."""
        if not self.options.enabled:
            return False
        kind: str = device.type
        return kind == ("cpu" if self.options.target == "cpu" else "cuda")

    def _keep(self, key: Key, entry: Entry) -> Entry:
        with self._lock:
            if len(self.table) >= MOST_KEYS and key not in self.table:
                full = Entry(None, entry.device)
                full.ready.set()
                return full
            return self.table.setdefault(key, entry)


def _capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, in which no module may be loaded."""
    return bool(device.type == "cuda" and torch.cuda.is_current_stream_capturing())


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator as its call has it: of tensors, and of options, which are hashable.

    `pack`: both of these, from the arguments of `torch.ops.cukiln`. `plan`: None where no kernel takes them. `own`:
    PyTorch's way to compute the same. `form`: a result with the strides that the operator promises.
    """

    name: str
    pack: Callable[..., tuple[Tensors, Any]]
    plan: Callable[[Tensors, Any], Plan | None]
    own: Callable[[Tensors, Any], torch.Tensor]
    form: Callable[[torch.Tensor, Tensors], torch.Tensor] = lambda made, _: made.contiguous()


class _Current:
    """The process's dispatcher: a variable of a thread or a context would not reach autograd's threads. It is the one
    that was installed last among those that are not removed: blocks of several threads end in any order."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher(Options())
        self.installed = [self.dispatcher]  # that of `configure` first
        self.lock = threading.Lock()
        self.graphs_lack_kernels = False  # whether compiled graphs have PyTorch's own for want of kernels

    def set(self, installed: list[Dispatcher]) -> None:
        self.installed, self.dispatcher = installed, installed[-1]


_CURRENT = _Current()


def configure(**options: Unpack[OptionsGiven]) -> None:
    """Where the kernels of `cukiln.torch` come from, in the whole process from now on: `cukiln.torch.Options`. What is
    not named is as by default; blocks of `using`, `counted` and `record` end with it. Kernels that were found before
    are looked up again, those of compiled graphs too."""
    made = Dispatcher(Options(**options))
    with _CURRENT.lock:
        before = _CURRENT.installed
        _CURRENT.set([made])
    for dispatcher in before:
        dispatcher.close()
    forget_graphs()


@contextmanager
def using(**options: Unpack[OptionsGiven]) -> Iterator[None]:
    """`configure` for the calls inside the `with`, of all threads; what was found before is there again after it."""
    made = Dispatcher(Options(**options))
    install(made)
    try:
        yield
    finally:
        remove(made)
        made.close()


def settle(seconds: float | None = None) -> bool:
    """Wait until every kernel that calls have asked for is there, or known to be missing; False where `seconds` were
    over before. Call it after a first run, before a CUDA graph is captured or something is timed."""
    if seconds is not None:
        check_seconds("seconds", seconds)
    return _CURRENT.dispatcher.settle(seconds)


def install(dispatcher: Dispatcher) -> None:
    """Make it the process's, until it is removed or another one is installed."""
    with _CURRENT.lock:
        _CURRENT.set([*_CURRENT.installed, dispatcher])


def remove(dispatcher: Dispatcher) -> None:
    """What was installed after it stays the process's; else what was there before it is again."""
    with _CURRENT.lock:
        if dispatcher in _CURRENT.installed:  # unless `configure` has removed it
            _CURRENT.set([other for other in _CURRENT.installed if other is not dispatcher])


def graph_lacks_kernel() -> None:
    """A graph that is compiled now has PyTorch's own for want of a kernel."""
    _CURRENT.graphs_lack_kernels = True


def forget_graphs() -> None:
    """Have such graphs compiled again with their next call, and all others of the process: Dynamo forgets no single
    ones."""
    if _CURRENT.graphs_lack_kernels:
        _CURRENT.graphs_lack_kernels = False
        torch._dynamo.reset()  # imported by what has compiled them


def current() -> Dispatcher:
    """The process's."""
    return _CURRENT.dispatcher


def _after_fork() -> None:
    _CURRENT.lock = threading.Lock()
    for dispatcher in _CURRENT.installed:
        dispatcher.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def as_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether its calls are those of a GPU: there, or recorded for one."""
    return tensor.is_cuda or _CURRENT.dispatcher.of_gpus


def run(operator: Operator, tensors: Tensors, options: Hashable) -> torch.Tensor:
    """The call's kernel, or PyTorch's own operator. Nothing is recorded for gradients by the kernel."""
    dispatcher = _CURRENT.dispatcher
    try:
        key = (
            operator.name,
            options,
            *[(t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15, t.is_neg()) for t in tensors],
        )
    except RuntimeError:  # a tensor without strides or without memory: sparse, nested
        return operator.own(tensors, options)
    entry = dispatcher.table.get(key)
    if entry is None:
        plan = None if _unlike(tensors) else operator.plan(tensors, options)
        entry = dispatcher.first(key, plan, tensors[0].device)
    if entry.until <= time.monotonic():
        dispatcher.again(entry)
    elif entry.call is None and not entry.ready.is_set():
        dispatcher.wait(entry)
    if entry.call is not None:
        return entry.call(*tensors)
    return operator.own(tensors, options)


def _unlike(tensors: Tensors) -> bool:
    """Whether no kernel takes these together: of several devices, or negated when they are read."""
    device = tensors[0].device
    return any(tensor.device != device or tensor.is_neg() or tensor.numel() == 0 for tensor in tensors)
