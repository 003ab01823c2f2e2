"""Finds the kernels of problems on a thread of its own, so that no call waits for a service beyond its limit."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, TypeAlias

import torch

from cukiln.client import Client
from cukiln.errors import CukilnError
from cukiln.gpu import target_of
from cukiln.kernels.load_kernel import Kernel, choose, load
from cukiln.operations.state import NO_ANSWER
from cukiln.shared_client import shared_client
from cukiln.torch.options import Options
from cukiln.torch.plan import Call, Plan, bind
from cukiln.types import FrontEntry, WinnerRecord

LOG = logging.getLogger("cukiln.torch")
AT_ONCE = 100  # problems of one lookup
Load: TypeAlias = Callable[[FrontEntry, Client], Kernel]


class Entry:
    """What is known of one kind of call. `call`: the kernel's; None: PyTorch's own runs. From `until`
    (`time.monotonic()`) on the service is asked again."""

    __slots__ = ("call", "device", "plan", "ready", "until")

    def __init__(self, plan: Plan | None, device: torch.device) -> None:
        self.call: Call | None = None
        self.until = inf
        self.plan, self.device = plan, device
        self.ready = threading.Event()


def load_entry(entry: FrontEntry, client: Client) -> Kernel:
    return load(entry, client=client)


class Finder:
    """Looks problems up and loads their kernels. `failed_until`: until when the service is taken for gone."""

    def __init__(self, options: Options, load_kernel: Load = load_entry) -> None:
        self._options, self._load = options, load_kernel
        self._client = options.client
        self._queue: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._asked: set[Entry] = set()  # and not answered yet
        self._thread: threading.Thread | None = None
        self._closed = False
        self.failed_until = 0.0
        self._said: set[str] = set()

    def find(self, entry: Entry) -> None:
        """Fill the entry in, later; its `ready` is set then."""
        with self._changed:
            if entry in self._asked:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="cukiln-torch", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # of a machine that has no more of them
                    self._leave(entry)
                    self._say(f"finding the kernel of {_of(entry)}: {error}")
                    return
                self._thread = thread
            self._asked.add(entry)
            self._queue.put(entry)

    def settle(self, seconds: float | None) -> bool:
        """Wait until all that is asked now is answered, also what was asked again; False where it took longer."""
        with self._changed:
            asked = set(self._asked)
            return self._changed.wait_for(lambda: asked.isdisjoint(self._asked), seconds)

    def wait(self, entry: Entry, seconds: float) -> None:
        """Wait until this entry is answered, also where it was asked again; at once where it is not being asked."""
        if not entry.ready.is_set():  # not for those that are asked with it
            entry.ready.wait(seconds)
            return
        with self._changed:
            self._changed.wait_for(lambda: entry not in self._asked, seconds)

    def close(self) -> None:
        """The thread ends when all that was asked is answered. What is asked later, by a call that was under way, is
        answered by another one."""
        with self._changed:
            self._closed = True
            self._queue.put(None)  # wakes it

    def _work(self) -> None:
        while entries := self._next():
            try:
                self._find(entries)
            except BaseException:  # this thread serves others, too
                if not getattr(self._client, "_closed", False):  # httpx2's, of a client that was closed meanwhile
                    LOG.exception("finding the kernel of %s; PyTorch's own operator runs", _of(entries[0]))
            finally:
                for entry in entries:
                    if not entry.ready.is_set():  # it was left out, by whatever ended the search
                        self._leave(entry)
                with self._changed:
                    self._asked.difference_update(entries)
                    self._changed.notify_all()

    def _next(self) -> list[Entry]:
        """Entries to find, waited for; none where this thread is to end."""
        while True:
            with self._changed:
                if self._closed and self._queue.empty():
                    self._thread = None
                    return []
            asked = [self._queue.get()]
            while len(asked) < AT_ONCE and not self._queue.empty():
                asked.append(self._queue.get())
            if entries := [entry for entry in asked if entry is not None]:
                return entries

    def _leave(self, entry: Entry) -> None:
        """To PyTorch's own operator, until it is asked for again."""
        entry.until = time.monotonic() + self._options.retry_seconds
        entry.ready.set()

    def _find(self, entries: Sequence[Entry]) -> None:
        try:
            if self._client is None:
                self._client = shared_client(self._options.url)
            records = self._look_up(entries)
        except CukilnError as error:
            if len(entries) > 1:  # one of them is refused
                for entry in entries:
                    self._find([entry])
                return
            self._say(f"looking up {_of(entries[0])}: {error}")
            records = [None]
        for entry, record in zip(entries, records, strict=True):
            call = None
            try:
                if record is not None:
                    call = self._call(entry, record)
            except CukilnError as error:
                if isinstance(error, NO_ANSWER):
                    self.failed_until = time.monotonic() + self._options.retry_seconds
                self._say(f"loading the kernel of {_of(entry)}: {error}")
                record = None
            # A neighbour's kernel serves until the problem's own is tuned.
            settled = record is not None and record.tuned_for is None
            entry.until = inf if settled else time.monotonic() + self._options.retry_seconds
            if call is not None or settled or entry.call is None:
                entry.call = call
            entry.ready.set()

    def _look_up(self, entries: Sequence[Entry]) -> list[WinnerRecord | None]:
        assert self._client is not None
        options = self._options
        problems: list[Any] = [
            {**_problem(entry), "target": options.target or device_target(entry.device)} for entry in entries
        ]
        more: dict[str, Any] = {} if options.on_miss == "none" else {"on_miss": options.on_miss}
        answers = self._client.lookup(
            problems,
            workspace_limit_bytes=options.workspace_limit_bytes,
            deterministic=options.deterministic,
            **more,
        )
        for answer in answers:
            if answer.unanswered is not None:
                self.failed_until = time.monotonic() + options.retry_seconds
        return [answer.record for answer in answers]

    def _call(self, entry: Entry, record: WinnerRecord) -> Call | None:
        """The call of the record's kernel; None where the vendor's library was faster."""
        assert self._client is not None and entry.plan is not None
        options = self._options
        chosen = choose(
            record, workspace_limit_bytes=options.workspace_limit_bytes, deterministic=options.deterministic
        )
        if record.vendor_won(chosen):
            return None
        kernel = self._load(chosen, self._client)
        if entry.device.type == "cuda":
            kernel.prepare(entry.device.index or 0)  # the first call would load it, in a graph that is captured too
        return bind(entry.plan, kernel)

    def _say(self, message: str) -> None:
        """Once: what is wrong now is wrong at the next try, too."""
        if message not in self._said and len(self._said) < 1000:
            self._said.add(message)
            LOG.warning("%s; PyTorch's own operator runs", message)


def device_target(device: torch.device) -> str:
    return target_of(torch.cuda.get_device_capability(device))


def _problem(entry: Entry) -> dict[str, Any]:
    assert entry.plan is not None
    return dict(entry.plan.problem)


def _of(entry: Entry) -> str:
    return ", ".join(f"{name} {value}" for name, value in _problem(entry).items())
