"""What a CPU proof is called, and what a recorded search depends on."""

from __future__ import annotations

import pytest

from codegen import generator as generators
from codegen import verified
from codegen.generator import generator
from codegen.operators import operator
from codegen.verified import primitives_of, verified_label
from tests.fixtures_codegen import default_candidate, matmul


def test_a_proof_on_unconfirmed_primitives_says_so() -> None:
    assert verified_label(default_candidate(matmul()).kernel) == "cpu-unconfirmed"


def test_a_proof_counts_as_cpu_once_every_primitive_is_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = primitives_of("matmul")
    monkeypatch.setattr(verified, "confirmed_primitives", lambda: needed)
    assert verified_label(default_candidate(matmul()).kernel) == "cpu"


@pytest.mark.parametrize("missing", sorted(primitives_of("matmul")))
def test_one_missing_primitive_is_enough_to_doubt_it(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "confirmed_primitives", lambda: primitives_of("matmul") - {missing})
    assert verified_label(default_candidate(matmul()).kernel) == "cpu-unconfirmed"


def test_the_primitives_are_those_that_the_kernels_call() -> None:
    assert {
        "load_global",
        "store_global",
        "load_shared",
        "store_shared",
        "fma",
        "erf",
        "__syncthreads",
    } <= primitives_of("matmul")


@pytest.fixture
def fresh_generator() -> None:
    generator.cache_clear()


@pytest.mark.usefixtures("fresh_generator")
def test_generator_differs_on_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = generator("matmul")
    generator.cache_clear()
    monkeypatch.setattr(generators, "GENERATOR_VERSION", generators.GENERATOR_VERSION + 1)
    assert generator("matmul") != before
    generator.cache_clear()


@pytest.mark.usefixtures("fresh_generator")
def test_generator_differs_on_the_kernels_text(monkeypatch: pytest.MonkeyPatch) -> None:
    before = generator("matmul")
    generator.cache_clear()
    monkeypatch.setattr(generators, "headers_digest", lambda name: "other")
    assert generator("matmul") != before
    generator.cache_clear()


@pytest.mark.usefixtures("fresh_generator")
def test_generator_differs_on_the_tunables(monkeypatch: pytest.MonkeyPatch) -> None:
    before = generator("matmul")
    generator.cache_clear()
    own = operator("matmul")
    monkeypatch.setattr(type(own), "tunables", own.tunables[1:])
    assert generator("matmul") != before
    generator.cache_clear()
