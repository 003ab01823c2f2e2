"""The builds of kernels: by what digest they are found, and what compiling them is predicted to take."""

from __future__ import annotations

from functools import lru_cache

from codegen.compile_cost import kernel_bytes, kernel_seconds
from codegen.identity import build_id
from codegen.kernel import Kernel
from codegen.render_group import slice_digest
from storage.builds import NewBuild


@lru_cache(maxsize=16384)  # many candidates share a kernel
def new_build(kernel: Kernel, target: str, toolchain: str) -> NewBuild:
    """The kernel's build under a toolchain."""
    text = slice_digest(kernel)
    return NewBuild(
        id=build_id(kernel.id, text, toolchain, target),
        kernel=kernel.id,
        slice=text,
        kernel_json=kernel.to_json(),
        target=target,
        toolchain=toolchain,
        predicted_seconds=kernel_seconds(kernel),
        predicted_bytes=kernel_bytes(kernel),
    )
