"""PTX instructions on the CPU give what the PTX ISA says, at the edges of what they take."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.support.kernels.ptx_float_cases import FLOAT_CASES
from tests.support.kernels.ptx_integer_cases import INTEGER_CASES
from tests.support.kernels.ptx_models import ANY_NAN, CANONICAL_NAN, Case, is_nan
from tests.support.kernels.ptx_snippets import THREADS, Snippet, Snippets

CASES: dict[str, Case] = {**INTEGER_CASES, **FLOAT_CASES}
TOGETHER = 32  # bodies in one entry, which all take the same inputs
BITS = {"rd": 64, "rs": 16, "p": 1}
PRODUCTS = {
    "fused": Snippet("mul.f32 %f14, %f10, %f11; add.f32 %f20, %f14, %f12;", "f"),
    "fused_difference": Snippet("mul.f32 %f14, %f10, %f11; sub.f32 %f20, %f12, %f14;", "f"),
    "saturated": Snippet("mul.f32 %f14, %f10, %f11; add.sat.f32 %f20, %f14, %f12;", "f"),
    "saturated_difference": Snippet("mul.f32 %f14, %f10, %f11; sub.sat.f32 %f20, %f14, %f12;", "f"),
    "of_saturated": Snippet("mul.sat.f32 %f14, %f10, %f11; add.f32 %f20, %f14, %f12;", "f"),
    "named": Snippet("mul.rn.f32 %f14, %f10, %f11; add.f32 %f20, %f14, %f12;", "f"),
}
# What lies between a product and its sum, which ptxas 13 makes an FFMA of all the same (read from SASS of sm_80).
BETWEEN = {
    "a move": "mul.f32 %f14, %f10, %f11; mov.f32 %f15, %f14; add.f32 %f20, %f15, %f12;",
    "a move to an integer and back": (
        "mul.f32 %f14, %f10, %f11; mov.b32 %r14, %f14; mov.b32 %f15, %r14; add.f32 %f20, %f15, %f12;"
    ),
    "two changes of sign": (
        "mul.f32 %f14, %f10, %f11; neg.f32 %f15, %f14; neg.f32 %f16, %f15; add.f32 %f20, %f16, %f12;"
    ),
    "a change of sign": "mul.f32 %f14, %f10, %f11; neg.f32 %f15, %f14; sub.f32 %f20, %f12, %f15;",
    "a factor that is written to": "mul.f32 %f14, %f10, %f11; mov.f32 %f10, %f12; add.f32 %f20, %f14, %f12;",
    "a factor that is the product": "mul.f32 %f10, %f10, %f11; add.f32 %f20, %f10, %f12;",
    "a factor that is written to twice": (
        "mul.f32 %f14, %f10, %f10; mov.f32 %f10, %f12; mov.f32 %f10, %f14; add.f32 %f20, %f14, %f12;"
    ),
    "a sum that writes to a factor": (
        "mul.f32 %f14, %f10, %f11; add.f32 %f10, %f14, %f12; add.f32 %f15, %f14, %f12; mov.f32 %f20, %f15;"
    ),
}
PRODUCTS |= {f"between_{number}": Snippet(text, "f") for number, text in enumerate(BETWEEN.values())}


@cache
def entries() -> dict[str, tuple[Case, ...]]:
    """The cases of each entry."""
    by_inputs: dict[tuple[tuple[int, ...], ...], list[Case]] = {}
    for case in CASES.values():
        by_inputs.setdefault(case.inputs, []).append(case)
    return {
        f"cases_{number}_{first}": tuple(cases[first : first + TOGETHER])
        for number, cases in enumerate(by_inputs.values())
        for first in range(0, len(cases), TOGETHER)
    }


def snippet_of(cases: tuple[Case, ...]) -> Snippet:
    first, *others = cases
    return Snippet(first.body, first.result, tuple((case.body, case.result) for case in others))


@pytest.fixture(scope="module")
def snippets(tmp_path_factory: pytest.TempPathFactory) -> Snippets:
    bodies = {name: snippet_of(cases) for name, cases in entries().items()}
    return Snippets(bodies | PRODUCTS, tmp_path_factory.mktemp("snippets"))


@pytest.fixture(scope="module")
def results(snippets: Snippets) -> dict[str, list[int]]:
    """What each case gave for its inputs."""
    got: dict[str, list[int]] = {case.body: [] for case in CASES.values()}
    for name, cases in entries().items():
        inputs = cases[0].inputs
        for first in range(0, len(inputs), THREADS):
            ran = snippets.run(name, inputs[first : first + THREADS])
            assert ran.outcome.status == "ok", ran.message
            for case, row in zip(cases, ran.rows, strict=False):
                got[case.body] += row
    return got


@pytest.mark.parametrize("body", CASES)
def test_an_instruction_gives_what_the_manual_says(results: dict[str, list[int]], body: str) -> None:
    case, wrong = CASES[body], []
    for values, got in zip(case.inputs, results[body], strict=True):
        expected = case.model(*values)
        right = (
            is_nan(got)
            if expected == ANY_NAN and case.result == "f"
            else got == expected % 2 ** BITS.get(case.result, 32)
        )
        if not right:
            wrong.append(f"{[hex(value) for value in values]}: {got:#x}, not {expected:#x}")
    assert not wrong, wrong[:5]


# A kernel that rounds by integer arithmetic makes a zero of such a NaN where it does not look for one.
def test_a_nan_that_exact_arithmetic_gives_has_all_bits(results: dict[str, list[int]]) -> None:
    exact = re.compile(r"(add|sub|mul|fma|div\.rn|rcp\.rn|sqrt\.rn)[a-z.]*\.f32 ")
    nans = [
        got
        for body, case in CASES.items()
        if exact.match(body)
        for values, got in zip(case.inputs, results[body], strict=True)
        if case.model(*values) == ANY_NAN
    ]
    assert len(nans) > 100
    assert set(nans) == {CANONICAL_NAN}


def test_a_product_and_a_sum_that_ptxas_may_fuse_are_fused_in_the_runs_that_ask_for_it(snippets: Snippets) -> None:
    a, b, c = 0x3F800001, 0x3F800001, 0xBF800002  # (1 + u)² - (1 + 2u) is u² fused, 0 unfused
    unfused, square = 0, 0x28800000  # 2^-46
    for name in ("fused", "fused_difference"):
        sign = 0x80000000 if name == "fused_difference" else 0
        last = c if name == "fused" else c ^ 0x80000000
        assert snippets.run(name, [(a, b, last)]).out == [unfused]
        assert snippets.run(name, [(a, b, last)], fuse=True).out == [square ^ sign]


@pytest.mark.parametrize(("name", "sign"), [("saturated", 0), ("saturated_difference", 0x80000000)])
def test_a_sum_that_saturates_may_be_fused_and_saturates_afterwards(snippets: Snippets, name: str, sign: int) -> None:
    """ptxas makes FFMA.SAT of both."""
    a, c = 0x3F800001, 0xBF800002 ^ sign
    assert snippets.run(name, [(a, a, c)]).out == [0]
    assert snippets.run(name, [(a, a, c)], fuse=True).out == [0x28800000]
    one, two = 0x3F800000, 0x40000000
    for fuse in (False, True):
        assert snippets.run(name, [(two, two, 0)], fuse=fuse).out == [one]
        assert snippets.run(name, [(two ^ 0x80000000, two, 0)], fuse=fuse).out == [0]


def test_a_product_that_saturates_is_never_fused(snippets: Snippets) -> None:
    two, less = 0x40000000, 0xBF800000
    assert snippets.run("of_saturated", [(two, two, less)], fuse=True).out == [0]


@pytest.mark.parametrize("between", BETWEEN)
def test_a_product_is_fused_whatever_lies_between_it_and_its_sum(snippets: Snippets, between: str) -> None:
    inputs = [(0x3F800001, 0x3F800001, 0xBF800002)]
    name = f"between_{list(BETWEEN).index(between)}"
    assert snippets.run(name, inputs).out == [0]
    assert snippets.run(name, inputs, fuse=True).out == [0x28800000]


def test_a_product_with_a_rounding_in_its_name_is_never_fused(snippets: Snippets) -> None:
    assert snippets.run("named", [(0x3F800001, 0x3F800001, 0xBF800002)], fuse=True).out == [0]
