"""PTX instructions that approximate come out at each end of the error that the PTX ISA gives, and no further."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.support.kernels.ptx_models import CANONICAL_NAN, INF, NEGATIVE_ZERO, ONE, bits_of, is_nan, real
from tests.support.kernels.ptx_snippets import Snippet, Snippets

TINY, SMALLEST, LARGEST = 1, 0x00800000, 0x7F7FFFFF
MINUS_INF, MINUS_ONE = 0xFF800000, 0xBF800000
PI = math.pi


class Approximation(NamedTuple):
    """`ulps`, else `error`, of the exact value: what the manual gives. `exact`: by bits, what it lists."""

    model: Callable[..., float]
    inputs: tuple[tuple[float, ...], ...]
    exact: dict[tuple[int, ...], int]
    ulps: int = 0
    error: Callable[[float, float], float] = lambda argument, value: 0.0


def single(*values: float) -> tuple[tuple[float, ...], ...]:
    return tuple((value,) for value in values)


def relative(exponent: float) -> Callable[[float, float], float]:
    return lambda _, value: abs(value) * 2.0**exponent


def of_angles(exponent: float) -> Callable[[float, float], float]:
    return lambda x, _: 2.0 ** (exponent if abs(x) <= 2 * PI else -14.7)


QUOTIENTS = ((1.0, 3.0), (-7.5, 0.3), (5e30, 1e-5), (1e-30, 3e5), (2.0, 1.9999999), (3.0, 2.0**126), (1e-20, 2.0**-126))
OF_ZERO: dict[tuple[int, ...], int] = {
    (0, ONE): 0, (NEGATIVE_ZERO, ONE): NEGATIVE_ZERO, (ONE, 0): INF, (ONE, INF): 0, (INF, ONE): INF, (INF, INF): -1,
}  # fmt: skip
# 2^126 is the last divisor that has a reciprocal.
WITHOUT_RECIPROCAL: dict[tuple[int, ...], int] = {
    (ONE, 0x7E800001): 0, (MINUS_ONE, 0x7F000000): NEGATIVE_ZERO, (ONE, 0xFF000000): NEGATIVE_ZERO, (0, LARGEST): 0,
    (INF, 0x7F000000): CANONICAL_NAN, (MINUS_INF, LARGEST): CANONICAL_NAN,
}  # fmt: skip
ANGLES = single(0.5, -1.5, 3.1, -6.28, 6.3, 20.0, -100.0, 314.15)
APPROXIMATIONS = {
    "ex2": Approximation(
        lambda x: 2.0**x, single(0.3, -0.7, 0.999, 1.1, -2.9, 60.3, -100.5), ulps=2,
        exact={(MINUS_INF,): 0, (NEGATIVE_ZERO,): ONE, (0,): ONE, (INF,): INF, (bits_of(128.5),): INF},
    ),
    "lg2": Approximation(
        math.log2, single(0.3, 0.51, 0.99, 1.01, 1.99, 2.5, 1e30, 1e-30),
        exact={(MINUS_INF,): -1, (MINUS_ONE,): -1, (NEGATIVE_ZERO,): MINUS_INF, (0,): MINUS_INF, (INF,): INF},
        error=lambda x, value: 2.0**-22 * (1.0 if 0.5 < x < 2 else abs(value)),
    ),
    "rcp": Approximation(
        lambda x: 1.0 / x, single(0.3, -0.7, 1.1, 1.9999999, 3e20, -3e-20), ulps=1,
        exact={(MINUS_INF,): NEGATIVE_ZERO, (NEGATIVE_ZERO,): MINUS_INF, (0,): INF, (INF,): 0},
    ),
    "rsqrt": Approximation(
        lambda x: x**-0.5, single(0.3, 0.7, 1.1, 3.9999998, 1e30, 1e-30), error=relative(-22.9),
        exact={(MINUS_INF,): -1, (MINUS_ONE,): -1, (NEGATIVE_ZERO,): MINUS_INF, (0,): INF, (INF,): 0},
    ),
    "sqrt": Approximation(
        math.sqrt, single(0.3, 0.7, 1.1, 3.9999998, 1e30, 1e-30), error=relative(-23),
        exact={(MINUS_INF,): -1, (MINUS_ONE,): -1, (NEGATIVE_ZERO,): NEGATIVE_ZERO, (0,): 0, (INF,): INF},
    ),
    "sin": Approximation(
        math.sin, ANGLES, error=of_angles(-20.5),
        exact={(MINUS_INF,): -1, (NEGATIVE_ZERO,): NEGATIVE_ZERO, (0,): 0, (INF,): -1},
    ),
    "cos": Approximation(
        math.cos, ANGLES, error=of_angles(-20.4), exact={(MINUS_INF,): -1, (NEGATIVE_ZERO,): ONE, (0,): ONE, (INF,): -1}
    ),
    "tanh": Approximation(
        math.tanh, single(0.3, -0.7, 1e-3, -2.9, 9.5), error=relative(-11),
        exact={
            (MINUS_INF,): MINUS_ONE, (NEGATIVE_ZERO,): NEGATIVE_ZERO, (0,): 0, (INF,): ONE, (0x807FFFFF,): 0x807FFFFF,
        },
    ),
    "div.approx": Approximation(lambda x, y: x / y, QUOTIENTS, OF_ZERO | WITHOUT_RECIPROCAL, ulps=2),
    "div.full": Approximation(lambda x, y: x / y, (*QUOTIENTS, (3.0, 2.0**127), (1e30, 2.0**126.5)), OF_ZERO, ulps=2),
}  # fmt: skip


def opcode(name: str, ftz: str) -> str:
    return f"{name}{'' if name.startswith('div') else '.approx'}{ftz}.f32"


SNIPPETS = {
    f"{name.replace('.', '_')}{ftz.replace('.', '_')}": Snippet(
        f"{opcode(name, ftz)} %f20, %f10{', %f11' if name.startswith('div') else ''};", "f"
    )
    for name in APPROXIMATIONS
    for ftz in ("", ".ftz")
    if name != "tanh" or not ftz
}


@pytest.fixture(scope="module")
def snippets(tmp_path_factory: pytest.TempPathFactory) -> Snippets:
    return Snippets(SNIPPETS, tmp_path_factory.mktemp("snippets"))


def ordinal(bits: int) -> int:
    """Floats in their order, counted."""
    return -(bits & 0x7FFFFFFF) if bits & NEGATIVE_ZERO else bits


def neighbour(bits: int, end: int) -> float:
    place = ordinal(bits) + end
    return real(-place | NEGATIVE_ZERO if place < 0 else place)


@pytest.mark.parametrize("name", SNIPPETS)
def test_an_approximation_comes_out_at_each_end_of_its_documented_error(snippets: Snippets, name: str) -> None:
    of = APPROXIMATIONS[name.replace("_ftz", "").replace("_", ".")]
    inputs = [tuple(map(bits_of, values)) for values in of.inputs]
    for end in (-1, 0, 1):
        for words, got in zip(inputs, snippets.run(name, inputs, approximation=end).out, strict=True):
            arguments = [real(word) for word in words]
            true = of.model(*arguments)
            nearest = bits_of(true)
            if end == 0 or of.ulps:
                assert ordinal(got) - ordinal(nearest) == end * of.ulps, (arguments, hex(got))
            else:
                most = of.error(arguments[0], true)
                assert abs(real(got) - true) <= most, (arguments, hex(got))
                assert abs(neighbour(got, end) - true) > most, (arguments, hex(got))


@pytest.mark.parametrize("name", SNIPPETS)
def test_what_the_manual_calls_exact_is_so_at_both_ends(snippets: Snippets, name: str) -> None:
    of = APPROXIMATIONS[name.replace("_ftz", "").replace("_", ".")]
    not_numbers = {(0x7FC00000,) * len(next(iter(of.exact))): -1}
    for end in (-1, 0, 1):
        rows = of.exact | not_numbers
        results = snippets.run(name, list(rows), approximation=end).out
        for (words, expected), got in zip(rows.items(), results, strict=True):
            assert is_nan(got) if expected == -1 else got == expected, (list(map(hex, words)), hex(got))


def test_subnormal_numbers_count_unless_they_are_flushed(snippets: Snippets) -> None:
    assert snippets.run("sqrt", [(TINY,)]).out == [bits_of(math.sqrt(real(TINY)))]
    assert snippets.run("sqrt_ftz", [(TINY,), (TINY | NEGATIVE_ZERO,)]).out == [0, NEGATIVE_ZERO]
    assert snippets.run("ex2", [(bits_of(-130.0),)]).out == [0x00080000]
    assert snippets.run("ex2_ftz", [(bits_of(-130.0),)]).out == [0]
    assert snippets.run("div_full_ftz", [(ONE, TINY)]).out == [INF]


def test_beyond_100_pi_no_error_is_given_for_sines(snippets: Snippets) -> None:
    far = [(bits_of(314.2),), (bits_of(-1e30),)]
    for name in ("sin", "cos"):
        assert snippets.run(name, far, approximation=-1).out == [MINUS_ONE] * 2
        assert snippets.run(name, far, approximation=1).out == [ONE] * 2


def test_of_a_subnormal_divisor_a_quotient_is_taken_for_as_good_as_of_any_other(snippets: Snippets) -> None:
    words = [(SMALLEST, 0x00400000)]
    assert [snippets.run("div_approx", words, approximation=end).out for end in (-1, 1)] == [[0x3FFFFFFE], [0x40000002]]
