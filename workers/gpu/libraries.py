"""The libraries of a task on the GPU: looked at before they are loaded, loaded once, called with all in place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from codegen.kernel import Candidate, Kernel
from codegen.operator import Operator
from workers.gpu.check_library import refusal
from workers.gpu.interface import Gpu, KernelLibrary, LaunchRefused


class Libraries:
    """By path. `kernels`: what the task needs of each."""

    def __init__(self, gpu: Gpu, kernels: Mapping[str, Sequence[Kernel]]) -> None:
        self._gpu = gpu
        self._kernels = kernels
        self._refusals: dict[str, str | None] = {}
        self._loaded: dict[str, KernelLibrary] = {}

    def check(self, path: str) -> None:
        """Look at the file; nothing of it runs. Raises LaunchRefused, with what is foreign in one that is not ours."""
        if path not in self._refusals:
            self._refusals[path] = refusal(Path(path).read_bytes(), [kernel.id for kernel in self._kernels_of(path)])
        if (message := self._refusals[path]) is not None:
            raise LaunchRefused(f"the library was not loaded: {message}")

    def load(self, path: str) -> KernelLibrary:
        """Raises LaunchRefused, LoadFailed, GpuFault."""
        if path not in self._loaded:
            self.check(path)
            self._loaded[path] = self._gpu.load(Path(path), self._kernels_of(path))
        return self._loaded[path]

    def _kernels_of(self, path: str) -> tuple[Kernel, ...]:
        return tuple(dict.fromkeys(self._kernels[path]))


@dataclass(frozen=True)
class Call:
    """A kernel with the numbers of a problem and launch-time values: everything but the buffers."""

    library: KernelLibrary
    kernel: Kernel
    integers: tuple[int, ...]  # extents, then attributes
    launch: tuple[int, ...]
    scalars: tuple[float, ...]

    def workspace_bytes(self, most: int) -> int:
        """Raises LaunchRefused where that is not between 0 and `most`."""
        size = self.library.workspace_bytes(self.kernel.id, self.integers, self.launch)
        if not 0 <= size <= most:
            raise LaunchRefused(f"the kernel asks for a workspace of {size} bytes; the GPU has {most}")
        return size

    def run(self, pointers: Sequence[int], workspace: int) -> None:
        """Queue it. `workspace` is an address, 0 for none."""
        self.library.launch(self.kernel.id, pointers, self.integers, self.launch, self.scalars, workspace)


def call_of(library: KernelLibrary, operator: Operator, candidate: Candidate) -> Call:
    """A candidate's own call."""
    launch = operator.launch_values(candidate.schedule)
    return Call(
        library,
        candidate.kernel,
        tuple(operator.integers(candidate.problem)),
        tuple(launch),
        tuple(operator.scalars(candidate.problem)),
    )
