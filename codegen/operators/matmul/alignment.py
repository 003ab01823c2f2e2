"""Alignment classes: how many elements of an operand one access to global memory moves."""

from __future__ import annotations

from functools import lru_cache

from codegen.dtypes import dtype
from codegen.operators.matmul.problem import MatmulProblem

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


@lru_cache(maxsize=1024)  # lowering asks once for every schedule
def aligns(problem: MatmulProblem) -> tuple[int, int, int]:
    """The classes of A, B and out (and of what has out's shape): the widest access of which columns, pitch and, in a
    batch, its stride are whole multiples."""
    p, quads = problem, needs_cuda_cores(problem.dtype, problem.allow_tf32)

    def of(element: str, columns: int, pitch: int, stride: int) -> int:
        distances = (columns, pitch, stride if p.batch > 1 else 0)
        return next(
            width for width in classes(element, quads=quads) if all(distance % width == 0 for distance in distances)
        )

    return (
        of(p.dtype, p.stored("a")[1], p.lda, p.stride_a),
        of(p.dtype, p.stored("b")[1], p.ldb, p.stride_b),
        of(p.out_dtype, p.stored("c")[1], p.ldc, p.stride_c),
    )
