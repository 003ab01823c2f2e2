"""NumPy plays the kernel: sums as the CUDA cores or the poorest tensor cores make them, the epilogue in fp32, and one
rounding to the output's dtype. Shares nothing with the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from codegen.dtypes import dtype
from codegen.operators import operator
from codegen.operators.matmul.problem import MatmulProblem

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
_erf = np.frompyfunc(math.erf, 1, 1)


def computed(
    problem: MatmulProblem,
    inputs: Mapping[str, Array],
    *,
    drop: int = 0,
    exact: bool = False,
    spoil: Callable[[Array], Array] = lambda products: products,
) -> Array:
    """What a kernel writes. `drop` leaves out the last elements along k, `exact` makes approximated activations the
    identity, `spoil` is what happens to the products of one element of k."""
    sums = summed(problem, inputs, drop=drop, spoil=spoil)
    if problem.out_dtype == "int32":
        return sums
    value = sums.astype(np.float32)
    of_call = operator("matmul").operands(problem)
    tensors = iter([inputs[operand.name] for operand in of_call if operand.name not in ("a", "b", "out")])
    for node in problem.epilogue:
        tensor = next(tensors) if node.operand else None
        stored = tensor if tensor is None or tensor.dtype == np.uint8 else tensor.astype(np.float32)
        value = _node(node, value, stored, exact)
    assert value.dtype == np.float32
    with np.errstate(over="ignore"):
        return value.astype(dtype(problem.out_dtype).numpy)


def summed(
    problem: MatmulProblem,
    inputs: Mapping[str, Array],
    *,
    drop: int = 0,
    spoil: Callable[[Array], Array] = lambda products: products,
) -> Array:
    """The accumulators: int32, or float32 in plain order (CUDA cores), or in the blocks of a tensor core."""
    a, b = inputs["a"], inputs["b"]
    a = a.swapaxes(-1, -2) if problem.a_transposed else a
    b = b.swapaxes(-1, -2) if problem.b_transposed else b
    a, b = a[..., : problem.k - drop], b[..., : problem.k - drop, :]
    if problem.dtype == "int8":
        return _integer_sums(spoil(a.astype(np.int64)), b.astype(np.int64))
    if problem.allow_tf32:
        a, b = tf32(a), tf32(b)
    wide = [
        spoil(a[..., :, i, None].astype(np.float64) * b[..., None, i, :].astype(np.float64)) for i in range(a.shape[-1])
    ]
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), problem.m, problem.n)
    if problem.dtype != "float32" or problem.allow_tf32:
        return in_blocks(wide, shape).astype(np.float32)
    value = np.zeros(shape, dtype=np.float32)
    for product in wide:
        value = (value + product).astype(np.float32)  # one rounding, but for rare double roundings: an fma
    return value


def _integer_sums(a: Array, b: Array) -> Array:
    """Modulo 2^32, as int32 wraps around."""
    return np.matmul(a, b).astype(np.uint64).astype(np.uint32).view(np.int32)


def tf32(values: Float32) -> Float32:
    """To the nearest of 11 significant bits, ties away from zero."""
    return cut_off((np.ascontiguousarray(values).view(np.uint32) + np.uint32(0x1000)).view(np.float32))


def cut_off(values: Float32) -> Float32:
    """Without the low 13 bits, as the tensor cores read fp32."""
    return (np.ascontiguousarray(values).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def in_blocks(products: list[Array], shape: tuple[int, ...], block: int = 4) -> Array:
    """Sums as V100 makes them, with the fewest bits of all (Fasi et al., PeerJ CS 7:e330): blocks of 4 products and the
    accumulator aligned to the largest, cut off behind 24 bits, added, cut off again."""
    total = np.zeros(shape)
    for first in range(0, len(products), block):
        addends = np.stack(np.broadcast_arrays(total, *products[first : first + block]))
        _, exponent = np.frexp(np.max(np.abs(addends), axis=0))
        quantum = np.ldexp(1.0, exponent - 24)
        total = np.sum(np.trunc(addends / quantum), axis=0) * quantum
        _, exponent = np.frexp(total)
        quantum = np.ldexp(1.0, exponent - 24)
        total = np.trunc(total / quantum) * quantum
    return total


def through_bfloat16(products: Array) -> Array:
    """Products that lost all but 8 bits on the way: `spoil` of a kernel that is wrong."""
    return products.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def _node(node: Any, x: Float32, tensor: Any, exact: bool) -> Float32:
    one, half = np.float32(1), np.float32(0.5)
    if not node.exact and exact and node.op != "masked_activation":  # which has two functions, each of its own
        return x
    with np.errstate(over="ignore"):
        match node.op:
            case "bias":
                return x + (tensor[:, None] if node.axis == "m" else tensor)
            case "residual":
                return x + tensor
            case "masked_activation":
                functions = (_node(each, x, None, exact) for each in (node.where_set, node.where_clear))
                return np.where(tensor != 0, *functions)
            case "mask":
                return np.where(tensor != 0, x, np.float32(0))
            case "scale":
                return x * np.float32(node.value)
            case "relu":
                return np.maximum(x, np.float32(0))
            case "leaky_relu":
                return np.where(x < 0, x * np.float32(node.slope), x)
            case "clip":
                return np.clip(x, np.float32(node.lo), np.float32(node.hi))
            case "gelu":
                return half * x * (one + _erf(x * np.float32(math.sqrt(0.5))).astype(np.float32))
            case "sigmoid":
                return one / (one + np.exp(-x))
            case "silu":
                return x / (one + np.exp(-x))
            case "tanh":
                return np.tanh(x)
            case "cast" if node.dtype == "float16":
                return x.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)
