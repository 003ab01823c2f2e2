"""What nvcc makes of kernels without linking them: no spills, no stack, no static shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from codegen.kernel import Kernel
from codegen.text.render_group import render_device
from tests.support.fixtures.compile import LIMITS
from workers.compile.compile_file import FileCompiler
from workers.compile.toolchain import Toolchain
from workers.processes.processes import Processes


def require_no_spills(
    kernels: Sequence[Kernel], arch: str, folder: Path, toolchain: Toolchain, processes: Processes
) -> None:
    """Of every function of the kernels, by ptxas' report; one nvcc call."""
    group = render_device(kernels)
    device = FileCompiler(folder, toolchain, processes, LIMITS).compile_device(group.text, arch, group.symbols)
    wasted = {
        name: (resources.spill_bytes, resources.stack_bytes, resources.static_shared_bytes)
        for name, resources in device.resources.items()
    }
    assert wasted == dict.fromkeys(group.symbols, (0, 0, 0)), [kernel.to_json() for kernel in kernels]
