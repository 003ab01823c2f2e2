"""Alignment classes, how many elements one access to global memory moves, and what rounds extents."""

from codegen.dtypes import dtype

# The wide accesses that cp.async and vector loads have; where rows do not start on them, an access is one element.
ACCESS_BYTES = (16, 8, 4)
# The kernel of the CUDA cores computes in quads: whole ones and single elements.
QUADS = (4, 1)


def classes(element: str, *, quads: bool) -> tuple[int, ...]:
    """Elements per access that kernels have for operands of that dtype, the widest first. `quads`: of problems that no
    kernel computes on tensor cores."""
    if quads:
        return QUADS
    size = dtype(element).bytes
    return tuple(dict.fromkeys([*(width // size for width in ACCESS_BYTES if width >= size), 1]))


def widest(element: str, extent: int, *, quads: bool) -> int:
    """The class of rows of `extent` elements: the widest access of which they are a whole number."""
    return next(width for width in classes(element, quads=quads) if extent % width == 0)


def needs_cuda_cores(element: str, allow_tf32: bool) -> bool:
    """Whether tensor cores compute the products of this dtype on no architecture: fp32 where all its bits count."""
    return element == "float32" and not allow_tf32


def power_of_two(extent: int) -> int:
    """The smallest power of two that is not below `extent`."""
    return 1 << max(0, extent - 1).bit_length()


def round_up(value: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below `value`."""
    return -(-value // unit) * unit
