"""Compile one rendered `.cu` into a cubin and a shared library, in a private folder, and assert what came out.

```
CompileFault                     what one file can end with beside success; values, raised only between these modules
├── CompileFailed                the compiler refused it: `log`, `text` it speaks of
├── CompileCrashed               the compiler itself died, or needed more than its memory or output limit
└── CompileTimedOut              the wall-clock or CPU limit ended it
CompileCancelled (ProcessError)  the caller's cancel event was set
UnexpectedSymbols                the result holds other kernels or exports than were asked for: a bug, never a verdict
```
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from codegen.text.cubin import Cubin, exported_symbols, read_cubin
from codegen.text.ptxas_report import Resources, parse_resources
from codegen.text.render_library import EMBED_ASSEMBLY
from workers.compile.toolchain import Toolchain
from workers.processes.job_files import read_bytes, write_text
from workers.processes.process_stream import once_more
from workers.processes.processes import Finished, InfrastructureError, Limits, ProcessError, Processes
from workers.processes.stopwatch import Stopwatch

# One set of names for all groups: a compiler may write a name into its output.
SOURCE, CUBIN, PTX, PHASES = "group.cu", "group.cubin", "group.ptx", "phases.csv"
HOST_SOURCE, OBJECT, EMBED, LIBRARY = "library.cpp", "library.o", "embed.s", "library.so"


class CompileFault(Exception):
    """How a file failed. `log` is what the tools said; `limit` the one of ours that ended it, by name, if any."""

    def __init__(self, log: str, limit: dict[str, float] | None = None) -> None:
        super().__init__(log[-300:])
        self.log = log
        self.limit = limit


class CompileFailed(CompileFault):
    """The compiler refused the file `source` (its text). `ptx` is what ptxas was given, where it came that far."""

    def __init__(self, log: str, source: str, ptx: str | None = None) -> None:
        super().__init__(log)
        self.source = source
        self.ptx = ptx


class CompileCrashed(CompileFault):
    """The compiler died of itself, twice where its file was one kernel's, or of its memory or output limit."""


class CompileTimedOut(CompileFault):
    """The wall-clock or CPU limit ended the compiler."""


class CompileCancelled(ProcessError):
    """The caller's cancel event ended the compiler."""


class UnexpectedSymbols(Exception):
    """The kernels of a cubin or the exports of a library are not the expected set."""

    def __init__(self, what: str, found: frozenset[str], expected: frozenset[str]) -> None:
        super().__init__(what, found, expected)
        self.what, self.found, self.expected = what, found, expected

    def __str__(self) -> str:
        missing, surplus = sorted(self.expected - self.found), sorted(self.found - self.expected)
        return f"{self.what}: missing {missing}, not expected {surplus}"


@dataclass(frozen=True)
class Phase:
    """A `cukiln.types.PhaseName` in wall seconds. `start`: by the compiler's stopwatch; `kernels`: ids it worked on."""

    name: str
    seconds: float
    start: float = 0.0
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeviceCode:
    """nvcc's result for one file: `cubin` and what it holds; resources by mangled kernel name; what ptxas was given."""

    cubin: bytes
    contents: Cubin
    resources: dict[str, Resources]
    ptx: bytes


@dataclass
class FileCompiler:
    """One file's way in one private folder. Adds up wall and CPU seconds, the log and the phases of all its tools;
    `peak_memory_bytes` is of the one that held the most. `alone`: the file is one kernel's, which is blamed for a crash
    only where the tool crashes again."""

    folder: Path
    toolchain: Toolchain
    processes: Processes
    limits: Limits
    cancel: threading.Event | None = None
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    alone: bool = True
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory_bytes: int = 0
    log: str = ""
    phases: list[Phase] = field(default_factory=list)

    def compile_device(self, text: str, target: str, symbols: frozenset[str]) -> DeviceCode:
        """nvcc's device pass. Raises CompileFault, InfrastructureError, CompileCancelled, UnexpectedSymbols."""
        self._write(SOURCE, text)
        finished = self._run(self.toolchain.device_command(target, SOURCE, CUBIN, PHASES), "nvcc")
        if finished.returncode:
            raise CompileFailed(_refusal(finished), text, self._read_text(PTX) or None)
        cubin = self._read(CUBIN)
        contents, resources = read_cubin(cubin), parse_resources(finished.text())
        for what, names in (
            ("kernels of the cubin", contents.symbols),
            ("kernels of ptxas' report", frozenset(resources)),
        ):
            if names != symbols:
                raise UnexpectedSymbols(what, names, symbols)
        return DeviceCode(cubin, contents, resources, self._read(PTX))

    def link_library(self, text: str, exports: frozenset[str]) -> bytes:
        """g++ on launch code and stub, linked around the cubin of `compile_device`. Raises as that does."""
        self._write(EMBED, EMBED_ASSEMBLY)
        command = self.toolchain.host_command(HOST_SOURCE, OBJECT)
        return self._library(text, exports, command, [OBJECT, EMBED])

    def link_emulation(self, text: str, exports: frozenset[str]) -> bytes:
        """g++ on a kernel for the CPU with its stub. Raises as `compile_device` does."""
        command = self.toolchain.emulation_command(HOST_SOURCE, OBJECT)
        return self._library(text, exports, command, [OBJECT, "-lm"])

    def _library(self, text: str, exports: frozenset[str], compile: list[str], inputs: list[str]) -> bytes:
        self._write(HOST_SOURCE, text)
        for name, command in (("host", compile), ("link", self.toolchain.link_command(inputs, LIBRARY))):
            finished = self._run(command, name)
            if finished.returncode:
                raise CompileFailed(_refusal(finished), text)
        library = self._read(LIBRARY)
        exported = exported_symbols(library)
        if exported != exports:
            raise UnexpectedSymbols("exports of the library", exported, exports)
        return library

    def run_program(self, text: str, name: str) -> str:
        """Compile a host program, run it, and return what it prints. Raises as above."""
        self._write(f"{name}.cpp", text)
        for command in (self.toolchain.program_command(f"{name}.cpp", name), [str(self.folder / name)]):
            finished = self._run(command)
            if finished.returncode:
                raise CompileFailed(_refusal(finished), text)
        return finished.stdout.decode("ascii")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is done inside is a phase, however it ends."""
        start = self.stopwatch.read().wall
        try:
            yield
        finally:
            self.phases.append(Phase(name, self.stopwatch.read().wall - start, start))

    def _run(self, command: Sequence[str], phase: str | None = None) -> Finished:
        run = partial(self._run_once, command, phase)
        finished = once_more(run) if self.alone else run()
        name = self.toolchain.device_compiler.name if phase == "nvcc" else Path(command[0]).name
        match finished.cause:
            case "cancelled":
                raise CompileCancelled("cancelled")
            case "machine":
                raise InfrastructureError(str(finished.infrastructure_failure()), stalled=finished.stalled)
            case "limit":
                fault = CompileTimedOut if finished.ended_by in ("wall", "cpu") else CompileCrashed
                log = f"{name} was ended: {_describe_limit(finished, self.limits)}\n{self.log}"
                raise fault(log, self.limits.reached(finished.ended_by))
            case "crash":
                of_signal = f" of signal {-finished.returncode}" if finished.returncode < 0 else ""
                raise CompileCrashed(f"{name} died{of_signal}\n{self.log}")
        return finished

    def _run_once(self, command: Sequence[str], phase: str | None) -> Finished:
        start = self.stopwatch.read().wall
        headers = [self.toolchain.tvm_ffi_include]  # wherever this Python's packages are
        finished = self.processes.run(command, cwd=self.folder, limits=self.limits, reads=headers, cancel=self.cancel)
        if phase == "nvcc":
            self.phases += self._nvcc_phases(start, finished.wall_seconds)
        elif phase is not None:
            self.phases.append(Phase(phase, finished.wall_seconds, start))
        self.wall_seconds += finished.wall_seconds
        self.cpu_seconds += finished.cpu_seconds
        self.peak_memory_bytes = max(self.peak_memory_bytes, finished.peak_memory_bytes)
        self.log += f"$ {self._shown(command, phase)}\n{finished.text()}"
        return finished

    def _shown(self, command: Sequence[str], phase: str | None) -> str:
        """Without the folders of this machine's compilers."""
        device = self.toolchain.device_compiler
        if phase == "nvcc":
            return " ".join([device.name, *command[len(device.program) :]])
        return " ".join([Path(command[0]).name, *command[1:]])

    def _nvcc_phases(self, start: float, wall_seconds: float) -> list[Phase]:
        """The call's steps one after the other, as nvcc runs them, then `nvcc`: what it took beside them, with the
        step in which it was ended.

        `--time` writes a CSV row per step: source, phase, inputs, output, arch, tool, milliseconds, unit."""
        rows = self._read_text(PHASES).splitlines()[1:]
        phases, at, left = [], start, wall_seconds
        for row in (line.split(",") for line in rows):
            step = row[1].strip() if len(row) >= 8 else ""
            # One name for a step, whichever host compiler runs the preprocessor; none for nvcc's own rest.
            name = "preprocess" if "preprocessing" in step else step
            if name not in ("preprocess", "cicc", "ptxas"):
                continue
            seconds = min(float(row[-2]) / 1e3, left)
            phases.append(Phase(name, seconds, at))
            at, left = at + seconds, left - seconds
        return [*phases, Phase("nvcc", left, at)]

    def _write(self, name: str, text: str) -> None:
        try:
            write_text(self.folder / name, text)
        except OSError as error:
            raise InfrastructureError(f"cannot write {name}: {error}") from error

    def _read(self, name: str) -> bytes:
        try:
            return read_bytes(self.folder / name, self.limits.output_bytes)
        except OSError as error:
            raise InfrastructureError(f"the compiler succeeded but {name} cannot be read: {error}") from error

    def _read_text(self, name: str) -> str:
        """Empty where it was not written."""
        try:
            return read_bytes(self.folder / name, self.limits.output_bytes).decode("utf-8", "replace")
        except OSError:
            return ""


def _refusal(finished: Finished) -> str:
    """What the tool said, or that it said nothing."""
    return finished.text() or f"{Path(finished.argv[0]).name} failed with status {finished.returncode}, without a word"


def _describe_limit(finished: Finished, limits: Limits) -> str:
    return {
        "wall": f"it ran longer than {limits.wall_seconds:g} s",
        "cpu": f"it used more than {limits.cpu_seconds:g} CPU seconds",
        "memory": f"it used more than {limits.memory_bytes} bytes of memory",
        "output": f"it wrote more than {limits.output_bytes} bytes",
        "processes": "it started too many processes",
    }[finished.ended_by or "wall"]
