"""The product of matrices that a convolution is, where one operand is gathered from the image: what of it is matmul's
(tiles, splits, rules, costs) is that of this product."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import TypeVar

from codegen.alignment import needs_cuda_cores, widest
from codegen.operators.conv2d.problem import Conv2dProblem, Convolution, with_axes
from codegen.operators.matmul.problem import MatmulProblem
from codegen.search.schedule import Schedule, Value

T = TypeVar("T")


@lru_cache(maxsize=1024)  # called for every schedule
def product(problem: Conv2dProblem) -> MatmulProblem:
    """Channels last: image x filters, a matrix for each group. Channels first: filters x image, a matrix for each image
    and group. Its operands are never stored, so they may be larger than any matmul's."""
    p = problem
    if p.channels_last:
        batch, m, n, layout = p.groups, p.n * p.p * p.q, p.group_filters, "nt"
    else:
        batch, m, n, layout = p.n * p.groups, p.group_filters, p.p * p.q, "nn"
    k = p.taps
    ldb = n if layout == "nn" else k
    return MatmulProblem.model_construct(
        operator="matmul", batch=batch, m=m, n=n, k=k, layout=layout, dtype=p.dtype, acc_dtype=p.acc_dtype,
        out_dtype=p.out_dtype, allow_tf32=p.allow_tf32, epilogue=with_axes(p.epilogue, p.layout),
        lda=k, ldb=ldb, ldc=n, stride_a=m * k, stride_b=n * k, stride_c=m * n,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def aligns(problem: Convolution) -> tuple[int, int, int]:
    """Elements per access of x, w and out. With channels last vectors are of channels of one group, or of neighbouring
    groups where each has one; with channels first the image is gathered element by element."""
    p = problem
    width = partial(widest, quads=needs_cuda_cores(p.dtype, p.allow_tf32))
    if p.channels_last:
        x = p.c if p.depthwise else p.group_channels
        out = p.k if p.depthwise else p.group_filters
    else:
        x, out = p.h * p.w if p.pointwise else 1, p.p * p.q
    return width(p.dtype, x), width(p.dtype, p.taps), width(p.out_dtype, out)


def aligns_of(signature: Mapping[str, int]) -> tuple[int, int, int]:
    """The classes in a signature, as `aligns` has them."""
    return signature["align_x"], signature["align_w"], signature["align_out"]


def of_product(channels_last: bool, aligns: tuple[int, int, int]) -> tuple[int, int]:
    """Elements per access of the product's A and B."""
    x, w, _ = aligns
    return (x, w) if channels_last else (w, x)


def without_static_k(tunables: Mapping[str, T]) -> dict[str, T]:
    """Values, or lists of values, of matmul's that an implicit product has too."""
    return {name: value for name, value in tunables.items() if name != "static_k"}


def implicit_schedule(tunables: Mapping[str, Value]) -> Schedule:
    """A schedule of matmul's as one of the implicit product."""
    return Schedule.of({"algorithm": "implicit_gemm", **without_static_k(tunables)})
