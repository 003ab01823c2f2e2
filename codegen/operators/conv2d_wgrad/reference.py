"""The gradient of the filters in float64, and how far a kernel may be from it. Shares nothing with the kernel: one
product of matrices for each element of the filter.

The bound is matmul's (`codegen/operators/matmul/reference.py`) for sums of n p q products, in any order and any number
of slices. A kernel that computes fp16 or bf16 on the CUDA cores multiplies and adds in fp32 with one rounding for each
product: it is inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from codegen.alignment import needs_cuda_cores
from codegen.arrays import Array, Float64, as_float64, namespace_of
from codegen.epilogue import tensor_nodes
from codegen.epilogue_reference import Bounded, apply_chain, stored
from codegen.operators.conv2d.reference import channels_last
from codegen.operators.conv2d_wgrad.problem import Conv2dWgradProblem, with_axes
from codegen.operators.matmul.reference import accumulated


def reference(problem: Conv2dWgradProblem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
    """(result, bound), both of dw's logical shape, in the inputs' namespace."""
    p = problem
    dy, x = (channels_last(p, as_float64(inputs[name], p.dtype)) for name in ("dy", "x"))
    # What no window meets may be anything: NaN would spoil the bound.
    x = namespace_of(x).nan_to_num(x)
    multiply = partial(correlate, p)
    on_cuda_cores = needs_cuda_cores(p.dtype, p.allow_tf32)
    bound = accumulated(multiply, dy, x, p.pixels, on_cuda_cores=on_cuda_cores, tf32=p.allow_tf32)
    sums, bound = (_as_matrix(p, dw) for dw in (multiply(dy, x), bound))
    chain = with_axes(p.epilogue)
    tensors = {
        name: inputs[name] if node.op == "bias" else inputs[name].reshape(p.k, p.taps)
        for node, name, _ in tensor_nodes(chain, p.out_dtype)
    }
    final = stored(p.out_dtype, apply_chain(chain, Bounded(sums, bound), tensors, exact, p.out_dtype))
    return final.value.reshape(p.w_shape), final.error.reshape(p.w_shape)


def correlate(problem: Conv2dWgradProblem, dy: Float64, x: Float64) -> Float64:
    """dy of n, p, q, k and x of n, h, w, c give k, r, s, c / groups."""
    p, xp = problem, namespace_of(x)
    (top, left), (step_h, step_w), (apart_h, apart_w) = p.corner, p.stride, p.dilation
    padded = xp.zeros((p.n, *p.padded, p.c))
    padded[:, top : top + p.h, left : left + p.w] = x
    by_group = dy.reshape(p.pixels, p.groups, p.group_filters).transpose(1, 2, 0)
    dw = xp.zeros((p.groups, p.group_filters, p.r, p.s, p.group_channels))
    for r in range(p.r):
        for s in range(p.s):
            rows = slice(r * apart_h, r * apart_h + (p.p - 1) * step_h + 1, step_h)
            columns = slice(s * apart_w, s * apart_w + (p.q - 1) * step_w + 1, step_w)
            seen = padded[:, rows, columns].reshape(p.pixels, p.groups, p.group_channels)
            element = xp.matmul(by_group, seen.transpose(1, 0, 2))
            dw[:, :, r : r + 1, s : s + 1] = element.reshape(p.groups, p.group_filters, 1, 1, p.group_channels)
    return dw.reshape(p.k, p.r, p.s, p.group_channels)


def _as_matrix(problem: Conv2dWgradProblem, dw: Float64) -> Float64:
    """A row for each filter, with its elements in dw's own order."""
    return (dw if problem.channels_last else dw.transpose(0, 3, 1, 2)).reshape(problem.k, problem.taps)
