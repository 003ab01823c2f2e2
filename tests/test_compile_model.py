"""What compiling is predicted to cost: never far from the operators' estimates, and soon what compiles really took."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from codegen.compile_model import (
    BYTES_PER_SECOND,
    FIXED_BYTES,
    FIXED_SECONDS,
    LARGEST_FACTOR,
    PRIOR,
    SMALLEST_FACTOR,
    CompiledFile,
    CompileModel,
    Record,
    estimate,
    family,
    fit,
)
from storage.compile_models import learn, load_model
from storage.database import Database
from tests.fixtures_codegen import kernels
from tests.fixtures_compile import matmul_candidates, probe
from tests.fixtures_storage import *  # noqa: F403 - fixtures

ANY = st.floats(allow_nan=True, allow_infinity=True)


def file_of(factors: dict[str, float], **estimates: float) -> CompiledFile:
    """A file whose kernels take `factors` times as long, and as much memory, as they were estimated at."""
    variable = sum(factors[name] * spent for name, spent in estimates.items())
    return CompiledFile(estimates, FIXED_SECONDS + variable, int(FIXED_BYTES + BYTES_PER_SECOND * variable))


def learnt(files: list[CompiledFile]) -> CompileModel:
    """As the database does it, file by file."""
    records: dict[str, list[Record]] = {}
    model = PRIOR
    for file in files:
        for name, record in model.records(file).items():
            records.setdefault(name, []).append(record)
        model = CompileModel({name: fit(found) for name, found in records.items()})
    return model


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e6), ANY, ANY), max_size=80))
def test_whatever_was_recorded_a_prediction_stays_near_the_estimate(found: list[tuple[float, float, float]]) -> None:
    factors = fit([Record(*one) for one in found])
    for factor in (factors.seconds, factors.memory):
        assert SMALLEST_FACTOR <= factor <= LARGEST_FACTOR


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.dictionaries(st.sampled_from("abc"), st.floats(0, 1e6), max_size=3), ANY, st.integers(0, 2**50)),
        max_size=20,
    )
)
@example([({"a": 1.0}, 0.0, 0), ({"a": 1.0}, 0.0, 0), ({"a": 5e-324}, 0.0, 0)])  # a quarter of it is 0
def test_whatever_files_took_the_model_stays_within_its_bounds(
    found: list[tuple[dict[str, float], float, int]],
) -> None:
    model = learnt([CompiledFile(estimates, seconds, peak) for estimates, seconds, peak in found])
    for factors in model.factors.values():
        assert SMALLEST_FACTOR <= factors.seconds <= LARGEST_FACTOR
        assert SMALLEST_FACTOR <= factors.memory <= LARGEST_FACTOR


@pytest.mark.parametrize("factor", [0.3, 0.8, 1.0, 1.7, 3.9])
def test_records_of_a_true_factor_converge_to_it(factor: float) -> None:
    rng = random.Random(7)
    files = [file_of({"a": factor * rng.uniform(0.9, 1.1)}, a=rng.uniform(0.5, 10)) for _ in range(40)]
    off = [abs(learnt(files[:count]).factors["a"].seconds / factor - 1) for count in (1, 10, 40)]
    assert off[2] < 0.05
    assert off[2] <= off[1] + 0.05 <= off[0] + 0.1
    assert learnt(files).factors["a"].memory == pytest.approx(factor, rel=0.1)


def test_families_that_share_files_are_told_apart_and_the_files_are_predicted() -> None:
    true, rng = {"a": 2.0, "b": 0.5}, random.Random(3)
    files = []
    for _ in range(40):
        much, little = rng.sample("ab", 2)
        files.append(file_of(true, **{much: rng.uniform(2, 8), little: rng.uniform(0, 1)}))
    model = learnt(files)
    assert model.factors["a"].seconds == pytest.approx(2.0, rel=0.15)
    assert model.factors["b"].seconds == pytest.approx(0.5, rel=0.25)
    for file in files:
        predicted = sum(model.factors[name].seconds * spent for name, spent in file.estimates.items())
        assert FIXED_SECONDS + predicted == pytest.approx(file.cpu_seconds, rel=0.25)


@pytest.mark.parametrize("before", [0, 5, 30])
@pytest.mark.parametrize("absurd", [1e-9, 1e9])
def test_one_absurd_record_changes_little(before: int, absurd: float) -> None:
    rng = random.Random(1)
    files = [file_of({"a": 1.5 * rng.uniform(0.95, 1.05)}, a=5.0) for _ in range(before)]
    usual = learnt(files).factors["a"].seconds if files else 1.0
    assert learnt([*files, file_of({"a": absurd}, a=1e6)]).factors["a"].seconds == pytest.approx(usual, rel=0.05)


def test_before_the_first_record_the_operators_estimate_stands() -> None:
    kernel = kernels(1)[0]
    assert PRIOR.kernel_seconds(kernel) == estimate(kernel)
    assert PRIOR.seconds([]) == FIXED_SECONDS
    assert PRIOR.bytes([kernel]) == FIXED_BYTES + BYTES_PER_SECOND * estimate(kernel)


def test_families_follow_what_the_estimates_distinguish() -> None:
    (half,) = (one.kernel for one in matmul_candidates(1, dtype="float16"))
    plain, light, activation = (kernels(1, epilogue=nodes)[0] for nodes in ([], [{"op": "relu"}], [{"op": "gelu"}]))
    assert family(plain) == family(light) == "matmul/simt/float32"
    assert family(activation) == "matmul/simt/float32/activation"
    assert family(half) == "matmul/tensor/float16"
    assert family(probe()) == "probe"


def test_what_one_toolchain_took_says_nothing_about_another(database: Database) -> None:
    files = [file_of({"a": 2.0, "b": 1.0}, a=4.0), file_of({"a": 2.0, "b": 3.0}, b=4.0)]
    for _ in range(5):
        with database.write() as session:
            learn(session, "t" * 64, files)
    with database.read() as session:
        model, other = load_model(session, "t" * 64), load_model(session, "u" * 64)
    assert model.factors["a"].seconds == pytest.approx(2.0)
    assert model.factors["b"].seconds == pytest.approx(3.0)
    assert other == PRIOR


def test_only_the_latest_records_are_kept_and_count(database: Database) -> None:
    for factor, times in ((3.0, 70), (0.5, 70)):
        with database.write() as session:
            learn(session, "t" * 64, [file_of({"a": factor}, a=4.0)] * times)
    with database.read() as session:
        assert load_model(session, "t" * 64).factors["a"].seconds == pytest.approx(0.5)
