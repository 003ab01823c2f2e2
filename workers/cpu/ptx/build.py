"""PTX of kernels, and libraries that run it: one for each kernel, because its file has nothing of another one."""

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from codegen.kernel import Kernel
from codegen.primitives import TURING_SUMS
from codegen.text.render_ptx import PtxText, render_lines, render_ptx_runtime
from workers.compile.toolchain import Toolchain
from workers.cpu.build import CPU_FLAGS, MAX_LOG, RUNTIME, Runtime, place_runtime
from workers.processes.job_files import read_bytes, write_text
from workers.processes.process_stream import once_more
from workers.processes.processes import Finished, InfrastructureError, Limits, Processes

SOURCE, PTX = "kernels.cu", "kernels.ptx"
# A translated kernel is one function of thousands of statements that runs for a fraction of the time that it compiles:
# -Og takes two thirds of -O1's seconds, without these passes a fifth less (7,328 instructions). The runtime has -O1.
_NOT_FOR_ONE_RUN = (
    "-fno-combine-stack-adjustments",
    "-fno-inline-functions-called-once",
    "-fno-ipa-reference",
    "-fno-ipa-pure-const",
    "-fno-forward-propagate",
    "-fno-cprop-registers",
)
_OF_LOOPS = ("-O1", "-ftree-vectorize")
KERNEL_FLAGS = (*(flag for flag in CPU_FLAGS if flag not in _OF_LOOPS), "-Og", *_NOT_FOR_ONE_RUN, "-w")


class PtxCancelled(Exception):
    """The caller's cancel event ended a tool."""


class NotBuilt(Exception):
    """A tool refused a file; the message is what it said. `details`: as of `CpuVerdict`, of a limit of ours."""

    def __init__(self, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.details = details or {}


class PtxBuilder:
    """Tools in one private folder; adds up the seconds of all of them."""

    def __init__(
        self,
        folder: Path,
        toolchain: Toolchain,
        processes: Processes,
        limits: Limits,
        cancel: threading.Event | None = None,
    ) -> None:
        self.folder, self._toolchain = folder, toolchain
        self._processes, self._limits, self._cancel = processes, limits, cancel
        self.wall_seconds = self.cpu_seconds = 0.0

    def ptx_of(self, kernels: Sequence[Kernel], target: str) -> str:
        """What the device compiler makes of the kernels, with the lines of the files that they come from. Raises
        NotBuilt, PtxCancelled, InfrastructureError."""
        write_text(self.folder / SOURCE, render_lines(kernels))
        self._run(self._toolchain.ptx_command(target, SOURCE, PTX), "the device compiler")
        text = read_bytes(self.folder / PTX, self._limits.output_bytes).decode("utf-8")
        return text.replace(f'"{self.folder}/', '"')

    def library(self, kernel: Kernel, text: PtxText, sums: int = TURING_SUMS) -> Path:
        """Raises as `ptx_of`."""
        runtime = Runtime(render_ptx_runtime(sums), self._toolchain, CPU_FLAGS)
        if (refused := place_runtime(runtime, self.folder, self._limits, self._once)) is not None:
            self._require(refused, "g++")
        library = self.folder / f"ptx_{kernel.namespace}.so"
        source = library.with_suffix(".cpp")
        write_text(source, text.text)
        compiler = str(self._toolchain.host_compiler)
        self._run([compiler, *KERNEL_FLAGS, "-o", library.name, source.name, RUNTIME, "-lm"], "g++")
        return library

    def _run(self, command: Sequence[str], name: str) -> None:
        self._require(once_more(partial(self._once, command)), name)

    def _once(self, command: Sequence[str]) -> Finished:
        finished = self._processes.run(command, cwd=self.folder, limits=self._limits, cancel=self._cancel)
        self.wall_seconds += finished.wall_seconds
        self.cpu_seconds += finished.cpu_seconds
        return finished

    def _require(self, finished: Finished, name: str) -> None:
        if finished.ok:
            return
        if finished.cause == "cancelled":
            raise PtxCancelled
        if reason := finished.infrastructure_failure():
            raise InfrastructureError(reason, stalled=finished.stalled)
        if finished.ended_by is not None:
            words = f"was stopped: its limit on {finished.ended_by} was reached after {finished.wall_seconds:.1f} s"
            raise NotBuilt(f"{name} {words}", self._limits.as_details(finished.ended_by))
        raise NotBuilt(f"{name}: {finished.text()[:MAX_LOG] or f'status {finished.returncode}, without a word'}")
