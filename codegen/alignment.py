"""Alignment classes: how many elements one access to global memory moves."""

from __future__ import annotations

from codegen.dtypes import dtype

# The wide accesses that cp.async and vector loads have; where rows do not start on them, an access is one element.
ACCESS_BYTES = (16, 8, 4)
# The kernel of the CUDA cores computes in quads: it knows whole ones and single elements.
QUADS = (4, 1)


def classes(element: str, *, quads: bool) -> tuple[int, ...]:
    """Elements per access that kernels know for operands of that dtype, the widest first. `quads`: of problems that no
    kernel computes on tensor cores."""
    if quads:
        return QUADS
    size = dtype(element).bytes
    return tuple(dict.fromkeys([*(width // size for width in ACCESS_BYTES if width >= size), 1]))


def needs_cuda_cores(element: str, allow_tf32: bool) -> bool:
    """Whether tensor cores compute the products of this dtype on no architecture: fp32 where all its bits count."""
    return element == "float32" and not allow_tf32
