"""A service of real processes that is started again whenever its supervisor is gone, as an init system does."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
from redis import Redis
from redis.exceptions import RedisError
from sqlalchemy import make_url

from cukiln import Client
from cukiln.errors import CukilnError
from storage.config.settings import load_settings
from tests.faults import schedule
from tests.faults.schedule import Fault
from tests.faults.small_disk import SmallDisk
from tests.support.processes.running import name_of, processes_of, still_runs
from tests.support.processes.server_processes import MOUNTS, ServerProcess, start_process
from tests.support.run.places import ROOT
from workers.processes.process_tree import descendants
from workers.supervisor.serve import child_environment
from workers.supervisor.start_checks import free_port
from workers.wake_ups import url_file

T = TypeVar("T")
PATIENCE_SECONDS = 2.0  # until a process of the chosen kind is there: tools come and go
QUEUE_SECONDS = 60.0  # until valkey is there again: a log that a full disk cut off is mended before it starts
TOOLS = (
    "nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "g++", "cc1plus", "as", "ld", "collect2", "python",
)  # fmt: skip


class KilledService:
    """`folder`: data and temporary files, all of which are its own. `postgres`: the URL of a server that this run may
    crash; SQLite where there is none. `disk`: of the data folder, where it is one that this run may fill. `compiled`:
    its processes are forks of one that has imported everything, and keep there what runs kernels on the CPU."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        postgres: str | None = None,
        disk: SmallDisk | None = None,
        compiled: Path | None = None,
    ) -> None:
        self.folder, self.temporary = folder, folder / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        self.killed: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self._postgres, self._disk, self._seed, self._compiled = postgres, disk, seed, compiled
        self._undo: list[tuple[float, Callable[[], None]]] = []  # and when
        own = {} if postgres is None else {"database_url": postgres}
        settings = load_settings(data_dir=folder / "data", port=free_port("127.0.0.1"), gpus="none", **own)
        self._environment = {**child_environment(settings), "TMPDIR": str(self.temporary)}
        self.client = Client(f"http://127.0.0.1:{settings.port}", timeout=10.0)
        self.settings = settings if disk is None else load_settings(data_dir=disk.seen_from_here, gpus="none", **own)
        self._fork_server: psutil.Process | None = None
        self._supervisor = self._start()

    def _start(self) -> subprocess.Popen[bytes] | ServerProcess:
        if self._compiled is not None:
            return self._fork("command", str(self._compiled), "serve", log="serve.log")
        with (self.folder / "serve.log").open("ab") as log:
            return subprocess.Popen(
                self._where_the_data_are(sys.executable, "-m", "cukiln", "serve"),
                cwd=ROOT,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _fork(self, role: str, *words: str, log: str) -> ServerProcess:
        mounts = {} if self._disk is None else {MOUNTS: str(self._disk.holder)}
        return start_process(role, *words, env={**self._environment, **mounts}, log=self.folder / log)

    def _where_the_data_are(self, *command: str) -> list[str]:
        return [*command] if self._disk is None else self._disk.inside(*command)

    def wrong_in_its_data(self) -> list[str]:
        """Once all jobs have ended."""
        output = self.folder / "checks.json"
        if self._compiled is not None:
            assert self._fork("checks", log=output.name).wait() == 0, output.read_text()
        else:
            command = self._where_the_data_are(sys.executable, "-m", "tests.faults.checks")
            environment = {**self._environment, "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"}
            with output.open("wb") as file:
                subprocess.run(command, env=environment, cwd=ROOT, stdout=file, check=True)
        wrong: list[str] = json.loads(output.read_text())
        return wrong

    def keep(self) -> None:
        """Start the supervisor again where it has ended, and undo what has lasted long enough."""
        if self._supervisor.poll() is not None:
            self._supervisor = self._start()
        self._wake(time.monotonic())

    def _wake(self, now: float) -> None:
        due = [undo for until, undo in self._undo if until <= now]
        self._undo = [(until, undo) for until, undo in self._undo if until > now]
        for undo in due:
            with suppress(psutil.NoSuchProcess):
                undo()

    def _later(self, fault: Fault, undo: Callable[[], None]) -> str:
        self._undo.append((time.monotonic() + fault.seconds, undo))
        return f"for {fault.seconds:.1f} s"

    def ask(self, question: Callable[[Client], T], seconds: float = 60.0) -> T:
        """Until the API answers: it may be away, and so may its database or its queue."""
        deadline = time.monotonic() + seconds
        while True:
            self.keep()
            try:
                return question(self.client)
            except CukilnError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def kill_one(self, number: int) -> str | None:
        """SIGKILL one of its processes: what was chosen and what it was, None where it has to come up first."""
        fault = schedule.kill(self._seed, number)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._of(fault.chosen) and time.monotonic() < deadline:
            self.keep()
            time.sleep(0.05)
        return self._do(fault, self._kill, self.killed)

    def do_another(self, number: int) -> str | None:
        """Anything but a kill, after kill `number`; the same."""
        return self._do(schedule.another(self._seed, number), self._do_to, self.others)

    def _do(self, fault: Fault, do: Callable[[str, Fault], str | None], counts: Counter[str]) -> str | None:
        self.keep()
        for kind in fault.kinds:
            try:
                victim = do(kind, fault)
            except (psutil.NoSuchProcess, OSError, RedisError):
                continue  # it has just ended
            if victim is not None:
                counts[kind] += 1
                return f"{fault.chosen}: {kind} ({victim})"
        return None

    def _kill(self, kind: str, fault: Fault) -> str | None:
        process = _pick(self._of(kind), fault)
        if process is None:
            return None
        name = process.name()
        process.kill()
        return name

    def _do_to(self, kind: str, fault: Fault) -> str | None:
        word, _, rest = kind.partition(" ")
        if kind == "database":
            return self._crash_database(fault)
        if kind in ("full disk", "read-only blobs"):
            return self._spoil_disk(kind, fault)
        if kind == "empty queue":
            return self._empty_queue()
        process = _pick(self._of("valkey" if kind == "torn log" else rest), fault)
        if process is None:
            return None
        name = process.name()
        if word == "pause":
            process.suspend()
            return f"{name}, {self._later(fault, process.resume)}"
        newest = max((self.settings.data_dir / "valkey" / "appendonlydir").glob("*.incr.aof"))
        with newest.open("ab") as log:
            log.write(b"*3\r\n$999")
        process.kill()
        return name

    def _empty_queue(self) -> str:
        """As soon as it is there: the fault before may have killed it."""
        deadline = time.monotonic() + QUEUE_SECONDS
        while True:
            self.keep()
            try:
                with Redis.from_url(self._queue_seen_from_here(), socket_timeout=5.0) as redis:
                    redis.flushall()
                return "valkey"
            except (OSError, RedisError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _queue_seen_from_here(self) -> str:
        """Its socket lies on the disk of the data."""
        url = url_file(self.settings.data_dir / "valkey").read_text()
        return url.replace(str(self.folder / "data"), str(self.settings.data_dir))

    def _spoil_disk(self, kind: str, fault: Fault) -> str | None:
        if self._disk is None:
            return None
        if kind == "full disk":
            self._disk.fill()
            return self._later(fault, self._disk.empty)
        self._disk.close_blobs()
        return self._later(fault, self._disk.open_blobs)

    def _crash_database(self, fault: Fault) -> str | None:
        """SIGKILL one of PostgreSQL's processes: the server cuts off all clients and recovers."""
        if self._postgres is None:
            return None
        folder = str(make_url(self._postgres).query["host"])
        server = psutil.Process(int((Path(folder) / "data" / "postmaster.pid").read_text().split()[0]))
        process = _pick(server.children(), fault)
        if process is None:
            return None
        process.kill()
        return "one of PostgreSQL's processes"

    def _of(self, kind: str) -> list[psutil.Process]:
        if kind == "supervisor":
            return [psutil.Process(self._supervisor.pid)] if self._supervisor.poll() is None else []
        return [process for top in self._tops() for process in _below(top) if _kind_of(process) == kind]

    def _tops(self) -> list[int]:
        """The supervisor, and the fork server where that is no child of it."""
        if self._compiled is not None and (self._fork_server is None or not still_runs(self._fork_server)):
            found = [process for process in processes_of(self.folder) if name_of(process) == "fork server"]
            self._fork_server = found[0] if found else None
        return [self._supervisor.pid, *([] if self._fork_server is None else [self._fork_server.pid])]

    def stop(self) -> list[str]:
        """Returns what is left of it: processes, temporary files."""
        self.client.close()
        self._wake(math.inf)
        if self._supervisor.poll() is None:
            self._supervisor.send_signal(signal.SIGTERM)
        self._supervisor.wait(30)
        deadline = time.monotonic() + 10.0  # cleaners remove folders after their owners have ended
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _left(self) -> list[str]:
        running = [f"{process.pid} {process.name()}" for process in processes_of(self.folder)]
        return running + [str(path.relative_to(self.temporary)) for path in self.temporary.iterdir()]


def _pick(processes: list[psutil.Process], fault: Fault) -> psutil.Process | None:
    return processes[int(fault.victim * len(processes))] if processes else None


def _below(pid: int) -> Iterator[psutil.Process]:
    for member in descendants(pid)[1:]:
        with suppress(psutil.NoSuchProcess):
            yield psutil.Process(member)


def _kind_of(process: psutil.Process) -> str | None:
    """By the names that processes give themselves: a worker child has that of its worker, which is its parent."""
    try:
        name, parent = process.name(), process.parent()
        if name in ("api", "api bodies", "valkey-server", "reconcile", "fork server", "fence server"):
            return {"api bodies": "bodies", "valkey-server": "valkey", "fence server": "fence"}.get(name, name)
        if name.startswith(("plan", "compile")):
            return "worker child" if parent is not None and parent.name() == name else "worker"
        return "tool" if name in TOOLS else None
    except psutil.NoSuchProcess:
        return None


def request(number: int, kernels: int) -> dict[str, Any]:
    """A job of two problems of so many candidates, some of whose kernels other jobs share."""
    problems = [
        {"operator": "matmul", "m": 64 * (number + 1), "n": 256, "k": 256, "layout": "nn", "dtype": dtype}
        for dtype in ("float32", "float16")
    ]
    return {"target": "sm_90a", "problems": problems, "search": {"level": 2, "limit": kernels, "seed": number // 2}}


def wait_until_ready(service: KilledService) -> None:
    service.ask(lambda client: client.targets(), seconds=90.0)


def leave_environment() -> None:
    """What would lead the service to another one."""
    for name in ("CUKILN_URL", "DATABASE_URL", "REDIS_URL"):
        os.environ.pop(name, None)
