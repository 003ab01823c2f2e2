"""The rows of a profile: what is measured, what is predicted, what adds up."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.counts import LaunchCounts, Openings, RingForm, added, load, merged, store
from codegen.kernel import Candidate
from codegen.lower import lower
from codegen.operators import operator
from codegen.predict.predict_uncompiled import estimate, predict_uncompiled
from codegen.search.search import Search
from codegen.targets import target
from cukiln.types import ProfileOperator
from storage.reports.profile import profile_row
from tests.support.fixtures.codegen import default_candidate, matmul
from tests.support.fixtures.compile import PROBE, probe_candidate

SM_80 = target("sm_80")


def of(candidate: Candidate, measured_us: float | None = None) -> ProfileOperator:
    return profile_row("p", "predicted:sm_80", candidate, SM_80, estimate(candidate, SM_80), Openings(), measured_us)


@pytest.fixture
def split() -> Candidate:
    """In two launches, by way of a workspace."""
    problem = matmul(m=64, n=64, k=4096, dtype="float16")
    made = lower(problem, SM_80, Search(level=2, limit=2000)).candidates
    return next(each for each in made if each.schedule.get("split") == "workspace")


def test_a_measurement_is_of_the_run_and_its_kernels_stay_predicted(split: Candidate) -> None:
    row = of(split, measured_us=12.5)
    assert (row.counts.seconds, row.counts.seconds_from) == (pytest.approx(12.5e-6), "measured")
    assert [kernel.counts.seconds_from for kernel in row.kernels] == ["predicted", "predicted"]
    predicted = sum(kernel.counts.seconds or 0.0 for kernel in row.kernels)
    assert predicted == pytest.approx(predict_uncompiled(split, SM_80).us * 1e-6)


def test_a_row_is_the_sum_of_its_parts(split: Candidate) -> None:
    row = of(split)
    for name in ("multiplications", "executed", "bytes_read", "bytes_written", "launches"):
        assert getattr(row.counts, name) == sum(getattr(kernel.counts, name) for kernel in row.kernels)
    for kernel in row.kernels:
        for name in ("executed", "limb_products", "truncations", "bytes_read", "bytes_written"):
            assert getattr(kernel.counts, name) == sum(getattr(part, name) for part in kernel.primitives)
    assert row.counts.workspace_bytes == operator("matmul").cost(split.problem, split.schedule).workspace_bytes > 0


def test_products_take_the_roof_of_their_cores(split: Candidate) -> None:
    roofs = predict_uncompiled(split, SM_80).roofs_us
    (products,) = (part for part in of(split).kernels[0].primitives if part.executed)
    assert products.name == "mma_m16n8k16_f16" and products.seconds == pytest.approx(roofs["mma"] * 1e-6)
    (on_cuda_cores,) = (
        part for part in of(default_candidate(matmul(), "sm_80")).kernels[0].primitives if part.executed
    )
    assert on_cuda_cores.name == "fma" and on_cuda_cores.executed == on_cuda_cores.times


def test_an_operator_that_counts_nothing_of_its_own_has_what_its_problem_costs() -> None:
    candidate = probe_candidate()
    row, cost = of(candidate), PROBE.cost(candidate.problem, candidate.schedule)
    counts = row.counts
    assert (counts.bytes_read, counts.bytes_written, counts.launches) == (
        cost.bytes_read, cost.bytes_written, cost.launches,
    )  # fmt: skip
    assert counts.ring_bytes is None and row.ring_forms == []
    assert counts.executed == counts.multiplications == 0


def test_launches_of_several_kinds_are_added_by_how_many_there_are() -> None:
    few = LaunchCounts("run", merged([load(64, 16), store(32, 16)]), 10)
    many = LaunchCounts("run", merged([load(16, 16), load(16, 8, "cp_async")]), 1)
    (whole,) = added([(2, [few]), (3, [many])])
    total = whole.total
    assert (total.bytes_read, total.bytes_written, whole.multiplications) == (2 * 64 + 3 * 32, 64, 23)
    assert {part.name: part.times for part in whole.primitives} == {"load_global": 11, "store_global": 4, "cp_async": 6}


SQUARED = [{"op": "masked_activation", "where_set": {"op": "square"}}]
LAYER: dict[str, Any] = {
    "operator": "conv2d", "n": 1, "h": 32, "w": 32, "c": 3, "k": 64, "r": 3, "s": 3, "padding": 1, "dtype": "int64",
    "fraction_bits": 18,
}  # fmt: skip
EARLY: dict[str, Any] = {"truncation": {"policy": "tolerance", "ulp": 100}}
SECRET = Openings()


@pytest.mark.parametrize(
    ("changes", "tunables", "openings", "form"),
    [
        ({}, {"algorithm": ["limbs"]}, SECRET, "product"),
        ({"fraction_bits": 0}, {"algorithm": ["limbs"]}, SECRET, "product"),
        ({"epilogue": SQUARED}, {"algorithm": ["imad"]}, SECRET, "product"),
        (EARLY, {"algorithm": ["imad"], "truncate": ["tile"]}, SECRET, "product, each tile truncated"),
        (EARLY, {"algorithm": ["imad"], "truncate": ["product"]}, SECRET, "product, each product truncated"),
        ({}, {"algorithm": ["limbs"]}, Openings("public"), "product"),
        ({}, {"algorithm": ["limbs"]}, Openings("secret", "inputs"), "product"),
        ({}, {"algorithm": ["winograd_limbs"], "output_tile": [2]}, SECRET, "winograd, truncated once"),
        ({}, {"algorithm": ["winograd_limbs"], "output_tile": [4]}, SECRET, "winograd F(4), truncated once"),
        ({"operator": "conv2d_dgrad"}, {"algorithm": ["limbs"]}, SECRET, "product"),
        (
            {"operator": "conv2d_dgrad"}, {"algorithm": ["winograd_fused"], "output_tile": [4]}, SECRET,
            "winograd F(4), truncated once",
        ),
        ({"operator": "conv2d_dgrad", "stride": 2}, {"algorithm": ["imad"]}, SECRET, "product"),
        ({"stride": 2}, {"algorithm": ["imad"]}, Openings("public"), "product"),
    ],
)  # fmt: skip
def test_of_forms_the_schedules_own_one_is_what_its_row_says(
    changes: dict[str, Any], tunables: dict[str, list[Any]], openings: Openings, form: str
) -> None:
    fields = {**LAYER, **changes}
    op = operator(fields["operator"])
    candidates = lower(op.parse(fields), SM_80, Search(tunables=tunables)).candidates
    one = next(c for c in candidates if all(c.schedule.get(name) == value for name, (value,) in tunables.items()))
    row = profile_row("p", "predicted:sm_80", one, SM_80, estimate(one, SM_80), openings)
    (own,) = (each for each in row.ring_forms if each.name == form)
    assert own.ours and own.filters == openings.filters
    assert (own.ring_bytes, own.truncations) == (row.counts.ring_bytes, row.counts.truncations)
    assert own.multiplications == sum(kernel.counts.multiplications for kernel in row.kernels)


@pytest.mark.parametrize("algorithm", ["imad", "limbs", "winograd_limbs", "winograd_fused"])
def test_products_of_an_epilogue_are_the_problems_and_take_their_own_instructions(algorithm: str) -> None:
    op = operator("conv2d")
    plain, squared = (op.parse({**LAYER, "epilogue": epilogue}) for epilogue in ([], SQUARED))
    candidates = lower(squared, SM_80, Search(tunables={"algorithm": [algorithm]})).candidates
    one = next(c for c in candidates if c.schedule.get("algorithm") == algorithm)
    row, outputs = of(one), 65_536
    assert row.counts.multiplications == op.multiplications(plain) + outputs
    for kernel in row.kernels:
        assert kernel.counts.multiplications == sum(part.multiplications for part in kernel.primitives)
        for part in kernel.primitives:
            assert part.executed >= part.multiplications
    alone = [part for kernel in row.kernels for part in kernel.primitives if part.executed == outputs]
    assert len(alone) == (algorithm in ("limbs", "winograd_limbs"))
    for part in alone:  # 4 instructions for a product of Z/2^64, 64 a clock on each of 108 multiprocessors
        assert part.multiplications == outputs
        assert part.seconds == pytest.approx(outputs * 4 / (64 * 108 * SM_80.clock_mhz) * 1e-6)


def test_squares_of_floats_beside_tensor_cores_take_their_own_instructions() -> None:
    op, fields = operator("matmul"), {"operator": "matmul", "m": 256, "n": 128, "k": 64, "dtype": "float16"}
    plain, squared = (op.parse({**fields, "epilogue": epilogue}) for epilogue in ([], SQUARED))
    (candidate,) = lower(squared, SM_80, Search(level=0)).candidates
    row, outputs = of(candidate), 256 * 128
    assert row.counts.multiplications == op.multiplications(plain) + outputs
    (squares,) = (part for kernel in row.kernels for part in kernel.primitives if part.name == "fma")
    assert squares.executed == squares.multiplications == outputs
    assert squares.seconds == pytest.approx(outputs / (64 * 108 * SM_80.clock_mhz) * 1e-6)


def test_forms_of_other_systems_multiply_by_public_filters_and_have_the_layers_epilogue() -> None:
    def others(**changes: Any) -> list[RingForm]:
        op, fields = operator("conv2d"), {**LAYER, **changes}
        problem = op.parse(fields)
        (candidate,) = lower(problem, SM_80, Search(level=0)).candidates
        return [form for form in op.ring_forms(problem, candidate.schedule, SECRET) if not form.ours]

    plain, squared = others(), others(epilogue=SQUARED)
    assert {form.filters for form in plain} == {"public"} and len(plain) == 3
    for form, more in zip(plain, squared, strict=True):
        assert more.truncations == form.truncations + 65_536
        assert more.ring_bytes == form.ring_bytes + 2 * 8 * 65_536
    assert others(fraction_bits=0) == [] == others(stride=2)


def test_a_convolution_that_winograd_does_not_compute_has_one_form() -> None:
    op = operator("conv2d")
    fields = {"n": 1, "h": 8, "w": 8, "c": 4, "k": 6, "r": 1, "s": 1, "stride": 2, "dtype": "int64", "fraction_bits": 9}
    (candidate,) = lower(op.parse({"operator": "conv2d", **fields}), SM_80, Search(level=0)).candidates
    (form,) = op.ring_forms(candidate.problem, candidate.schedule, SECRET)
    assert form.ring_bytes == 8 * (16 * 4 + 4 * 6 + 16 * 6) and form.ours
