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
