"""A service of real processes that is started again whenever its supervisor is gone, as an init system does."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
from redis import Redis
from redis.exceptions import RedisError
from sqlalchemy import make_url

from cukiln import Client
from cukiln.errors import CukilnError
from storage.settings import load_settings
from tests.fixtures_queue import processes_of
from workers.embedded_valkey import url_file
from workers.serve import child_environment
from workers.start_checks import free_port

ROOT = Path(__file__).parents[2]
T = TypeVar("T")
# How often each kind of process is killed, of a hundred kills.
KINDS = {
    "tool": 40, "horse": 20, "worker": 14, "fence": 6, "api": 8, "valkey": 5, "reconcile": 3, "fork server": 2,
    "supervisor": 2,
}  # fmt: skip
# How often anything else is done to it, after one kill in seven.
OTHERS = {"pause worker": 4, "pause api": 2, "pause valkey": 2, "empty queue": 2, "torn log": 1, "database": 2}
PAUSES = (1.0, 12.0)  # seconds: shorter and longer than the leases, and than what a silent API is given
TOOLS = ("nvcc", "cicc", "ptxas", "g++", "cc1plus", "as", "ld", "collect2", "python")


class KilledService:
    """`folder`: data and temporary files, all of which are its own. `postgres`: the URL of a server that this run may
    crash; SQLite where there is none."""

    def __init__(self, folder: Path, seed: int, postgres: str | None = None) -> None:
        self.folder, self.temporary = folder, folder / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        self.killed: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self._postgres, self._paused = postgres, dict[psutil.Process, float]()
        self._random = random.Random(seed)
        own = {} if postgres is None else {"database_url": postgres}
        settings = load_settings(data_dir=folder / "data", port=free_port("127.0.0.1"), gpus="none", **own)
        self._environment = {**child_environment(settings), "TMPDIR": str(self.temporary)}
        self.client = Client(f"http://127.0.0.1:{settings.port}", timeout=10.0)
        self.settings = settings
        self._supervisor = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with (self.folder / "serve.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "cukiln", "serve"],
                cwd=ROOT,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def keep(self) -> None:
        """Start the supervisor again where it has ended, and let go on what was paused for long enough."""
        if self._supervisor.poll() is not None:
            self._supervisor = self._start()
        self._wake(time.monotonic())

    def _wake(self, now: float) -> None:
        for process in [process for process, until in self._paused.items() if until <= now]:
            del self._paused[process]
            with suppress(psutil.NoSuchProcess):
                process.resume()

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

    def kill_one(self) -> str | None:
        """SIGKILL one of its processes; what it was, None where there was none of the kind that was drawn."""
        self.keep()
        (kind,) = self._random.choices([*KINDS], [*KINDS.values()])
        found = self._of(kind)
        if not found:
            return None
        process = self._random.choice(found)
        try:
            name = process.name()
            process.kill()
        except psutil.NoSuchProcess:
            return None
        self.killed[kind] += 1
        return f"{kind} ({name})"

    def do_another(self) -> str | None:
        """Anything but a kill; what it was, None where it could not be done."""
        self.keep()
        (kind,) = self._random.choices([*OTHERS], [*OTHERS.values()])
        try:
            done = self._do(kind)
        except (psutil.NoSuchProcess, OSError, RedisError):
            return None  # it has just ended
        self.others[kind] += done
        return kind if done else None

    def _do(self, kind: str) -> bool:
        word, _, rest = kind.partition(" ")
        if kind == "database":
            return self._crash_database()
        if kind == "empty queue":
            url = url_file(self.settings.data_dir / "valkey").read_text()
            with Redis.from_url(url, socket_timeout=1.0) as redis:
                return bool(redis.flushall())
        found = self._of("valkey" if kind == "torn log" else rest)
        if not found:
            return False
        process = self._random.choice(found)
        if word == "pause":
            process.suspend()
            self._paused[process] = time.monotonic() + self._random.uniform(*PAUSES)
        else:
            newest = max((self.settings.data_dir / "valkey" / "appendonlydir").glob("*.incr.aof"))
            with newest.open("ab") as log:
                log.write(b"*3\r\n$999")
            process.kill()
        return True

    def _crash_database(self) -> bool:
        """SIGKILL one of PostgreSQL's processes: the server cuts off all clients and recovers."""
        if self._postgres is None:
            return False
        folder = str(make_url(self._postgres).query["host"])
        server = psutil.Process(int((Path(folder) / "data" / "postmaster.pid").read_text().split()[0]))
        backends = server.children()
        self._random.choice(backends).kill()
        return True

    def _of(self, kind: str) -> list[psutil.Process]:
        if kind == "supervisor":
            return [psutil.Process(self._supervisor.pid)] if self._supervisor.poll() is None else []
        try:
            below = psutil.Process(self._supervisor.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [process for process in below if _kind_of(process) == kind]

    def stop(self) -> list[str]:
        """Returns what is left of it: processes, temporary files."""
        self.client.close()
        self._wake(math.inf)
        if self._supervisor.poll() is None:
            self._supervisor.send_signal(signal.SIGTERM)
        self._supervisor.wait(30)
        deadline = time.monotonic() + 10.0  # undertakers remove folders after their owners have ended
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _left(self) -> list[str]:
        running = [f"{process.pid} {process.name()}" for process in processes_of(self.folder)]
        return running + [str(path.relative_to(self.temporary)) for path in self.temporary.iterdir()]


def _kind_of(process: psutil.Process) -> str | None:
    """By the names that processes give themselves: a horse has that of its worker, which is its parent."""
    try:
        name, parent = process.name(), process.parent()
        if name in ("api", "valkey-server", "reconcile", "fork server", "fence server"):
            return {"valkey-server": "valkey", "fence server": "fence"}.get(name, name)
        if name.startswith(("plan", "compile")):
            return "horse" if parent is not None and parent.name() == name else "worker"
        return "tool" if name in TOOLS else None
    except psutil.NoSuchProcess:
        return None


def request(number: int) -> dict[str, Any]:
    """A job of two problems, some of whose kernels other jobs share."""
    problems = [
        {"operator": "matmul", "m": 64 * (number + 1), "n": 256, "k": 256, "layout": "nn", "dtype": dtype}
        for dtype in ("float32", "float16")
    ]
    return {"target": "sm_90a", "problems": problems, "search": {"level": 2, "limit": 6, "seed": number // 2}}


def wait_until_ready(service: KilledService) -> None:
    service.ask(lambda client: client.targets(), seconds=90.0)


def leave_environment() -> None:
    """What would lead the service to another one."""
    for name in ("CUKILN_URL", "DATABASE_URL", "REDIS_URL"):
        os.environ.pop(name, None)
