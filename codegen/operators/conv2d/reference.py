"""Convolution in float64, and how far a kernel may be from it. Shares nothing with the kernel: one product of matrices
for each element of the filter, added up in float64.

The bound is matmul's (`codegen/operators/matmul/reference.py`) for sums of r s c / groups products. A kernel that
computes fp16 or bf16 on the CUDA cores multiplies and adds in fp32 with one rounding for each product: it is inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from codegen.alignment import needs_cuda_cores
from codegen.arrays import Array, Float64, as_float64, namespace_of
from codegen.epilogue import tensor_nodes
from codegen.epilogue_reference import Bounded, apply_chain, stored, unpacked_masks
from codegen.operators.conv2d.problem import Conv2dProblem, Convolution, with_axes
from codegen.operators.matmul.reference import accumulated


def reference(problem: Conv2dProblem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
    """(result, bound), both of out's logical shape, in the inputs' namespace."""
    p = problem
    x, w = (channels_last(p, as_float64(inputs[name], p.dtype)) for name in ("x", "w"))
    # What no window meets may be anything: NaN would spoil the bound.
    x = namespace_of(x).nan_to_num(x)
    multiply = partial(convolve, p)
    on_cuda_cores = needs_cuda_cores(p.dtype, p.allow_tf32)
    bound = accumulated(multiply, x, w, p.taps, on_cuda_cores=on_cuda_cores, tf32=p.allow_tf32)
    # Channels are the last axis here, whatever the layout is.
    chain = with_axes(p.epilogue, "nhwc")
    unpacked = unpacked_masks(chain, inputs, p.out_shape)
    tensors = {
        name: inputs[name] if node.op == "bias" else channels_last(p, unpacked[name])
        for node, name, _ in tensor_nodes(chain, p.out_dtype)
    }
    final = stored(p.out_dtype, apply_chain(chain, Bounded(multiply(x, w), bound), tensors, exact, p.out_dtype))
    if p.channels_last:
        return final.value, final.error
    return final.value.transpose(0, 3, 1, 2), final.error.transpose(0, 3, 1, 2)


def convolve(problem: Conv2dProblem, x: Float64, w: Float64) -> Float64:
    """x of n, h, w, c and w of k, r, s, c / groups give n, p, q, k."""
    p, xp = problem, namespace_of(x)
    (top, left), (step_h, step_w), (apart_h, apart_w) = p.corner, p.stride, p.dilation
    padded = xp.zeros((p.n, *p.padded, p.c))
    padded[:, top : top + p.h, left : left + p.w] = x
    filters = w.reshape(p.groups, p.group_filters, p.r, p.s, p.group_channels)
    sums = xp.zeros((p.groups, p.n * p.p * p.q, p.group_filters))
    for r in range(p.r):
        for s in range(p.s):
            rows = slice(r * apart_h, r * apart_h + (p.p - 1) * step_h + 1, step_h)
            columns = slice(s * apart_w, s * apart_w + (p.q - 1) * step_w + 1, step_w)
            seen = padded[:, rows, columns].reshape(p.n * p.p * p.q, p.groups, p.group_channels)
            sums += xp.matmul(seen.transpose(1, 0, 2), filters[:, :, r, s].transpose(0, 2, 1))
    out: Float64 = sums.transpose(1, 0, 2).reshape(p.n, p.p, p.q, p.k)
    return out


def channels_last(problem: Convolution, values: Array) -> Array:
    """With channels as the last axis."""
    return values if problem.channels_last else values.transpose(0, 2, 3, 1)
