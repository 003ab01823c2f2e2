"""Convolutions and their gradients in float64, and how far a kernel may be from them. Shares nothing with the kernel: a
product of matrices for each element of the filter, added up in float64.

The bound is matmul's (`codegen/operators/matmul/reference.py`) for sums of as many products as the longest has, in any
order and any number of slices. A kernel that computes fp16 or bf16 on the CUDA cores multiplies and adds in fp32 with
one rounding for each product: it is inside.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from codegen.arrays import Array, Float64, as_float64, namespace_of
from codegen.epilogue import Node, tensor_nodes
from codegen.epilogue_reference import Bounded, apply_chain, stored, unpacked_masks
from codegen.fixed_point_reference import finished
from codegen.operators.convolution.problem import Convolution, with_axes
from codegen.special_values import finite, of_sums, through_chain


def reference(
    problem: Convolution,
    multiply: Callable[[Float64, Float64], Float64],
    bounded: Callable[[Float64, Float64], Float64],
    inputs: Mapping[str, Array],
    exact: bool,
    reached: Callable[[Array], Array] | None = None,
) -> tuple[Float64, Float64]:
    """(result, bound), both of the result's logical shape, in the inputs' namespace. `multiply`: of the two tensors
    that are read, and it makes the result, channels last; `bounded`: how far a kernel's may be from that. `reached`: of
    what is no number in the first tensor, which outputs an algorithm may make something else of than sums have; those
    whose own sums have a NaN are NaN all the same."""
    p = problem
    operands = {name: channels_last(p, as_float64(inputs[name], p.dtype)) for name in p.reads}
    first, second = operands.values()
    xp = namespace_of(first)
    chain, tensors = _epilogue(p, inputs)
    # What no sum reads may be anything: NaN would spoil the bound.
    numbers = finite(first), finite(second)
    start = Bounded(multiply(*numbers), bounded(*numbers))
    if bool(xp.all(xp.isfinite(first)) & xp.all(xp.isfinite(second))):
        final = stored(p.out_dtype, apply_chain(chain, start, tensors, exact, p.out_dtype))
    else:
        with np.errstate(invalid="ignore"):  # of infinities NaN
            whole = multiply(first, second)
        if reached is not None:
            nan = multiply((first != first).astype(np.float64), xp.zeros_like(second) + 1.0) > 0.0
            unsure = reached(~xp.isfinite(first)) & ~nan
            start = Bounded(start.value, xp.where(unsure, np.inf, start.error))
            whole = xp.where(nan, np.nan, xp.where(unsure, start.value, whole))
        final = through_chain(chain, of_sums(start, whole), tensors, p.out_dtype, exact)
    return _as_laid_out(p, final.value), _as_laid_out(p, final.error)


def in_ring(
    problem: Convolution, multiply: Callable[[Array, Array], Array], inputs: Mapping[str, Array]
) -> tuple[Array, Array]:
    """The same over a ring, where `multiply` wraps around as the ring does."""
    p = problem
    first, second = (channels_last(p, inputs[name]) for name in p.reads)
    chain, tensors = _epilogue(p, inputs)
    value, bound = finished(p, chain, multiply(first, second), tensors)
    return _as_laid_out(p, value), _as_laid_out(p, bound)


def _epilogue(problem: Convolution, inputs: Mapping[str, Array]) -> tuple[tuple[Node, ...], dict[str, Array]]:
    """The chain and its tensors, where filters are the last axis, whatever the layout is, or of a gradient of theirs
    the first."""
    p, chain = problem, with_axes(problem.epilogue, "n")
    unpacked = unpacked_masks(chain, inputs, p.shape_of(p.writes))
    vector = (p.k, 1, 1, 1) if p.writes == "dw" else (p.k,)
    return chain, {
        name: inputs[name].reshape(vector) if node.op == "bias" else channels_last(p, unpacked[name])
        for node, name, _ in tensor_nodes(chain, p.out_dtype)
    }


def _as_laid_out(problem: Convolution, values: Array) -> Array:
    return values if problem.channels_last else values.transpose(0, 3, 1, 2)


def windows(problem: Convolution) -> Iterator[tuple[int, int, slice, slice]]:
    """Each element of the filter, and the rows and columns of the padded image that it meets."""
    p = problem
    for r in range(p.r):
        for s in range(p.s):
            rows, columns = (
                slice(tap * apart, tap * apart + (outputs - 1) * step + 1, step)
                for tap, apart, outputs, step in zip((r, s), p.dilation, (p.p, p.q), p.stride, strict=True)
            )
            yield r, s, rows, columns


def padded(problem: Convolution, x: Array) -> Array:
    """x of n, h, w, c with the zeros around it."""
    p, (top, left) = problem, problem.corner
    image: Array = namespace_of(x).zeros((p.n, *p.padded, p.c), dtype=x.dtype)
    image[:, top : top + p.h, left : left + p.w] = x
    return image


def channels_last(problem: Convolution, values: Array) -> Array:
    """With channels as the last axis."""
    return values if problem.channels_last else values.transpose(0, 2, 3, 1)
