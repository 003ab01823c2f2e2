"""The one seam that starts processes: compilers, assemblers, kernels run on the CPU. Tests fake process faults here
only.

```
ProcessError                what was asked cannot be started here
├── ProgramMissing          the program is not installed
└── InfrastructureError     the machine failed, not the work: killed from outside, out of memory, disk full
```

A run owns a tree of processes, not one: killing nvcc alone leaves cicc and its temporary files behind for seconds.
Where a PID namespace is allowed, the tree is

```
caller ─ setpriv ► sh ► unshare ─ sh (process 1 of the namespace) ─ the program ─ what it starts
         (► : exec, same process; ─ : child)
```
and ends as a whole with process 1, which ends with unshare (`--kill-child`), which ends with the caller
(`--pdeathsig`), also where the caller is SIGKILLed. Elsewhere `sweep_children.py`, a sub-reaper, stands in unshare's
place.

Code that nobody has judged yet runs without a network: in a network namespace of its own, whose one interface (lo) is
down. Where the machine allows none, it runs all the same; `Processes.network_isolation` says so.

Limits are enforced by looking at the whole tree every 20 to 50 ms, because every limit of the kernel is per process:
- CPU: utime + stime of the living and of the reaped; RLIMIT_CPU a little above it is the backstop;
- memory: resident anonymous pages. RLIMIT_AS would be wrong: address-sanitised programs map terabytes that they never
  touch, and a tool that runs into it dies with words of its own that look like a verdict on the kernel;
- output: RLIMIT_FSIZE per file, and stdout and stderr together.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import IO, Literal

from workers.fence import Fence
from workers.fork_server import ForkServer, Request, module_of
from workers.running import EndedBy, Ending, Finished, Leader, Limits, Stream, reap

__all__ = [
    "EndedBy",
    "Finished",
    "InfrastructureError",
    "Limits",
    "ProcessError",
    "Processes",
    "ProgramMissing",
    "Stream",
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
    """The machine failed, not the work. Never remembered as a verdict; worth trying again, here or elsewhere."""


# Process 1 of a namespace ignores signals it has no handler for, abort() included, so the program is its child.
# dash would exec the last command of -c: hence the exit.
_INIT = '"$@" 2>&3 3>&-; exit $?'
# PPID closes the race of a caller that died before setpriv had asked for its death signal. -f counts 512-byte blocks.
# Descriptor 3 is the program's stderr: what sh ("Killed") and unshare say must not mix with the tool's words.
_GUARD = (
    '[ "$PPID" = "$1" ] || exit 125; ulimit -c 0; ulimit -t "$2"; ulimit -f "$3"; shift 3; exec "$@" 3>&2 2>/dev/null'
)

# The pipe on its stdin ends with the last process that holds the other end.
_UNDERTAKER = 'trap "" HUP INT TERM; read line; rm -rf -- "$1"'
_BLOCK_BYTES = 512  # of `ulimit -f`
_FORK_SECONDS = 30.0  # for a fence server that is still importing, on a busy machine
_SYSTEM_PATH = "/usr/bin:/bin"
_QUESTION = Limits(wall_seconds=30, cpu_seconds=30, memory_bytes=1 << 30, output_bytes=1 << 16)


@cache
def _namespace_prefix(network: bool = True) -> tuple[str, ...] | None:
    """unshare with the flags that work here; None where namespaces (or util-linux) are not to be had. Asked once.
    Without `network` also a network namespace."""
    more = () if network else ("--net",)
    try:
        unshare, shell, _ = _tool("unshare"), _tool("sh"), _tool("setpriv")
    except FileNotFoundError:
        return None
    for extra in ((), ("--user", "--map-root-user")):
        prefix = (unshare, *extra, *more, "--pid", "--fork", "--kill-child")
        probe = subprocess.run([*prefix, shell, "-c", "exit 0"], capture_output=True, check=False, timeout=10)
        if probe.returncode == 0:
            return prefix
    return None


class Processes:
    """Starts programs under limits. `isolation`: "namespace", "sweep" or "auto", which takes the first where it can.

    All private folders live in one folder of this object. A shell that holds the other end of a pipe removes it as soon
    as this process is gone, however it went: a SIGKILLed worker leaves no temporary files.
    """

    def __init__(self, *, isolation: Literal["auto", "namespace", "sweep"] = "auto", root: Path | None = None) -> None:
        self._isolation = isolation
        self._parent = root
        self._lock = threading.Lock()
        self._root: Path | None = None
        self._owner = 0
        self._undertaker: subprocess.Popen[bytes] | None = None
        self._network_isolation: bool | None = None
        self._warm: ForkServer | None = None

    @property
    def isolation(self) -> Literal["namespace", "sweep"]:
        """What a run is fenced with on this machine."""
        if self._isolation == "auto":
            return "namespace" if _namespace_prefix() else "sweep"
        return self._isolation

    @property
    def network_isolation(self) -> bool:
        """Whether what runs with `network=False` has no network on this machine. Tried once, with a process that says
        which network it has."""
        if self._network_isolation is None:
            command = ["readlink", "/proc/self/ns/net"]
            asked = self.run(command, cwd=Path("/"), limits=_QUESTION, network=False)
            ours = str(Path("/proc/self/ns/net").readlink())
            self._network_isolation = asked.ok and asked.stdout.decode().strip() != ours
        return self._network_isolation

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        limits: Limits,
        env: Mapping[str, str] | None = None,
        cancel: threading.Event | None = None,
        network: bool = True,
    ) -> Finished:
        """Run to the end and return how it ended. `env` adds to the minimal environment; nothing else is inherited.
        Without `network` there is none, where the machine allows that. Raises ProgramMissing and InfrastructureError
        (no process, no folder can be made)."""
        with self.stream(argv, cwd=cwd, limits=limits, env=env, cancel=cancel, network=network) as stream:
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
        network: bool = True,
        stdin: bytes = b"",
    ) -> Iterator[Stream]:
        """Run with stdout read line by line. `stdin`: all that the program reads there, less than a pipe holds (64
        KiB). Leaving the block kills what still runs."""
        program = shutil.which(argv[0], path=_path()) if "/" not in argv[0] else argv[0]
        if program is None or not os.access(program, os.X_OK):
            raise ProgramMissing(argv[0])
        with self.private_folder("tmp") as temporary:
            environment = {**_environment(), "TMPDIR": str(temporary), "HOME": str(temporary), **(env or {})}
            try:
                leader = self._start([program, *argv[1:]], cwd, environment, limits, network, stdin)
            except OSError as error:
                raise InfrastructureError(f"cannot start {argv[0]}: {error}") from error
            stream = Stream(tuple(argv), leader, limits, cancel, namespace=self.isolation == "namespace")
            try:
                yield stream
            finally:
                stream.close()

    @contextlib.contextmanager
    def private_folder(self, name: str = "work") -> Iterator[Path]:
        """A folder nobody else reads (mode 700), removed on leaving the block and with the death of this process."""
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
        with the environment `env`, and calls its `main()` inside the same fence. Called again, it starts that process
        again where it has ended, and returns False: what this process has forked before does not find the new one. Only
        where namespaces are allowed; the calling thread must outlive the process."""
        if self.isolation != "namespace":
            return True
        if self._warm is None:
            self._warm = ForkServer("fence server", [module], env={**_environment(), **env}, cwd=Path("/"))
        return self._warm.ensure_running()

    def _start(
        self, argv: Sequence[str], cwd: Path, env: Mapping[str, str], limits: Limits, network: bool, stdin: bytes
    ) -> Leader:
        """A fork of the process that is kept warm, where that runs `argv`, else a new program."""
        (source, sink), (stdout, out), (stderr, err) = (_pipe() for _ in range(3))
        with source, out, err:
            with sink:
                sink.write(stdin)
            if self._warm is not None and module_of(argv) in self._warm.modules:
                prefix = self._namespaces(network)
                cpu_seconds, blocks = _rlimits(limits)
                fence = Fence("--user" in prefix, "--net" in prefix, cpu_seconds, blocks * _BLOCK_BYTES)
                request = Request("python", argv, env, cwd=str(cwd), fence=fence)
                forked = self._warm.fork(request, [source.fileno(), out.fileno(), err.fileno()])
                forked.receive(_FORK_SECONDS)
                if forked.pid is not None:
                    return Leader(forked.pid, stdout, stderr, forked.wait)
                log.warning("a new interpreter runs %s: the fence server has ended, or does not answer", argv[2])
            process = subprocess.Popen(
                self._command(argv, limits, network),
                cwd=cwd,
                env=env,
                stdin=source,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            return Leader(process.pid, stdout, stderr, partial(_reap, process))

    def close(self) -> None:
        """Remove the folder of this object and end what is kept warm. Further runs make a new folder."""
        if self._warm is not None:
            self._warm.stop()
            self._warm = None
        with self._lock:
            undertaker, self._undertaker, self._root = self._undertaker, None, None
            if undertaker is None or self._owner != os.getpid():
                return
        assert undertaker.stdin is not None
        undertaker.stdin.close()
        undertaker.wait()

    def _command(self, argv: Sequence[str], limits: Limits, network: bool) -> list[str]:
        cpu, blocks = map(str, _rlimits(limits))
        if self.isolation == "namespace":
            prefix = self._namespaces(network)
            shell = _tool("sh")
            guard = [_tool("setpriv"), "--pdeathsig", "KILL", shell, "-c", _GUARD, "guard", str(os.getpid())]
            return [*guard, cpu, blocks, *prefix, shell, "-c", _INIT, "init", *argv]
        sweeper = Path(__file__).with_name("sweep_children.py")
        bounds = [str(os.getpid()), cpu, str(limits.output_bytes), "network" if network else "no-network"]
        return [sys.executable, "-I", "-S", str(sweeper), *bounds, *argv]

    def _namespaces(self, network: bool) -> tuple[str, ...]:
        prefix = (None if network else _namespace_prefix(network=False)) or _namespace_prefix()
        if prefix is None:
            raise ProcessError("PID namespaces are not allowed here (unshare failed): use isolation='sweep'")
        return prefix

    def _private_root(self) -> Path:
        with self._lock:
            # A forked worker must not use its parent's folder: its undertaker watches the parent.
            if self._root is None or self._owner != os.getpid() or not self._root.is_dir():
                root = Path(tempfile.mkdtemp(prefix="cukiln-", dir=self._parent))
                try:
                    self._undertaker = subprocess.Popen(
                        [_tool("sh"), "-c", _UNDERTAKER, "undertaker", str(root)],
                        env={"PATH": _SYSTEM_PATH},
                        stdin=subprocess.PIPE,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                except OSError:
                    root.rmdir()
                    raise
                self._root, self._owner = root, os.getpid()
            return self._root


def _rlimits(limits: Limits) -> tuple[int, int]:
    """Seconds of CPU, and blocks of a file: backstops of the limits that are looked at."""
    return int(limits.cpu_seconds) + 2, max(1, limits.output_bytes // _BLOCK_BYTES)


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    reading, writing = os.pipe()
    return os.fdopen(reading, "rb", 0), os.fdopen(writing, "wb", 0)


def _reap(process: subprocess.Popen[bytes]) -> Ending | None:
    ending = reap(process.pid, os.WNOHANG)
    process.returncode = None if ending is None else ending.returncode
    return ending


def _environment() -> dict[str, str]:
    return {"PATH": _path(), "LANG": "C", "LC_ALL": "C"}


def _path() -> str:
    return os.environ.get("PATH", os.defpath)


def _tool(name: str) -> str:
    """A tool of this module, also where PATH leaves the system's folders out. Raises FileNotFoundError."""
    found = shutil.which(name, path=f"{_SYSTEM_PATH}:{_path()}")
    if found is None:
        raise FileNotFoundError(f"{name} was not found")
    return found
