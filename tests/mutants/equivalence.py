"""Whether nvcc and g++ make the same of a changed text: then it is the same kernel, whatever a test says of it."""

from __future__ import annotations

import re
from pathlib import Path

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.text.render_group import (
    HOST_HEADERS,
    header_text,
    operator_names,
    operators_texts,
    render_config,
    render_device,
)
from tests.mutants.changes import Change, sections
from tests.mutants.emulation import run
from tests.support.kernels.cpu_helpers import toolchain

ARCHITECTURE = "sm_80"
_ENTRY = 'extern "C" __attribute__((flatten))'
HOST_FLAGS = ("-std=c++17", "-O3", "-fno-exceptions", "-fno-rtti", "-w", "-c")
_NAMES = re.compile(r"^(//.*|\s*)$", re.MULTILINE)


def ptx(kernel: Kernel, change: Change | None, folder: Path) -> str:
    """Without comments. Raises AssertionError where nvcc refuses the text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "device.cu").write_text(_changed(render_device([kernel]).text, kernel, change))
    compilers = toolchain()
    argv = [*compilers.device_compiler.program, "-ccbin", str(compilers.host_compiler), f"-arch={ARCHITECTURE}"]
    run([*argv, "-ptx", "-std=c++17", "-O3", "-w", "-o", "device.ptx", "device.cu"], folder)
    return _NAMES.sub("", (folder / "device.ptx").read_text())


def launch_code(kernel: Kernel, change: Change | None, folder: Path) -> bytes:
    """The machine code of what a library does before a launch: arguments, workspace, launches. All of it is inlined, so
    that what this kernel's constants decide is decided."""
    folder.mkdir(parents=True, exist_ok=True)
    own = operator(kernel.operator)
    arguments, config = f"{own.namespace}::{own.arguments(kernel)}", f"{kernel.namespace}::Config"
    texts = [*map(header_text, HOST_HEADERS), *operators_texts(operator_names([kernel])).values()]
    entries = (
        f"namespace {kernel.namespace} {{\n{render_config(kernel)}}}\n"
        f"{_ENTRY} long long bytes_of(const int64_t* extents, const int32_t* launch) "
        f"{{ return {own.namespace}::workspace_bytes<{config}>(extents, launch); }}\n"
        f"{_ENTRY} void bound(void* const* pointers, const int64_t* integers, const int32_t* launch, "
        f"const double* scalars, void* workspace, {arguments}* out) "
        f"{{ *out = {own.namespace}::bind<{config}>(pointers, integers, launch, scalars, workspace); }}\n"
        f"{_ENTRY} int planned(const {arguments}* arguments, cukiln::Launch* out) "
        f"{{ return {own.namespace}::plan<{config}>(*arguments, out); }}\n"
    )
    (folder / "host.cpp").write_text(_changed("#define CUKILN_HOST 1\n" + "".join(texts), kernel, change) + entries)
    run([str(toolchain().host_compiler), *HOST_FLAGS, "-o", "host.o", "host.cpp"], folder)
    return (folder / "host.o").read_bytes()


def _changed(text: str, kernel: Kernel, change: Change | None) -> str:
    if change is None:
        return text
    before = sections(kernel)[change.file]
    assert text.count(before) == 1, change.file
    lines = before.split("\n")
    assert lines[change.line - 2] == change.text, change
    lines[change.line - 2] = change.changed
    return text.replace(before, "\n".join(lines))
