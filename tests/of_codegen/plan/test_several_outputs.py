"""Outputs of a call that are several tensors: poisoned, checked and compared together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from codegen.arrays import joined
from codegen.operand import Operand
from codegen.plan.verification_plan import differing
from workers.gpu.tensors import Operands

SUMS = Operand("out", "float32", "out", (3,), (1,))
MAPPED = Operand("dx", "float16", "out", (2, 3), (4, 1))


def operands(*outs: Operand) -> Operands:
    gpu: Any = SimpleNamespace(arrays=np, address=lambda array: array.ctypes.data)
    return Operands(gpu, [Operand("x", "float16", "in", (2, 3), (4, 1)), *outs], verifying=True)


def tensor(held: Operands, name: str) -> Any:
    (output,) = (tensor for tensor in held.tensors if tensor.operand.name == name)
    return output


def test_values_are_those_of_each_tensor_one_behind_the_other() -> None:
    held = operands(SUMS, MAPPED)
    tensor(held, "out").view[...] = [1.0, 2.0, 3.0]
    tensor(held, "dx").view[...] = [[4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]
    np.testing.assert_array_equal(held.out.values(), np.arange(1.0, 10.0))


def test_all_of_them_are_poisoned() -> None:
    held = operands(SUMS, MAPPED)
    for name in ("out", "dx"):
        tensor(held, name).view[...] = 1.0
    held.out.poison()
    assert np.isnan(held.out.values()).all()


@pytest.mark.parametrize("name", ["out", "dx"])
def test_a_bit_of_any_tensor_counts(name: str) -> None:
    held = operands(SUMS, MAPPED)
    for operand in ("out", "dx"):
        tensor(held, operand).view[...] = 1.0
    first = held.out.bits()
    assert differing(first, held.out.bits()) == 0
    tensor(held, name).view[..., -1] = -1.0
    assert differing(first, held.out.bits()) > 0


def test_what_is_written_between_the_rows_of_any_is_noticed() -> None:
    held = operands(SUMS, MAPPED)
    held.write({"x": np.zeros((2, 3), np.float16)})
    assert held.harm() is None
    np.lib.stride_tricks.as_strided(tensor(held, "dx").view, (2, 4))[0, 3] = 1.0  # rows are 4 apart
    assert held.harm() == "wrote between the rows of dx, at element 3"


def test_a_single_array_stays_as_it_is() -> None:
    only = np.zeros((2, 3))
    assert joined([only]) is only
