"""Inputs of large operands: a block is repeated, and confused rows, columns or tiles have other numbers."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from codegen.operators import operator
from codegen.operators.matmul.inputs import BLOCKS, LARGEST_RANDOM
from tests.support.fixtures.codegen import matmul
from tests.support.run.each_run import some_each_run

OP = operator("matmul")
DTYPES, KINDS = ["float32", "float16", "bfloat16", "int8"], ["integer", "normal"]
LARGE = {"m": 16, "n": 2048, "k": 4096}  # B has 2^23 elements


def test_lengths_of_blocks_are_primes_below_the_random_part() -> None:
    for length in BLOCKS:
        assert length <= LARGEST_RANDOM
        assert all(length % divisor for divisor in range(2, int(length**0.5) + 1))


def test_what_is_not_large_is_random_element_by_element() -> None:
    problem = matmul(m=8, n=1024, k=4096)  # B has as many elements as are random
    made = OP.make_inputs(problem, "normal", np.random.default_rng(3))
    rng = np.random.default_rng(3)
    rng.integers(2)
    for name, shape in (("a", (8, 4096)), ("b", (4096, 1024))):
        assert np.array_equal(made[name], rng.standard_normal(shape, dtype=np.float32))


@pytest.mark.parametrize(("dtype", "kind", "layout"), some_each_run([*product(DTYPES, KINDS, ("nn", "nt"))], 6))
def test_no_two_rows_columns_or_tiles_of_a_large_operand_are_alike(dtype: str, kind: Any, layout: str) -> None:
    b = OP.make_inputs(matmul(dtype=dtype, layout=layout, **LARGE), kind, np.random.default_rng(1))["b"]
    rows, columns = b.shape
    assert np.array_equal(b.reshape(-1)[BLOCKS[0] :], b.reshape(-1)[: -BLOCKS[0]]), "a block is repeated"
    assert len({row.tobytes() for row in b}) == rows
    assert len({column.tobytes() for column in np.ascontiguousarray(b.T)}) == columns
    tiles = b.reshape(rows // 16, 16, columns // 8, 8).swapaxes(1, 2).reshape(-1, 16 * 8)
    assert len({tile.tobytes() for tile in np.ascontiguousarray(tiles)}) == len(tiles)


@pytest.mark.parametrize("dtype", some_each_run(DTYPES, 2))
def test_integers_of_large_operands_have_exact_sums_of_either_sign(dtype: str) -> None:
    problem = matmul(dtype=dtype, **LARGE)
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(2))
    value, bound = OP.reference(problem, inputs)
    assert value.min() < 0 < value.max() and len(np.unique(value)) > 100
    if dtype == "float32":
        assert not bound.any()


def test_matrices_of_a_large_batch_are_not_alike() -> None:
    b = OP.make_inputs(matmul(m=8, n=256, k=256, batch=80), "normal", np.random.default_rng(1))["b"]
    assert b.size > LARGEST_RANDOM
    assert len({matrix.tobytes() for matrix in b}) == 80
    assert len({row.tobytes() for row in b.reshape(-1, 256)}) == 80 * 256
