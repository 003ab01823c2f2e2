"""Calls of kernels of target `cpu` as a framework makes them, beside their operator's float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

import cukiln
from codegen.arrays import compared
from codegen.dtypes import dtype
from codegen.operand import Operand
from codegen.operators import operator
from codegen.plan.verification_plan import Kind, OutputCheck, check_output
from codegen.problem import Problem

LAYER = {"n": 1, "h": 9, "w": 7, "c": 8, "k": 8, "r": 3, "s": 3, "padding": 1}
NODES = [{"op": "bias", "axis": "n"}, {"op": "gelu"}, {"op": "residual"}]
SPLIT = {"split": ["workspace"], "split_k": [3]}
# Operator, problem, lists of tunables.
Case = tuple[str, dict[str, Any], dict[str, list[Any]] | None]
CASES: dict[str, Case] = {
    "fp32": ("matmul", {"m": 33, "n": 20, "k": 50, "batch": 2, "epilogue": NODES}, None),
    "fp16 on tensor cores, in three parts": ("matmul", {"m": 40, "n": 48, "k": 256, "dtype": "float16"}, SPLIT),
    "a convolution": ("conv2d", {**LAYER, "dtype": "float16", "epilogue": [{"op": "bias"}, {"op": "relu"}]}, None),
    "by winograd": ("conv2d", {**LAYER, "winograd": "f2"}, {"algorithm": ["winograd"]}),
    "softmax": ("softmax", {"shape": [6, 40]}, None),
    "a reduction": ("reduce", {"shape": [60, 48], "axes": [0]}, None),
    "attention": ("attention", {"seq_q": 40, "heads_q": 2, "head_dim_qk": 64, "causal": True, "lse": True}, None),
}
LONG_CASES: dict[str, Case] = {
    "bfloat16": ("matmul", {"m": 40, "n": 48, "k": 64, "dtype": "bfloat16", "layout": "nt"}, None),
    "tf32": ("matmul", {"m": 32, "n": 32, "k": 64, "allow_tf32": True}, None),
    "int8": ("matmul", {"m": 32, "n": 32, "k": 64, "dtype": "int8"}, None),
    "a ring": ("matmul", {"m": 24, "n": 16, "k": 40, "dtype": "int64", "fraction_bits": 12}, None),
    "gradient of the image": ("conv2d_dgrad", {**LAYER, "stride": 2}, None),
    "gradient of the filters": ("conv2d_wgrad", {**LAYER}, None),
    "layer_norm": ("layer_norm", {"shape": [5, 96], "dtype": "bfloat16"}, None),
    "rms_norm": ("rms_norm", {"shape": [5, 101], "out_dtype": "float16"}, None),
    "masked_activation": ("masked_activation", {"shape": [8, 100], "where_set": {"op": "gelu"}}, None),
    "mla": ("mla", {"batch": 2, "seq_kv": 40, "heads_q": 16, "kv_lengths": [40, 9], "page_size": 16}, None),
}


def checked_call(kernel: cukiln.Kernel, problem: Problem, kind: Kind = "normal", **options: Any) -> OutputCheck:
    """Of one call on fresh inputs. Outputs, and gaps between rows, begin as NaN."""
    op = operator(problem.operator)
    operands = op.operands(problem)
    inputs = op.make_inputs(problem, kind, np.random.default_rng(7))
    arrays = [_array(operand) for operand in operands]
    for operand, array in zip(operands, arrays, strict=True):
        if operand.role == "in":
            array[...] = inputs[operand.name]
    numbers = {"attributes": tuple(op.attributes(problem)), "scalars": tuple(op.scalars(problem))}
    kernel(*map(tensor, arrays), **numbers, **options)
    expected, bound = op.reference(problem, inputs)
    outs = [(array, o.dtype) for o, array in zip(operands, arrays, strict=True) if o.role == "out"]
    return check_output(compared(outs), expected, bound, exact=False)


def _array(operand: Operand) -> NDArray[Any]:
    element = dtype(operand.dtype)
    memory = np.full(operand.elements * element.bytes, 0xFF, np.uint8).view(element.numpy)
    return as_strided(memory, operand.shape, tuple(stride * element.bytes for stride in operand.strides))


def tensor(array: NDArray[Any]) -> Any:
    """NumPy has no DLPack of bfloat16."""
    if array.dtype != dtype("bfloat16").numpy:
        return array
    import torch

    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
