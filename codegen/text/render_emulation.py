"""Render a winner's library for the target `cpu`: the kernel on the CPU emulation, behind the entries of any library.

The kernel's text and the emulation are those that verified it. What only finds faults is left out: checks of accesses,
hostile orders, guarded memory, signal handlers.
"""

import platform
from collections.abc import Sequence

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.text.render_cpu import CPU_HEADERS, emulated_functions
from codegen.text.render_group import header_text, operators_texts, slice_text
from codegen.text.render_library import kernel_block, winner_entries

# Of a library of target cpu, which runs on other machines than this one too: no -march=native. Not of the toolchain's
# digest: no build depends on them. The other flags are those of verification (`workers.cpu.build`): -O2 compiles 1.8
# times as long and gains nothing (a 64 × 64 × 64 matmul's kernel at 512 × 512 × 512).
EMULATION_FLAGS = (
    "-std=c++17",
    "-O1",
    "-ftree-vectorize",
    *(("-mavx2", "-mfma") if platform.machine() == "x86_64" else ()),
    "-ffp-contract=off",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",  # one thread at a time runs kernels, and the guards would need libstdc++
    "-Wno-unknown-pragmas",
)
_DEFINES = "".join(f"#define CUKILN_{name} 1\n" for name in ("DEVICE", "HOST", "CPU", "RUNTIME", "UNCHECKED"))


def render_emulation(kernel: Kernel, launch: Sequence[int]) -> str:
    """The library's C++ text, one self-contained file. It exports `winner_exports(kernel)`."""
    headers, exports = winner_entries(kernel)
    parts = [
        _DEFINES,
        *(_without_includes(header_text(path)) for path in CPU_HEADERS if path != "cpu/harness.h"),
        *operators_texts([kernel.operator]).values(),
        slice_text(kernel),
        header_text("binding/errors.h"),
        "namespace cukiln {\nnamespace binding {\n"
        f"constexpr cpu::Function kernel_functions[] = {{{', '.join(emulated_functions(kernel))}}};\n"
        "}  // namespace binding\n}  // namespace cukiln\n",
        header_text("binding/on_cpu.h"),
        header_text("binding/library.h"),
        *headers,
        *([header_text("binding/check_tables.h")] if operator(kernel.operator).tables(kernel) else []),
        kernel_block(kernel, 0, launch, for_tensors=True, on_cpu=True),
        *exports,
    ]
    return "\n".join(parts)


def _without_includes(text: str) -> str:
    """Includes of each other mean nothing in one file."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith('#include "'))
