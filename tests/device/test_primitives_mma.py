"""The CPU emulations of mma have every element where the PTX ISA manual says, and add as cpu/tensor_sums.h says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.gpu.primitive_checks import CHECKS, Check
from tests.gpu.primitive_inputs import PER_WORD, Kind, Words, numbers, to_words
from tests.gpu.run_primitives import CpuEmulations
from tests.support.lane_tables import LANES, LDMATRIX, LDMATRIX_TRANS, MMA, Fragment

KINDS = {
    "mma_m16n8k16_f16": Kind((4, 4, 2), "float16", "float32"),
    "mma_m16n8k16_bf16": Kind((4, 4, 2), "bfloat16", "float32"),
    "mma_m16n8k16_f16_f16": Kind((2, 4, 2), "float16", "float16"),
    "mma_m16n8k8_f16": Kind((4, 2, 1), "float16", "float32"),
    "mma_m16n8k8_tf32": Kind((4, 4, 2), "tf32", "float32"),
    "mma_m16n8k32_s8": Kind((4, 4, 2), "int8", "int32"),
    "mma_m16n8k32_u8": Kind((4, 4, 2), "uint8", "int32"),
}
FLOATS = [name for name, kind in KINDS.items() if kind.operand not in ("int8", "uint8")]
Matrix = NDArray[Any]


def mma_check(name: str) -> Check:
    return next(check for check in CHECKS if check.primitives == (name,))


# --- the lane tables themselves


def all_fragments() -> Iterator[Fragment]:
    for mma in MMA.values():
        yield from (mma.a, mma.b, mma.d)
    yield from (LDMATRIX, LDMATRIX_TRANS)


def test_every_element_of_a_matrix_is_in_exactly_one_place() -> None:
    for fragment in all_fragments():
        places = [fragment.place(lane, i) for lane in range(LANES) for i in range(len(fragment.places))]
        assert sorted(places) == [(i, j) for i in range(fragment.rows) for j in range(fragment.columns)], fragment


def test_the_tables_have_as_many_registers_as_the_primitives() -> None:
    for name, mma in MMA.items():
        assert (mma.d.registers, mma.a.registers, mma.b.registers) == KINDS[name].registers
        assert (mma.d.per_register, mma.a.per_register) == (PER_WORD[KINDS[name].sum], PER_WORD[KINDS[name].operand])


# --- mma, through matrices


def spread(matrices: Matrix, fragment: Fragment) -> Matrix:
    """Matrices (blocks, rows, columns) as what the lanes hold of them: (blocks, 32, elements)."""
    places = np.array([[fragment.place(lane, i) for i in range(len(fragment.places))] for lane in range(LANES)])
    return matrices[:, places[..., 0], places[..., 1]]


def collected(held: Matrix, fragment: Fragment) -> Matrix:
    """The other way round."""
    matrices = np.empty((len(held), fragment.rows, fragment.columns), held.dtype)
    for lane in range(LANES):
        for i in range(len(fragment.places)):
            matrices[:, *fragment.place(lane, i)] = held[:, lane, i]
    return matrices


def from_words(words: Words, dtype: str) -> Matrix:
    """The numbers of registers (blocks, 32, registers); tf32 as the float whose bits it has."""
    numpy_type = {"tf32": np.float32, "bfloat16": ml_dtypes.bfloat16}.get(dtype) or np.dtype(dtype)
    return np.ascontiguousarray(words).view(numpy_type)


def multiply(emulations: CpuEmulations, name: str, a: Matrix, b: Matrix, d: Matrix) -> Matrix:
    """d + a * b of the emulation, for matrices with an axis for blocks in front."""
    kind, mma = KINDS[name], MMA[name]
    operands = np.concatenate([spread(a, mma.a), spread(b, mma.b)], axis=2)
    outputs = emulations.run(mma_check(name), kind.words(spread(d, mma.d), operands))
    return collected(from_words(outputs.reshape(len(a), LANES, -1), kind.sum), mma.d)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("code", ["row", "column"])
def test_mma_takes_every_element_of_a_from_its_lane_and_register(
    name: str, code: str, emulations: CpuEmulations
) -> None:
    """Each block has one element of a alone, so that one row of the result shows one row of b; b holds the number of
    its rows or of its columns, d a number for each of its elements."""
    k = MMA[name].a.columns
    a = np.eye(16 * k).reshape(16 * k, 16, k)
    rows, columns = np.mgrid[0:k, 0:8]
    b = np.broadcast_to(rows + 1 if code == "row" else columns + 1, (16 * k, k, 8)).astype(np.float64)
    d = np.broadcast_to(np.arange(128.0).reshape(16, 8), (16 * k, 16, 8))
    np.testing.assert_array_equal(multiply(emulations, name, a, b, d).astype(np.float64), d + a @ b)


@pytest.mark.parametrize("name", KINDS)
def test_mma_takes_every_element_of_b_from_its_lane_and_register(name: str, emulations: CpuEmulations) -> None:
    k = MMA[name].a.columns
    b = np.eye(k * 8).reshape(k * 8, k, 8)
    rows, columns = np.mgrid[0:16, 0:k]
    d = np.zeros((k * 8, 16, 8))
    for code in (rows + 1, columns + 1):
        a = np.broadcast_to(code, (k * 8, 16, k)).astype(np.float64)
        np.testing.assert_array_equal(multiply(emulations, name, a, b, d).astype(np.float64), a @ b)


def exactly(number: float) -> tuple[Fraction, int]:
    """A number and the exponent of its significand in [1, 2)."""
    return Fraction(number), math.frexp(number)[1] - 1


def added_by_tensor_cores(d: float, products: list[tuple[float, float]], lowest: int, half: bool) -> float:
    """One block of cpu/tensor_sums.h on Turing, Ampere or Ada, in fractions. `lowest`: the exponent of the operands'
    subnormal numbers."""
    special = [x * y for x, y in products if not (math.isfinite(x) and math.isfinite(y))]
    if special or not math.isfinite(d):
        return sum(special, 0.0 if math.isfinite(d) else d)
    terms = []
    for x, y in products:
        (left, of_left), (right, of_right) = exactly(x), exactly(y)
        if left * right != 0:
            terms.append((left * right, max(of_left, lowest) + max(of_right, lowest)))
    if d != 0:
        terms.append((Fraction(d), max(exactly(d)[1], -14 if half else -126)))
    unit = Fraction(2) ** (max([-20 if half else -132, *(exponent for _, exponent in terms)]) - 24)
    total = sum(math.trunc(value / unit) for value, _ in terms) * unit
    if total == 0:
        return 0.0
    exponent = math.frexp(float(total))[1] - 1  # exact: of few bits
    step = Fraction(2) ** (max(exponent, -14) - 10 if half else max(exponent, -126) - 23)
    return float(round(total / step) * step if half else math.trunc(total / step) * step) + 0.0


@pytest.mark.parametrize("name", FLOATS)
def test_mma_adds_blocks_of_aligned_and_truncated_products(name: str, emulations: CpuEmulations) -> None:
    """Bit by bit, on numbers of all sizes, subnormal ones, infinities and NaN."""
    kind, mma = KINDS[name], MMA[name]
    words = numbers(kind)(np.random.default_rng(5))
    held = words.reshape(len(words), LANES, -1)
    d_words, a_words, b_words = np.split(held, np.cumsum(kind.registers)[:2], axis=2)
    operands = []
    for part, fragment in ((a_words, mma.a), (b_words, mma.b)):
        truncated = part & np.uint32(0xFFFFE000) if kind.operand == "tf32" else part
        operands.append(collected(from_words(truncated, kind.operand), fragment).astype(np.float64))
    d = collected(from_words(d_words, kind.sum), mma.d).astype(np.float64)
    outputs = emulations.run(mma_check(name), words).reshape(len(words), LANES, -1)
    result = collected(from_words(outputs, kind.sum), mma.d).astype(np.float64)
    lowest, block = (-14 if kind.operand == "float16" else -126), (4 if kind.operand == "tf32" else 8)
    (a, b), nans = operands, 0
    for at in np.random.default_rng(6).integers((0, 0, 0), (len(words), 16, 8), (1500, 3)):
        tile, row, column = at
        expected = float(d[tile, row, column])
        for first in range(0, a.shape[2], block):
            pairs = zip(a[tile, row, first : first + block], b[tile, first : first + block, column], strict=True)
            products = [(float(x), float(y)) for x, y in pairs]
            expected = added_by_tensor_cores(expected, products, lowest, kind.sum == "float16")
        nans += math.isnan(expected)
        got = float(result[tile, row, column])
        assert got == expected or (math.isnan(got) and math.isnan(expected)), (name, at, got, expected)
        assert math.copysign(1, got) == math.copysign(1, expected) or math.isnan(got)
    assert 0 < nans < 1500 / 2


def one_element(emulations: CpuEmulations, name: str, a: list[float], b: list[float], d: float) -> Any:
    """The first element of the result, for a first row of a and a first column of b that start with these numbers."""
    k = MMA[name].a.columns
    left, right, start = np.zeros((1, 16, k)), np.zeros((1, k, 8)), np.zeros((1, 16, 8))
    left[0, 0, : len(a)], right[0, : len(b), 0], start[0, 0, 0] = a, b, d
    return multiply(emulations, name, left, right, start)[0, 0, 0]


def test_tf32_loses_the_13_lowest_bits_of_its_operands(emulations: CpuEmulations) -> None:
    name = "mma_m16n8k8_tf32"
    assert one_element(emulations, name, [1 + 2.0**-10], [1.0], 0.0) == 1 + 2.0**-10
    assert one_element(emulations, name, [1 + 2.0**-11], [1.0], 0.0) == 1.0
    assert one_element(emulations, name, [2 - 2.0**-23], [-1.0], 0.0) == -(2 - 2.0**-10)
    assert one_element(emulations, name, [1.0], [2 - 2.0**-23], 2.0**-20) == 2 - 2.0**-10 + 2.0**-20  # not those of d


def test_a_block_is_truncated_to_24_bits_below_its_largest_exponent(emulations: CpuEmulations) -> None:
    name = "mma_m16n8k16_f16"
    ones = [1.0, 1.0, 1.0, 1.0]
    assert one_element(emulations, name, ones, ones, 2.0**24) == 2.0**24 + 4
    assert one_element(emulations, name, [0.5] * 4, ones, 2.0**24) == 2.0**24  # each half is lost
    assert one_element(emulations, name, [1.0, -1.0, 4096.0], [1.0, 2.0**-10, 4096.0], 0.0) == 2.0**24  # 2^-10 is, too
    # The second block of 8 is another addition, whose sum is truncated toward zero.
    eighth = [0.0] * 8 + [1.0]
    assert one_element(emulations, name, eighth, eighth, -(2.0**24) - 2) == -(2.0**24) - 0
    assert one_element(emulations, name, [0.25] * 8 + [1.0], [1.0] * 9, 2.0**24) == 2.0**24


def test_sums_in_half_are_rounded_to_the_nearest_after_each_block(emulations: CpuEmulations) -> None:
    name = "mma_m16n8k16_f16_f16"
    ones = [1.0] * 16
    assert one_element(emulations, name, [1.0, 1.0, 1.0], ones, 2048.0) == 2052.0  # 2051 is a tie, to even
    assert one_element(emulations, name, [1.0] + [0.0] * 7 + [1.0], ones, 2048.0) == 2048.0  # twice a tie
    assert one_element(emulations, name, [256.0], [256.0], 0.0) == np.inf


def test_subnormal_numbers_count_as_what_they_are(emulations: CpuEmulations) -> None:
    assert one_element(emulations, "mma_m16n8k16_f16", [2.0**-24], [2.0**-24], 0.0) == 2.0**-48
    assert one_element(emulations, "mma_m16n8k16_bf16", [2.0**-133], [2.0**100], 0.0) == 2.0**-33
    assert one_element(emulations, "mma_m16n8k8_tf32", [2.0**-136], [1.0], 2.0**-149) == 2.0**-136 + 2.0**-149
    assert one_element(emulations, "mma_m16n8k16_f16_f16", [2.0**-24], [1.0], 2.0**-24) == 2.0**-23


@pytest.mark.parametrize("name", FLOATS)
def test_infinities_and_nan_spread_as_ieee_754_says(name: str, emulations: CpuEmulations) -> None:
    assert one_element(emulations, name, [np.inf], [-2.0], 1.0) == -np.inf
    assert np.isnan(one_element(emulations, name, [np.inf, np.inf], [1.0, -1.0], 0.0))
    assert np.isnan(one_element(emulations, name, [np.inf], [0.0], 0.0))
    assert np.isnan(one_element(emulations, name, [np.nan], [0.0], 0.0))
    assert np.isnan(one_element(emulations, name, [1.0], [1.0], np.nan))


@pytest.mark.parametrize("name", FLOATS)
def test_a_sum_that_is_zero_is_positive_and_a_nan_the_canonical_one(name: str, emulations: CpuEmulations) -> None:
    k = MMA[name].a.columns
    a, b, d = np.full((1, 16, k), -0.0), np.full((1, k, 8), 1.0), np.full((1, 16, 8), -0.0)
    assert not np.signbit(multiply(emulations, name, a, b, d)).any()
    nan = multiply(emulations, name, np.full_like(a, -np.nan), b, d)
    assert (
        (nan.view(np.uint16) == 0x7FFF).all()
        if KINDS[name].sum == "float16"
        else (nan.view(np.uint32) == 0x7FFFFFFF).all()
    )


def test_int8_sums_wrap_around(emulations: CpuEmulations) -> None:
    name = "mma_m16n8k32_s8"
    assert one_element(emulations, name, [127.0], [127.0], 2.0**31 - 1) == -(2**31) + 127 * 127 - 1
    assert one_element(emulations, name, [-128.0], [127.0], -(2.0**31)) == 2**31 - 128 * 127
    assert one_element(emulations, name, [-128.0] * 32, [-128.0] * 32, 0.0) == 32 * 2**14


def test_sums_of_unsigned_bytes_wrap_around(emulations: CpuEmulations) -> None:
    name = "mma_m16n8k32_u8"
    assert one_element(emulations, name, [255.0], [255.0], 0.0) == 255 * 255
    assert one_element(emulations, name, [255.0] * 32, [255.0] * 32, 2.0**31 - 1) == -(2**31) + 32 * 255**2 - 1
    assert one_element(emulations, name, [255.0], [1.0], -1.0) == 254


@pytest.mark.parametrize("dtype", ["float32", "tf32", "bfloat16", "float16", "int8", "int32"])
def test_registers_hold_the_numbers_that_they_are_made_of(dtype: str) -> None:
    made = np.array([[[1.0, -2.0, 3.0, 100.0]]])
    np.testing.assert_array_equal(from_words(to_words(made, dtype), dtype).astype(np.float64), made)
