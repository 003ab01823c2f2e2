"""One running process tree: its limits, its output, its end. Made by `workers.processes.processes`."""

import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from storage.config.limits import EndedBy, Limits
from workers.processes import process_tree
from workers.processes.cause import Cause, cause_of, signals_in, signed
from workers.processes.job_files import disk_use

PROCESSES = 256
"""Of one tree at most; nvcc's has five. A bomb of them ends here, where no limit of the kernel ends it before."""
MAX_TAIL = 300  # characters of a tool's messages that go into an error message
BUSY_SHARE = 0.5  # of one core, at least: a tree that had less was kept from working, or waited for something
FILES = 16  # of the size of the largest that is allowed: so much may lie in a tree's folders; nvcc leaves a tenth
_TICK_SECONDS = 0.05
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Finished:
    """How a run ended. `returncode` is negative for a signal, as in subprocess, also where a shell or a compiler driver
    reported the death of a child of its own as 128 + signal. CPU seconds are of the whole tree."""

    argv: tuple[str, ...]
    returncode: int
    stdout: bytes
    stderr: bytes
    wall_seconds: float
    cpu_seconds: float
    peak_memory_bytes: int
    ended_by: EndedBy | None
    stalled: bool = False  # ended_by wall, for want of a core: says nothing about the work, unless that waits for a GPU

    @property
    def ok(self) -> bool:
        return self.returncode == 0 and self.ended_by is None

    def text(self) -> str:
        """Both streams, as text."""
        return (self.stdout + self.stderr).decode("utf-8", "replace")

    @property
    def cause(self) -> Cause:
        """What caused the end."""
        if self.stalled:
            return "machine"
        if self.ended_by is not None:
            return "cancelled" if self.ended_by == "cancelled" else "limit"
        return cause_of(self.returncode, self.text())

    def infrastructure_failure(self) -> str | None:
        """Why the machine and not the work is to blame for the end; None where it is not."""
        if self.cause != "machine":
            return None
        program, tail = Path(self.argv[0]).name, self.text().strip()[-MAX_TAIL:]
        if self.stalled:
            return f"{program} got less than {BUSY_SHARE:.0%} of a core in {self.wall_seconds:.1f} s: {tail}"
        if self.returncode < 0:
            return f"{program} was killed by {signal.Signals(-self.returncode).name}: {tail}"
        return f"{program} failed, and the machine is to blame: {tail}"


def once_more(run: Callable[[], Finished], *causes: Cause) -> Finished:
    """What `run` comes to; where it crashes, or ends by one of `causes`, what it comes to the second time."""
    finished = run()
    return run() if finished.cause in ("crash", *causes) else finished


@dataclass(frozen=True)
class Ending:
    """How a process ended: exit code (negative: a signal), CPU seconds of it and what it reaped, most KiB of memory."""

    returncode: int
    cpu_seconds: float
    max_rss_kib: int


def reap(pid: int, options: int = 0) -> Ending | None:
    """A child of this process; None where it runs and `options` has WNOHANG."""
    reaped, status, use = os.wait4(pid, options)
    return Ending(os.waitstatus_to_exitcode(status), use.ru_utime + use.ru_stime, use.ru_maxrss) if reaped else None


@dataclass(frozen=True)
class Leader:
    """The first process of a tree. `reap`: how it ended, None while it runs; its pid is its own until then."""

    pid: int
    stdout: IO[bytes]
    stderr: IO[bytes]
    reap: Callable[[], Ending | None]


@dataclass
class Stream:
    """Read it with `lines` or `wait`; `finished` is set once it has ended. `folders`: what it may write into."""

    argv: tuple[str, ...]
    leader: Leader
    limits: Limits
    cancel: threading.Event | None
    namespace: bool
    folders: Sequence[Path] = ()
    finished: Finished | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self._wall_from = (self._started, 0.0)  # and the tree's CPU seconds then
        self._stalled = False
        self._ended_by: EndedBy | None = None
        self._taken = {"stdout": bytearray(), "stderr": bytearray()}
        self._line_start = 0
        self._cpu = 0.0
        self._peak = 0
        self._next_look = self._started + 0.02
        self._selector = selectors.DefaultSelector()
        self._open = 0
        for name, pipe in (("stdout", self.leader.stdout), ("stderr", self.leader.stderr)):
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, name)
            self._open += 1

    def wait(self) -> Finished:
        """Until the end, under the limits."""
        while self.finished is None:
            self._pump()
        return self.finished

    def lines(self, timeout: float | None = None) -> Iterator[bytes]:
        """Yield stdout's lines (without their ends) until the tree has ended; `finished` is then set. Where no line
        comes for `timeout` seconds, the tree is killed and `finished.ended_by` is "wall". Limits are enforced while
        iterating."""
        quiet_since = (time.monotonic(), self._cpu)
        taken = self._taken["stdout"]
        while True:
            end = taken.find(b"\n", self._line_start)
            if end >= 0:
                line = bytes(taken[self._line_start : end])
                self._line_start = end + 1
                yield line
                quiet_since = (time.monotonic(), self._cpu)
                continue
            if self.finished is not None:
                break
            if timeout is not None and time.monotonic() - quiet_since[0] > timeout:
                self._kill_late(quiet_since)
            self._pump()
        if self._line_start < len(taken):
            line, self._line_start = bytes(taken[self._line_start :]), len(taken)
            yield line

    def restart_wall(self) -> None:
        """The limit on wall seconds counts from now on: what passed so far was a wait for another process."""
        self._wall_from = (time.monotonic(), self._cpu)

    def kill(self) -> None:
        """End the tree now; `finished` is set, `ended_by` is "cancelled"."""
        if self.finished is None:
            self._kill("cancelled")
            self.wait()

    def close(self) -> None:
        """Kill what still runs and free the pipes."""
        self.kill()
        self._selector.close()

    def _pump(self) -> None:
        """Read what is there, look at the limits, notice the end. At most one tick long."""
        if self._open:
            for key, _ in self._selector.select(_TICK_SECONDS if self._ended_by is None else 0.005):
                self._read(key.data, key.fileobj)  # type: ignore[arg-type]
        else:
            time.sleep(0.005)
        self._look()
        # The pipes close when the last process of the tree is gone, so the exit is looked for only near the end.
        if not self._open or self._ended_by is not None:
            self._reap()

    def _read(self, name: str, pipe: IO[bytes]) -> None:
        data = os.read(pipe.fileno(), _READ_BYTES)
        if not data:
            self._selector.unregister(pipe)
            pipe.close()
            self._open -= 1
            return
        room = self.limits.output_bytes - sum(map(len, self._taken.values()))
        self._taken[name] += data[: max(0, room)]
        if len(data) > room:
            self._kill("output")

    def _look(self) -> None:
        now = time.monotonic()
        if self._ended_by is None and self.cancel is not None and self.cancel.is_set():
            self._kill("cancelled")
        if self._ended_by is None and now - self._wall_from[0] > self.limits.wall_seconds:
            self._kill_late(self._wall_from)
        if now < self._next_look or self._ended_by is not None:
            return
        use = process_tree.usage(self.leader.pid, 2 if self.namespace else 1)
        self._cpu, self._peak = max(self._cpu, use.cpu_seconds), max(self._peak, use.memory_bytes)
        if self._cpu > self.limits.cpu_seconds:
            self._kill("cpu")
        elif use.memory_bytes > self.limits.memory_bytes:
            self._kill("memory")
        elif use.processes > PROCESSES:
            self._kill("processes")
        elif disk_use(self.folders) > FILES * self.limits.output_bytes:
            self._kill("output")
        self._next_look = now + _TICK_SECONDS

    def _kill_late(self, since: tuple[float, float]) -> None:
        if self._ended_by is None:
            began, cpu_then = since
            self._cpu = max(self._cpu, process_tree.usage(self.leader.pid).cpu_seconds)
            self._stalled = self._cpu - cpu_then < BUSY_SHARE * (time.monotonic() - began)
            self._kill("wall")

    def _kill(self, ended_by: EndedBy) -> None:
        """Kill the tree from its process 1, so that its leader can still reap it and its CPU seconds are not lost."""
        if self._ended_by is None:
            self._ended_by = ended_by
            if self.namespace:
                process_tree.kill_namespace(self.leader.pid)
            else:
                process_tree.end_sweeper(self.leader.pid)

    def _reap(self) -> None:
        ending = self.leader.reap()
        if ending is None:
            return
        if self._open:  # an outsider may hold a pipe that a dead tree has left: take what is there, wait for no more
            for key, _ in self._selector.select(0):
                self._read(key.data, key.fileobj)  # type: ignore[arg-type]
            for key in list(self._selector.get_map().values()):
                self._selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
            self._open = 0
        returncode = signed(ending.returncode)
        if self._ended_by is not None:
            returncode = -signal.SIGKILL
        cpu = max(self._cpu, ending.cpu_seconds)
        stdout, stderr = bytes(self._taken["stdout"]), bytes(self._taken["stderr"])
        self.finished = Finished(
            argv=self.argv,
            returncode=returncode,
            stdout=stdout,
            stderr=stderr,
            wall_seconds=time.monotonic() - self._started,
            cpu_seconds=cpu,
            peak_memory_bytes=max(self._peak, ending.max_rss_kib * 1024),
            ended_by=self._ended_by or _limit_of_the_kernel(returncode, stdout + stderr, cpu, self.limits),
            stalled=self._stalled,
        )


def _limit_of_the_kernel(returncode: int, stderr: bytes, cpu_seconds: float, limits: Limits) -> EndedBy | None:
    """Which rlimit ended the program or a child of it, where the look at the tree came too late."""
    signals = signals_in(returncode, stderr.decode("utf-8", "replace"))
    if signal.SIGXFSZ in signals:
        return "output"
    if signal.SIGXCPU in signals or (signal.SIGKILL in signals and cpu_seconds > limits.cpu_seconds):
        return "cpu"
    return None
