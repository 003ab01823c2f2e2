"""Many kernels as one C++ file for g++: the same kernel text as for nvcc, on the CPU emulation of the primitives.

The file is a library with C entry points: those of `cpu/harness.h`, and per kernel `<namespace>_run` and
`<namespace>_workspace_bytes`. What runs kernels depends on none of them: it may be a file of its own, the runtime,
which is compiled once and linked with each file of kernels.
"""

from collections.abc import Sequence

from codegen.kernel import Kernel
from codegen.operator import Operator
from codegen.operators import operator
from codegen.primitives import EMULATION_HEADERS, TURING_SUMS
from codegen.text.render_group import functions_of, header_text, operator_names, operators_texts, slice_text

# In order of use. The harness comes last: it needs Launch, and nothing needs it.
CPU_HEADERS = (
    "cpu/fiber.h",
    "cpu/memory.h",
    "cpu/scheduler.h",
    "cpu/counts.h",
    "cpu/sites.h",
    "cpu/race.h",
    "cpu/banks.h",
    "cpu/watch.h",
    "cpu/collective.h",
    "cpu/barriers.h",
    "launch.h",
    *EMULATION_HEADERS[1:],
    "epilogue.cuh",
    "check_tensors.h",
    "cpu/grid.h",
    "cpu/harness.h",
)


# What the runtime is made of.
RUNTIME_HEADERS = tuple(
    path
    for path in CPU_HEADERS
    if path
    not in ("cpu/convert.h", "cpu/warp.h", "cpu/tensor_sums.h", "cpu/matrix.h", "epilogue.cuh", "check_tensors.h")
)
_DEFINES = "#define CUKILN_DEVICE 1\n#define CUKILN_HOST 1\n#define CUKILN_CPU 1\n"
_RUNTIME = "#define CUKILN_RUNTIME 1\n"


def render_runtime() -> str:
    """The C++ text that runs kernels, for those of `render_cpu(…, runtime=False)`, under the same flags."""
    return "".join([_DEFINES, _RUNTIME, *(header(path, header_text(path)) for path in RUNTIME_HEADERS)])


def render_cpu(kernels: Sequence[Kernel], *, runtime: bool = True, sums: int = TURING_SUMS) -> str:
    """The C++ text; kernels in the order given. `runtime`: with what runs them, else to be linked with it. `sums`:
    whose tensor cores add (`Target.tensor_sums`)."""
    parts = [_DEFINES, f"#define CUKILN_TENSOR_SUMS {sums}\n", _RUNTIME if runtime else ""]
    parts += [header(path, header_text(path)) for path in CPU_HEADERS]
    parts += [header(name, text) for name, text in operators_texts(operator_names(kernels)).items()]
    for kernel in kernels:
        parts.append(f'#line 1 "{kernel.namespace}.cu"\n{slice_text(kernel)}')
        parts.append(entries(kernel, operator(kernel.operator), emulated_functions(kernel)))
    return "".join(parts)


def header(name: str, text: str) -> str:
    """The text under its own name and lines, so that g++ and the harness name places that a person can open.

    Inlining took its line `#pragma once` away, so all code counts from 2. Includes of each other mean nothing in one
    file.
    """
    lines = ["" if line.startswith('#include "') else line for line in text.splitlines()]
    return f'#line 2 "{name}"\n' + "\n".join(lines) + "\n"


def emulated_functions(kernel: Kernel) -> list[str]:
    """The kernel's functions as the runtime calls them, in the order that `Launch.function` indexes."""
    op = operator(kernel.operator)
    arguments = f"{op.namespace}::{op.arguments(kernel)}"
    return [f"cukiln::cpu::call_kernel<{arguments}, {kernel.namespace}::{name}>" for name in functions_of(kernel)]


def entries(kernel: Kernel, op: Operator, functions: Sequence[str]) -> str:
    """The C entry points of a kernel whose functions are these."""
    space = kernel.namespace
    arguments = f"{op.namespace}::{op.arguments(kernel)}"
    return (
        f"CUKILN_CPU_EXPORT int64_t {space}_workspace_bytes(const int64_t* extents, const int32_t* launch) {{\n"
        f"  return {op.namespace}::workspace_bytes<{space}::Config>(extents, launch);\n"
        "}\n"
        f"CUKILN_CPU_EXPORT int {space}_run(const cukiln::cpu::Call* call) {{\n"
        f"  const {arguments} arguments = {op.namespace}::bind<{space}::Config>(\n"
        "      call->pointers, call->integers, call->launch, call->scalars, call->workspace);\n"
        "  cukiln::Launch launches[cukiln::cpu::max_launches];\n"
        f"  const int count = {op.namespace}::plan<{space}::Config>(arguments, launches);\n"
        f"  const cukiln::cpu::Function functions[] = {{{', '.join(functions)}}};\n"
        f"  return cukiln::cpu::execute(*call, launches, count, functions, {len(functions_of(kernel))}, &arguments);\n"
        "}\n"
    )
