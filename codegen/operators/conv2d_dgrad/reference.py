"""The gradient of the image in float64, and how far a kernel may be from it. Shares nothing with the kernel: each
element of the filter takes dy by a product of matrices to where the image was read, added up in float64.

The bound is matmul's (`codegen/operators/matmul/reference.py`) for sums of as many products as the longest has.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import gcd

from codegen.alignment import needs_cuda_cores
from codegen.arrays import Array, Float64, as_float64, namespace_of
from codegen.epilogue import tensor_nodes
from codegen.epilogue_reference import Bounded, apply_chain, stored
from codegen.operators.conv2d.reference import channels_last
from codegen.operators.conv2d_dgrad.problem import Conv2dDgradProblem
from codegen.operators.matmul.reference import accumulated


def reference(problem: Conv2dDgradProblem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
    """(result, bound), both of dx's logical shape, in the inputs' namespace."""
    p = problem
    dy, w = (channels_last(p, as_float64(inputs[name], p.dtype)) for name in ("dy", "w"))
    # What no pixel of dx depends on may be anything: NaN would spoil the bound.
    dy = namespace_of(dy).nan_to_num(dy)
    multiply = partial(scatter, p)
    on_cuda_cores = needs_cuda_cores(p.dtype, p.allow_tf32)
    bound = accumulated(multiply, dy, w, longest_sum(p), on_cuda_cores=on_cuda_cores, tf32=p.allow_tf32)
    tensors = {name: channels_last(p, inputs[name]) for _, name, _ in tensor_nodes(p.epilogue, p.out_dtype)}
    final = stored(p.out_dtype, apply_chain(p.epilogue, Bounded(multiply(dy, w), bound), tensors, exact, p.out_dtype))
    if p.channels_last:
        return final.value, final.error
    return final.value.transpose(0, 3, 1, 2), final.error.transpose(0, 3, 1, 2)


def longest_sum(problem: Conv2dDgradProblem) -> int:
    """Products in it: of a row of filter elements only those count that meet the same row of dx."""
    p = problem
    rows, columns = (
        -(-taps // (p.stride[axis] // gcd(p.stride[axis], p.dilation[axis]))) for axis, taps in enumerate((p.r, p.s))
    )
    return rows * columns * p.group_filters


def scatter(problem: Conv2dDgradProblem, dy: Float64, w: Float64) -> Float64:
    """dy of n, p, q, k and w of k, r, s, c / groups give n, h, w, c."""
    p, xp = problem, namespace_of(dy)
    (top, left), (step_h, step_w), (apart_h, apart_w) = p.corner, p.stride, p.dilation
    padded = xp.zeros((p.n, *p.padded, p.c))
    gradients = dy.reshape(p.n * p.p * p.q, p.groups, p.group_filters).transpose(1, 0, 2)
    filters = w.reshape(p.groups, p.group_filters, p.r, p.s, p.group_channels)
    for r in range(p.r):
        for s in range(p.s):
            rows = slice(r * apart_h, r * apart_h + (p.p - 1) * step_h + 1, step_h)
            columns = slice(s * apart_w, s * apart_w + (p.q - 1) * step_w + 1, step_w)
            parts = xp.matmul(gradients, filters[:, :, r, s])
            padded[:, rows, columns] += parts.transpose(1, 0, 2).reshape(p.n, p.p, p.q, p.c)
    dx: Float64 = padded[:, top : top + p.h, left : left + p.w]
    return dx
