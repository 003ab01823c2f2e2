"""The product of matrices that a phase is: its tiles, splits, rules and costs are matmul's."""

from __future__ import annotations

from functools import lru_cache, partial

from codegen.alignment import needs_cuda_cores, widest
from codegen.operators.conv2d_dgrad.problem import Conv2dDgradProblem
from codegen.operators.conv2d_dgrad.residue_classes import Phase, count, largest
from codegen.operators.matmul.problem import Layout, MatmulProblem


@lru_cache(maxsize=1024)  # called for every schedule
def product(problem: Conv2dDgradProblem) -> MatmulProblem:
    """What a launch is made for: as many products of the largest phase as there are phases."""
    return of_phase(largest(problem), layout_of(problem.layout, pointwise=problem.pointwise), count(problem))


def of_phase(phase: Phase, layout: Layout, copies: int = 1) -> MatmulProblem:
    """Channels last: dy x filters, a matrix for each group. Channels first: filters x dy, a matrix for each image and
    group. A sum has one product at least here."""
    p = phase
    if p.channels_last:
        batch, m, n = p.groups, p.n * p.rows * p.columns, p.group_filters
    else:
        batch, m, n = p.n * p.groups, p.group_filters, p.rows * p.columns
    k = max(1, p.taps)
    return MatmulProblem.model_construct(
        operator="matmul", batch=batch * copies, m=m, n=n, k=k, layout=layout, dtype=p.dtype, acc_dtype=p.acc_dtype,
        out_dtype=p.out_dtype, allow_tf32=p.allow_tf32, epilogue=p.epilogue, lda=m if layout == "tn" else k, ldb=n,
        ldc=n, stride_a=m * k, stride_b=n * k, stride_c=m * n,
    )  # fmt: skip


def layout_of(layout: str, *, pointwise: bool) -> Layout:
    """How the product's operands come: with channels last filters have dx's channels along n, with channels first they
    are gathered by columns, or stored along m."""
    return "tn" if pointwise and layout == "nchw" else "nn"


@lru_cache(maxsize=1024)
def aligns(problem: Conv2dDgradProblem) -> tuple[int, int, int]:
    """Elements per access of dy, w and dx. With channels last vectors are of channels of one group, or of neighbouring
    groups where each has one; with channels first operands are gathered element by element, and pixels of a phase are
    no neighbours."""
    p = problem
    width = partial(widest, quads=needs_cuda_cores(p.dtype, p.allow_tf32))
    if p.channels_last:
        dy, w = p.k if p.depthwise else p.group_filters, p.group_channels
        dx = p.c if p.depthwise else p.group_channels
    else:
        dy, w = (p.p * p.q, p.group_channels) if p.pointwise else (1, 1)
        dx = 1 if p.strided else p.h * p.w
    return width(p.dtype, dy), width(p.dtype, w), width(p.out_dtype, dx)
