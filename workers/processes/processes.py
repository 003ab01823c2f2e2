"""The one interface that starts processes: compilers, assemblers, kernels run on the CPU.

```
ProcessError                what was asked cannot be started here
├── ProgramMissing          the program is not installed
└── InfrastructureError     the machine failed, not the work: killed from outside, out of memory, disk full
```

A run owns a tree of processes: killing nvcc alone leaves cicc and its files behind. Each is a fork of the fence server,
a small process of this object, that has gone into its fence (`workers.processes.fence.fence`) before it becomes the
program.

Limits are enforced by looking at the whole tree every 20 to 50 ms, because every limit of the kernel is per process:
- CPU: utime + stime of the living and of the reaped; RLIMIT_CPU a little above it is the backstop;
- memory: resident anonymous pages. RLIMIT_AS would be wrong: address-sanitised programs map terabytes that they never
  touch, and a tool that runs into it dies with messages that look like a verdict on the kernel;
- output: RLIMIT_FSIZE per file, stdout and stderr together, and what lies in the child's own folders.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING
from uuid import uuid4

from storage.config.limits import EndedBy, Limits
from storage.errors import SettingsError
from workers.processes import process_stream
from workers.processes.fence.access import ROOT, Access, device_access, secrets_of, tool_access
from workers.processes.fence.fence import Fence, processes_of_all
from workers.processes.fence.means import Means
from workers.processes.fork_server import ForkServer, Request, module_of
from workers.processes.process_stream import Finished, Leader, Stream

if TYPE_CHECKING:
    from storage.config.settings import Settings

__all__ = [
    "EndedBy",
    "Finished",
    "InfrastructureError",
    "Limits",
    "ProcessError",
    "Processes",
    "ProgramMissing",
    "Stream",
    "fenced_processes",
]

log = logging.getLogger("cukiln.processes")


class ProcessError(Exception):
    """What was asked cannot be started on this machine."""


class ProgramMissing(ProcessError):
    """The program is not installed; `program` names it."""

    def __init__(self, program: str) -> None:
        super().__init__(program)
        self.program = program

    def __str__(self) -> str:
        return f"program not found: {self.program}"


class InfrastructureError(ProcessError):
    """The machine failed, not the work. Never remembered as a verdict; worth trying again, here or elsewhere.
    `stalled`: a tool slept until its wall limit."""

    def __init__(self, why: str, *, stalled: bool = False) -> None:
        super().__init__(why)
        self.stalled = stalled


# It makes the folder itself: there is no moment in which the folder stands without it. The pipe on its stdin ends with
# the last process that holds the other end. What the owner's children still write in their last moment keeps `rm` from
# removing a folder.
CLEANER = """
trap "" HUP INT PIPE TERM
mkdir -m "$2" -- "$1" || exit
echo made 2>/dev/null
exec >&- 2>&-
read line
for again in 1 2 3 4 5; do rm -rf -- "$1" && exit; sleep 0.5; done
"""
_FORK_SECONDS = 30.0  # for a fence server that is still importing, on a busy machine
_SYSTEM_PATH = "/usr/bin:/bin"
_MEANS = "workers.processes.fence.means"


class Processes:
    """Starts programs under limits. `secrets`: files and folders that no child may touch; `reads`: folders that every
    one may read beside the system's. `namespaces`: of a child's own, where the machine allows them; else its tree is
    found through a sub-reaper.

    All private folders live in one folder of this object. A shell that holds the other end of a pipe removes it as soon
    as this process is gone, however it went: a SIGKILLed worker leaves no temporary files.
    """

    def __init__(
        self,
        *,
        root: Path | None = None,
        secrets: Sequence[Path] = (),
        reads: Sequence[Path] = (),
        namespaces: bool = True,
    ) -> None:
        self._parent = root
        self.namespaces = namespaces
        self._secrets = tuple(secrets)
        self._reads = tuple(reads)
        self._lock = threading.RLock()
        self._root: Path | None = None
        self._owner = 0
        self._cleaner: subprocess.Popen[bytes] | None = None
        self._means: Means | None = None
        self._server: ForkServer | None = None
        self._warm: ForkServer | None = None

    @property
    def means(self) -> Means:
        """What a run is fenced in with on this machine. Tried once. Raises ProcessError."""
        with self._lock:
            if self._means is None:
                means = self._find_means()
                self._means = means if self.namespaces else replace(means, namespaces="", network=False, proc=False)
            return self._means

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        limits: Limits,
        env: Mapping[str, str] | None = None,
        cancel: threading.Event | None = None,
        device: bool = False,
        reads: Sequence[Path] = (),
        writes: Sequence[Path] = (),
    ) -> Finished:
        """Run to the end; arguments as of `stream`. Raises ProgramMissing, InfrastructureError."""
        with self.stream(
            argv, cwd=cwd, limits=limits, env=env, cancel=cancel, device=device, reads=reads, writes=writes
        ) as stream:
            return stream.wait()

    @contextlib.contextmanager
    def stream(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        limits: Limits,
        env: Mapping[str, str] | None = None,
        cancel: threading.Event | None = None,
        device: bool = False,
        reads: Sequence[Path] = (),
        writes: Sequence[Path] = (),
        stdin: bytes = b"",
    ) -> Iterator[Stream]:
        """Run with stdout read line by line. `stdin`: all that the program reads there, less than a pipe holds (64
        KiB). `reads`, `writes`: folders for it beside those that it has anyway; `cwd` is its own. Leaving the block
        kills what still runs."""
        program = shutil.which(argv[0], path=_path()) if "/" not in argv[0] else argv[0]
        if program is None or not os.access(program, os.X_OK):
            raise ProgramMissing(argv[0])
        with self.private_folder("tmp") as temporary:
            environment = {**_environment(), "TMPDIR": str(temporary), "HOME": str(temporary), **(env or {})}
            folders = [temporary] if cwd == Path("/") else [temporary, cwd]
            try:
                fence = self._fence([program, *argv[1:]], limits, [*folders, *writes], reads, device)
                self._hand_over(folders, fence.user)
                leader = self._start([program, *argv[1:]], cwd, environment, fence, stdin)
            except OSError as error:
                raise InfrastructureError(f"cannot start {argv[0]}: {error}") from error
            namespace = bool(self.means.namespaces)
            stream = Stream(tuple(argv), leader, limits, cancel, namespace=namespace, folders=folders)
            try:
                yield stream
            finally:
                stream.close()

    @contextlib.contextmanager
    def private_folder(self, name: str = "work") -> Iterator[Path]:
        """A folder of mode 700, removed on leaving the block and with the death of this process."""
        try:
            folder = Path(tempfile.mkdtemp(prefix=name + "-", dir=self._private_root()))
        except OSError as error:
            raise InfrastructureError(f"cannot make a temporary folder: {error}") from error
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def keep_warm(self, module: str, env: Mapping[str, str]) -> bool:
        """From now on `python -m MODULE …`, run with this Python, is forked from a process that has imported `module`
        with the environment `env`, and calls its `main()` inside the same fence. Called again, it starts that process,
        and the fence server, again where it has ended, and returns False: what this process has forked before does not
        find the new one. The calling thread must outlive the process."""
        if self._warm is None:
            self._warm = ForkServer("fence server", [module], env={**_environment(), **env}, cwd=Path("/"))
        runs = self._fence_server().ensure_running()
        return self._warm.ensure_running() and runs

    def _fence_server(self) -> ForkServer:
        """It imports next to nothing, so that its forks are fast, and ends when no process has its channel any more."""
        if self._server is None:
            env = {**_environment(), "PYTHONPATH": str(ROOT)}
            self._server = ForkServer("fence server", [_MEANS], env=env, cwd=Path("/"), tied=False)
            self._server.ensure_running()
        return self._server

    def _start(
        self, argv: Sequence[str], cwd: Path, env: Mapping[str, str], fence: Fence | None, stdin: bytes
    ) -> Leader:
        """A fork of the process that is kept warm, where that runs `argv`, else of the fence server."""
        (source, sink), (stdout, out), (stderr, err) = (_pipe() for _ in range(3))
        with source, out, err:
            with sink:
                sink.write(stdin)
            name = (module_of(argv) or "fence").rpartition(".")[2]  # another program brings its own name
            request = Request(name, argv, env, cwd=str(cwd), fence=fence)
            for server in self._servers(argv):
                forked = server.fork(request, [source.fileno(), out.fileno(), err.fileno()])
                forked.receive(_FORK_SECONDS)
                if forked.pid is not None:
                    return Leader(forked.pid, stdout, stderr, forked.wait)
                log.warning("a fence server has ended, or does not answer: another starts %s", argv[0])
        raise OSError("no fence server answers")

    def _servers(self, argv: Sequence[str]) -> Iterator[ForkServer]:
        """Those to try, one after the other: one that was killed is started again, by a forked worker for itself."""
        if self._warm is not None and module_of(argv) in self._warm.modules:
            yield self._warm
        with self._lock:
            server = self._fence_server()
        yield server
        with self._lock:
            if self._server is server:
                server.stop()
                self._server = None
            server = self._fence_server()
        yield server

    def _find_means(self) -> Means:
        argv = [sys.executable, "-m", _MEANS]
        try:
            leader = self._start(argv, Path("/"), {**_environment(), "PYTHONPATH": str(ROOT)}, None, b"")
        except OSError as error:
            raise InfrastructureError(f"this Python cannot be started: {error}") from error
        with leader.stdout, leader.stderr:
            output, faults = leader.stdout.read(), leader.stderr.read()
        try:
            return Means(**json.loads(output))
        except ValueError as error:
            raise InfrastructureError(f"the fence cannot be tried: {faults.decode(errors='replace')[-500:]}") from error

    def _fence(
        self, argv: Sequence[str], limits: Limits, writes: Sequence[Path], reads: Sequence[Path], device: bool
    ) -> Fence:
        means = self.means
        if device and not means.proc:  # CUDA does not start in a namespace whose numbers /proc does not have
            means = replace(means, namespaces="", network=False)
        access_of = partial(self._access, means, argv, writes, reads, device)
        user = means.user_of(os.getpid())
        if device or not all(map(self._is_own, writes)):
            user = None  # another folder is not handed over
        access = access_of(user is not None)
        if user is not None and (not access.is_open or (access.covers and not means.namespaces)):
            # What it needs is closed to others, or lies where they cannot go.
            user, access = None, access_of(False)
        return Fence(
            means=means,
            # Backstops of the limits that are looked at.
            cpu_seconds=int(limits.cpu_seconds) + 2,
            file_bytes=limits.output_bytes,
            rules=access.rules,
            covers=access.covers if means.namespaces else {},
            user=user,
            processes=None if device else self._most_processes(user),
            device=device,
        )

    def _access(
        self,
        means: Means,
        argv: Sequence[str],
        writes: Sequence[Path],
        reads: Sequence[Path],
        device: bool,
        own_user: bool,
    ) -> Access:
        hide = bool(means.namespaces) and not means.landlock
        if device:
            return device_access(secrets=self._secrets, writes=writes, hide=hide)
        return tool_access(
            Path(argv[0]),
            secrets=self._secrets,
            reads=(*self._reads, *reads),
            writes=writes,
            python=sys.executable in argv,
            own_proc=means.proc,
            own_user=own_user,
            hide=hide,
        )

    def _is_own(self, folder: Path) -> bool:
        return self._root in folder.parents

    def _hand_over(self, folders: Sequence[Path], user: int | None) -> None:
        """To the child's own user, or back; what was written there stays readable (`workers.processes.job_files`)."""
        if self.means.users:
            for folder in filter(self._is_own, folders):
                os.chown(folder, *((os.geteuid(), os.getegid()) if user is None else (user, user)))

    def _most_processes(self, user: int | None) -> int | None:
        """RLIMIT_NPROC counts processes of a user, in a namespace of users those of it; it does not bind root."""
        if user is None and os.geteuid() == 0:
            return None
        return process_stream.PROCESSES + (
            0 if user is not None or self.means.namespaces == "user" else processes_of_all()
        )

    def close(self) -> None:
        """Remove the folder of this object and end its servers. Further runs make new ones."""
        for server in filter(None, (self._warm, self._server)):
            server.stop()
        self._warm = self._server = None
        with self._lock:
            cleaner, root = self._cleaner, self._root
            self._cleaner = self._root = None
            if cleaner is None or root is None or self._owner != os.getpid():
                return
        cleaner.send_signal(signal.SIGCONT)  # it may be stopped
        # A line, not the pipe's end alone: a fork of ours may hold that for long. A killed cleaner raises nothing here.
        cleaner.communicate(b"\n")
        cleaner.wait()
        if root.exists():  # also where another part of this process has reaped it, so that its status is unknown
            shutil.rmtree(root, ignore_errors=True)

    def _private_root(self) -> Path:
        with self._lock:
            # A forked worker must not use its parent's folder: its cleaner watches the parent.
            if self._root is None or self._owner != os.getpid() or not self._root.is_dir():
                root = (self._parent or Path(tempfile.gettempdir())) / f"cukiln-{uuid4().hex[:16]}"
                # Of a child's own user it has to be passed.
                mode = "711" if self.means.users and not self.means.namespaces else "700"
                cleaner = subprocess.Popen(
                    [_tool("sh"), "-c", CLEANER, "cleaner", str(root), mode],
                    env={"PATH": _SYSTEM_PATH},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                assert cleaner.stdin and cleaner.stdout
                with cleaner.stdout as stdout:
                    output = stdout.read()
                if output != b"made\n":
                    cleaner.stdin.close()
                    cleaner.wait()
                    root.mkdir()  # raises what kept it from doing so
                    root.rmdir()
                    raise OSError(errno.EAGAIN, f"no folder was made: {output.decode(errors='replace')}")
                self._root, self._owner, self._cleaner = root, os.getpid(), cleaner
            return self._root


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    reading, writing = os.pipe()
    return os.fdopen(reading, "rb", 0), os.fdopen(writing, "wb", 0)


def fenced_processes(settings: Settings) -> Processes:
    """Whose children may touch nothing of the service, and read the compilers' further folders. Raises SettingsError
    where one of these is missing."""
    reads = [Path(folder) for folder in settings.tool_folders.split(os.pathsep) if folder]
    for folder in reads:
        if not folder.is_dir():
            raise SettingsError(f"CUKILN_TOOL_FOLDERS names {folder}, which is not a folder: correct or remove it")
    return Processes(secrets=secrets_of(settings), reads=reads, namespaces=settings.pid_namespaces)


def _environment() -> dict[str, str]:
    return {"PATH": _path(), "LANG": "C", "LC_ALL": "C"}


def _path() -> str:
    return os.environ.get("PATH", os.defpath)


def _tool(name: str) -> str:
    """A tool of this module, also where PATH leaves the system's folders out. Raises FileNotFoundError."""
    program = shutil.which(name, path=f"{_SYSTEM_PATH}:{_path()}")
    if program is None:
        raise FileNotFoundError(f"{name} was not found")
    return program
