"""The product of matrices that the gradient of the filters is, where one operand is gathered from the image: what of
it is matmul's (tiles, splits, rules, costs) is that of this product."""

from __future__ import annotations

from functools import lru_cache, partial

from codegen.alignment import needs_cuda_cores, widest
from codegen.operators.conv2d_wgrad.problem import Conv2dWgradProblem, with_axes
from codegen.operators.matmul.problem import MatmulProblem


@lru_cache(maxsize=1024)  # called for every schedule
def product(problem: Conv2dWgradProblem, direct: bool = False) -> MatmulProblem:
    """dy x image: a matrix for each group, or one of all filters where a kernel is `direct`. The image's operand is
    never stored, so it may be larger than any matmul's."""
    p = problem
    batch, m = (1, p.k) if direct else (p.groups, p.group_filters)
    n, k, layout = p.taps, p.pixels, "tn" if p.channels_last else "nn"
    return MatmulProblem.model_construct(
        operator="matmul", batch=batch, m=m, n=n, k=k, layout=layout, dtype=p.dtype, acc_dtype=p.acc_dtype,
        out_dtype=p.out_dtype, allow_tf32=p.allow_tf32, epilogue=with_axes(p.epilogue),
        lda=m if p.channels_last else k, ldb=n, ldc=n, stride_a=m * k, stride_b=n * k, stride_c=m * n,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def aligns(problem: Conv2dWgradProblem) -> tuple[int, int, int]:
    """Elements per access of dy, x and dw: A, B and out of the product. With channels last vectors are of one group, or
    of neighbouring groups where each has one channel and one filter; with channels first the image is gathered element
    by element, and dy's pixels are neighbours."""
    p = problem
    width = partial(widest, quads=needs_cuda_cores(p.dtype, p.allow_tf32))
    if p.channels_last:
        dy, x = (p.k, p.c) if p.depthwise else (p.group_filters, p.group_channels)
    else:
        dy, x = p.p * p.q, 1
    return width(p.dtype, dy), width(p.dtype, x), width(p.out_dtype, p.taps)
