"""`cukiln serve`: the whole service on one machine, started, watched and stopped by one process.

```
serve ─┬─ valkey            unless REDIS_URL names a server
       └─ fork server ─┬─ api             python -m service
                       ├─ reconcile       leases, budgets, missing wake-ups
                       ├─ plan worker
                       ├─ compile worker  CUKILN_WORKERS of them
                       └─ gpu worker      one for each GPU that CUKILN_GPUS allows
```

A SIGKILL of the supervisor ends them all; one of the fork server ends all that it has forked, and they are started
again. One thread starts and watches both: the kernel ties a process to the thread that started it. Nothing is imported
early that is not needed before the fork server, which imports for a second.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pydantic import SecretStr

from storage.config.files import UMASK
from storage.config.settings import Settings, load_settings
from storage.errors import SettingsError, StorageError
from workers.processes.fence.access import ROOT
from workers.processes.fork_server import ForkServer, module_of
from workers.processes.processes import ProcessError
from workers.processes.supervised_process import ApiWatch, Child, StoppedWatch, answers, describe_exit, tail_of
from workers.supervisor.start_checks import ServeError, free_port, lock_folder, refuse_busy_port, refuse_half_restored

if TYPE_CHECKING:
    from workers.gpu.interface import Device
    from workers.supervisor.valkey import EmbeddedValkey

READY_SECONDS = 60.0
WATCH_SECONDS = 0.1
SAME_SIGNAL_SECONDS = 0.5
FORK_SERVER = "fork server"
API = "api"


@dataclass(frozen=True)
class Commands:
    """What the children run: `python -m MODULE …` by its `main()`, in a fork of a process that has imported it."""

    api: Sequence[str] = (sys.executable, "-m", "service")
    worker: Sequence[str] = (sys.executable, "-m", "workers.worker.main")


@dataclass(frozen=True)
class Running:
    """A service that is up."""

    url: str
    redis_url: str
    data_dir: Path
    pids: dict[str, int]  # by name: valkey, fork server, api, plan worker, compile worker 1, gpu worker 1, …


class Supervisor:
    """Start, watch and stop the service. All from one thread; `ask_to_stop` from any."""

    def __init__(
        self,
        settings: Settings,
        *,
        say: Callable[[str], None],
        logs: Path | None = None,
        commands: Commands | None = None,
    ) -> None:
        """`logs`: a folder for the children's output; None lets them write where this process writes."""
        self.settings = settings
        self._say = say
        self._logs = logs
        self._commands = commands or Commands()
        self._valkey: EmbeddedValkey | None = None
        self._server: ForkServer | None = None
        self._server_pid: int | None = None  # as last said
        self._server_stopped = StoppedWatch()
        self._children: list[Child] = []
        self.gpus: Sequence[Device] = ()  # those that are measured on, once it has started
        self._lock_file = -1
        self._stop = False
        self._asked_at = 0.0  # to stop, by `time.monotonic()`
        self._force = False
        self._umask: int | None = None  # of this process before
        self._api: ApiWatch | None = None

    def start(self) -> Running:
        """Everything up, or nothing: raises ServeError after stopping what it had started."""
        try:
            return self._start()
        except BaseException as error:
            self.stop()
            if isinstance(error, OSError | ProcessError | StorageError):
                raise ServeError(str(error)) from error
            if isinstance(error, ModuleNotFoundError):
                needed = f"the package {error.name!r} that the server needs is not installed"
                raise ServeError(f"{needed}: `make run` in the checkout installs it") from error
            raise

    def watch(self) -> None:
        """Keep the children running until `ask_to_stop`."""
        self._api = ApiWatch(_reachable(self.settings.host), self.settings.port)
        while not self._stop:
            messages = [self._valkey.keep()] if self._valkey is not None else []
            self._watch_server()
            for child in self._children:
                messages.append(child.keep())
                if child.name == API and self._api.is_silent(child.runs_for_seconds):
                    messages.append(child.end_hung("does not answer"))
            for message in filter(None, messages):
                self._say(message)
            time.sleep(WATCH_SECONDS)

    def ask_to_stop(self) -> None:
        """End `watch` soon; a later call makes `stop` stop waiting. One right behind the first does not: of a signal to
        the group of `make serve` it gets a second one, which make sends on."""
        now = time.monotonic()
        if not self._stop:
            self._stop, self._asked_at = True, now
        elif now - self._asked_at > SAME_SIGNAL_SECONDS:
            self._force = True

    def stop(self) -> None:
        """In order: no new jobs, then workers hand back what they hold, then the queue."""
        self._end([child for child in self._children if child.name == API])
        self._end([child for child in self._children if child.name != API])
        if self._api is not None:
            self._api.stop()
        self._children = []
        if self._server is not None:
            self._server.stop()
            self._server = None
        if self._valkey is not None:
            self._valkey.stop()
            self._valkey = None
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1
        if self._umask is not None:
            os.umask(self._umask)
            self._umask = None

    def _start(self) -> Running:
        settings = self.settings
        refuse_half_restored(settings.data_dir)
        self._umask = os.umask(UMASK)
        self._lock_file = lock_folder(settings.data_dir)
        if settings.port == 0:
            settings = self.settings = settings.model_copy(update={"port": free_port(settings.host)})
        else:
            refuse_busy_port(settings.host, settings.port)
        server = self._start_server()
        from workers.supervisor import foundation

        self.gpus = foundation.check_machine(settings)
        foundation.open_stores(settings)
        self._valkey = foundation.start_queue(settings)
        if self._valkey is not None:
            settings = self.settings = settings.model_copy(update={"redis_url": self._valkey.url})
        environment = worker_environment(settings)
        for name, argv, grace in foundation.roles(settings, self._commands.api, self._commands.worker, self.gpus):
            own = child_environment(settings) if name == API else environment
            self._children.append(Child(name, argv, grace, server, own, self._log_of(name)))
            self._children[-1].start()
        self._wait_until_ready(server)
        assert settings.redis_url is not None
        host = _reachable(settings.host)
        url = f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
        running = Running(url, settings.redis_url, settings.data_dir, self._pids())
        os.ftruncate(self._lock_file, 0)
        os.pwrite(self._lock_file, f"pid {os.getpid()}, {running.url}".encode(), 0)
        return running

    def _start_server(self) -> ForkServer:
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
        modules = filter(None, map(module_of, (self._commands.api, self._commands.worker)))
        environment, log = worker_environment(self.settings), self._log_of(FORK_SERVER)
        server = self._server = ForkServer(FORK_SERVER, list(modules), env=environment, log=log)
        server.ensure_running()
        self._server_pid = server.pid
        return server

    def _log_of(self, name: str) -> Path | None:
        """An empty file for its output, where the children have logs."""
        if self._logs is None:
            return None
        log = self._logs / f"{name.replace(' ', '-')}.log"
        log.unlink(missing_ok=True)
        return log

    def _pids(self) -> dict[str, int]:
        pids = {child.name: child.pid or 0 for child in self._children}
        for name, process in ((FORK_SERVER, self._server), ("valkey", self._valkey)):
            if process is not None:
                pids[name] = process.pid or 0
        return pids

    def _wait_until_ready(self, server: ForkServer) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while missing := self._missing():
            for child in self._children:
                if (code := child.ended()) is not None and not self._may_be_missing(child):
                    # The server's sockets close a moment before it can be reaped.
                    if (server_code := server.ended(1.0)) is not None:
                        raise _broken(f"the {FORK_SERVER}", server_code, server.log)
                    raise _broken(child.name, code, child.log)
            if self._stop:
                raise ServeError("stopped before it was ready")
            if time.monotonic() > deadline:
                raise ServeError(f"not ready after {READY_SECONDS:g} s: {', '.join(missing)}")
            time.sleep(0.02)

    def _may_be_missing(self, child: Child) -> bool:
        """A GPU that no setting names prevents no compiling where it fails: `watch` starts its worker again."""
        return self.settings.gpus == "auto" and child.name.startswith("gpu worker")

    def _missing(self) -> list[str]:
        from workers.supervisor import foundation

        alive = foundation.live_workers(self.settings.redis_url or "")
        workers = [
            child.name
            for child in self._children
            if "worker" in child.name
            and f"{socket.gethostname()}.{child.pid}" not in alive
            and not (self._may_be_missing(child) and child.ended() is not None)
        ]
        api = answers(_reachable(self.settings.host), self.settings.port)
        return workers if api else [API, *workers]

    def _watch_server(self) -> None:
        """End it where it is stopped; say that it has ended, or runs again: a child's start starts it."""
        assert self._server is not None
        if self._server_stopped.too_long(self._server.pid):
            self._say(f"{FORK_SERVER} is stopped by a signal: it is killed")
            self._server.stop()
        if (pid := self._server.pid) == self._server_pid:
            return
        self._server_pid = pid
        if pid is None:
            self._say(f"{FORK_SERVER} {describe_exit(self._server.ended() or 0)}, and with it all that it had forked")
        else:
            self._say(f"{FORK_SERVER} started again, pid {pid}")

    def _end(self, children: Sequence[Child]) -> None:
        # One that is not there yet ends with the fork server.
        children = [child for child in children if child.ended() is None and child.pid is not None]
        for child in children:
            child.ask_to_end()
        deadline = time.monotonic() + max((child.grace_seconds for child in children), default=0.0)
        while any(child.ended() is None for child in children):
            if self._force or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        for child in children:
            if not child.end(0.0):
                self._say(f"{child.name} did not end in time and was killed")


def serve(settings: Settings, *, commands: Commands | None = None) -> int:
    """Run until SIGINT or SIGTERM; a later one stops at once. Returns the exit status. For the main thread."""
    supervisor = Supervisor(settings, say=write_line, commands=commands)

    def asked(number: int, frame: FrameType | None) -> None:
        supervisor.ask_to_stop()

    before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        write_line(f"cukiln serve: data in {settings.data_dir}")
        running = supervisor.start()
        for name, pid in sorted(running.pids.items()):
            write_line(f"  {name:<18} pid {pid}")
        for number, device in enumerate(supervisor.gpus, 1):
            write_line(f"  {f'GPU {number}':<18} {device.name} {device.uuid}")
        write_line(f"  {'queue':<18} {running.redis_url if settings.redis_url is None else 'REDIS_URL'}")
        write_line(f"ready: {running.url} (Ctrl-C stops it)")
        supervisor.watch()
        write_line("stopping; Ctrl-C again stops without waiting")
    except ServeError as error:
        write_line(f"cukiln serve: {error}")
        return os.EX_CONFIG if isinstance(error.__cause__, SettingsError) else 1
    finally:
        supervisor.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
    write_line("stopped")
    return 0


@contextlib.contextmanager
def embedded(
    settings: Settings, *, commands: Commands | None = None, say: Callable[[str], None] = lambda message: None
) -> Iterator[Running]:
    """A service while the block runs; the children's output goes to `logs` in the data folder. Raises ServeError."""
    supervisor = Supervisor(settings, say=say, logs=settings.data_dir / "logs", commands=commands)
    up: Future[Running] = Future()

    def live() -> None:
        try:
            up.set_result(supervisor.start())
            supervisor.watch()
        except BaseException as error:
            if up.done():
                raise
            up.set_exception(error)
        finally:
            supervisor.stop()

    thread = threading.Thread(target=live, name="supervisor")
    thread.start()
    try:
        yield up.result()
    finally:
        supervisor.ask_to_stop()
        thread.join()


def main() -> int:
    """`cukiln serve`."""
    try:
        return serve(load_settings())
    except SettingsError as error:
        sys.stderr.write(f"cukiln serve: {error}\n")
        return os.EX_CONFIG


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def child_environment(settings: Settings) -> dict[str, str]:
    """Our environment, with every setting as it is here, however it was given."""
    environment = dict(os.environ)
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if value is None:
            environment.pop(str(field.alias), None)
        else:
            environment[str(field.alias)] = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
    paths = [str(ROOT), str(ROOT / "client"), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def worker_environment(settings: Settings) -> dict[str, str]:
    """The same for what needs no API key: all but the API. Without a key the address has to be the loopback's."""
    return child_environment(settings.model_copy(update={"api_key": None, "host": "127.0.0.1"}))


def _broken(name: str, code: int, log: Path | None) -> ServeError:
    tail = tail_of(log)
    return ServeError(f"{name} {describe_exit(code)} at its start" + (f":\n{tail}" if tail else ""))


def write_line(message: str) -> None:
    with contextlib.suppress(OSError):  # its disk is full, or its reader has ended
        sys.stdout.write(message + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
