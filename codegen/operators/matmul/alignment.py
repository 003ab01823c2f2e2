"""The alignment classes of a problem's operands."""

import math
from functools import lru_cache

from codegen.alignment import needs_cuda_cores, widest
from codegen.operators.matmul.problem import MatmulProblem


@lru_cache(maxsize=1024)  # called for every schedule
def aligns(problem: MatmulProblem) -> tuple[int, int, int]:
    """The classes of A, B and out (and of what has out's shape): the widest access of which columns, pitch and, in a
    batch, its stride are whole multiples."""
    p, quads = problem, needs_cuda_cores(problem.dtype, problem.allow_tf32)

    def of(element: str, columns: int, pitch: int, stride: int) -> int:
        return widest(element, math.gcd(columns, pitch, stride if p.batch > 1 else 0), quads=quads)

    return (
        of(p.dtype, p.stored("a")[1], p.lda, p.stride_a),
        of(p.dtype, p.stored("b")[1], p.ldb, p.stride_b),
        of(p.out_dtype, p.stored("c")[1], p.ldc, p.stride_c),
    )
