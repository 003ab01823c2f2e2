"""The rows of a profile: what is measured, what is predicted, what adds up."""

from __future__ import annotations

import pytest

from codegen.counts import LaunchCounts, Openings, added, load, merged, store
from codegen.kernel import Candidate
from codegen.lower import lower
from codegen.operators import operator
from codegen.operators.conv2d.problem import Conv2dProblem
from codegen.operators.convolution.ring_forms import ring_forms
from codegen.predict.predict_uncompiled import estimate, predict_before
from codegen.search.search import Search
from codegen.targets import target
from cukiln.types import ProfileOperator
from storage.reports.profile import profile_row
from tests.support.fixtures.codegen import default_candidate, matmul

SM_80 = target("sm_80")


def of(candidate: Candidate, measured_us: float | None = None) -> ProfileOperator:
    return profile_row("p", "predicted:sm_80", candidate, SM_80, estimate(candidate, SM_80), Openings(), measured_us)


@pytest.fixture
def split() -> Candidate:
    """In two launches, by way of a workspace."""
    problem = matmul(m=64, n=64, k=4096, dtype="float16")
    made = lower(problem, SM_80, Search(level=2, limit=2000)).candidates
    return next(one for one in made if one.schedule.get("split") == "workspace")


def test_a_measurement_is_of_the_run_and_its_kernels_stay_predicted(split: Candidate) -> None:
    row = of(split, measured_us=12.5)
    assert (row.counts.seconds, row.counts.seconds_from) == (pytest.approx(12.5e-6), "measured")
    assert [kernel.counts.seconds_from for kernel in row.kernels] == ["predicted", "predicted"]
    predicted = sum(kernel.counts.seconds or 0.0 for kernel in row.kernels)
    assert predicted == pytest.approx(predict_before(split, SM_80).us * 1e-6)


def test_a_row_is_the_sum_of_its_parts(split: Candidate) -> None:
    row = of(split)
    for name in ("multiplications", "executed", "bytes_read", "bytes_written", "launches"):
        assert getattr(row.counts, name) == sum(getattr(kernel.counts, name) for kernel in row.kernels)
    for kernel in row.kernels:
        for name in ("executed", "limb_products", "truncations", "bytes_read", "bytes_written"):
            assert getattr(kernel.counts, name) == sum(getattr(part, name) for part in kernel.primitives)
    assert row.counts.workspace_bytes == operator("matmul").cost(split.problem, split.schedule).workspace_bytes > 0


def test_products_take_the_roof_of_their_cores(split: Candidate) -> None:
    roofs = predict_before(split, SM_80).roofs_us
    (products,) = (part for part in of(split).kernels[0].primitives if part.executed)
    assert products.name == "mma_m16n8k16_f16" and products.seconds == pytest.approx(roofs["mma"] * 1e-6)
    (on_cuda_cores,) = (
        part for part in of(default_candidate(matmul(), "sm_80")).kernels[0].primitives if part.executed
    )
    assert on_cuda_cores.name == "fma" and on_cuda_cores.executed == on_cuda_cores.times


@pytest.mark.parametrize(
    "fields",
    [
        {"operator": "reduce", "shape": [64, 128], "axes": [1]},
        {"operator": "softmax", "shape": [64, 128]},
        {"operator": "layer_norm", "shape": [64, 128]},
        {"operator": "conv2d", "n": 2, "h": 9, "w": 9, "c": 8, "k": 8, "r": 3, "s": 3, "groups": 8},
    ],
)
def test_an_operator_that_counts_nothing_of_its_own_has_what_its_problem_costs(fields: dict[str, object]) -> None:
    op = operator(str(fields["operator"]))
    problem = op.parse(fields)
    candidate = op.candidate(problem, lower(problem, SM_80, Search(level=0)).candidates[0].schedule)
    row, cost = of(candidate), op.cost(problem, candidate.schedule)
    counts = row.counts
    assert (counts.bytes_read, counts.bytes_written, counts.launches) == (
        cost.bytes_read, cost.bytes_written, cost.launches,
    )  # fmt: skip
    assert counts.ring_bytes is None and row.ring_forms == []
    assert (counts.executed > 0) == (fields["operator"] == "conv2d")


def test_launches_of_several_kinds_are_added_by_how_many_there_are() -> None:
    few = LaunchCounts("run", merged([load(64, 16), store(32, 16)]), 10)
    many = LaunchCounts("run", merged([load(16, 16), load(16, 8, "cp_async")]), 1)
    (whole,) = added([(2, [few]), (3, [many])])
    total = whole.total
    assert (total.bytes_read, total.bytes_written, whole.multiplications) == (2 * 64 + 3 * 32, 64, 23)
    assert {part.name: part.times for part in whole.primitives} == {"load_global": 11, "store_global": 4, "cp_async": 6}


def test_a_convolution_that_winograd_does_not_compute_has_one_form() -> None:
    problem = operator("conv2d").parse(
        {"operator": "conv2d", "n": 1, "h": 8, "w": 8, "c": 4, "k": 6, "r": 1, "s": 1, "stride": 2}
    )
    assert isinstance(problem, Conv2dProblem)
    (form,) = ring_forms(problem, 8)
    assert form.ring_bytes == 8 * (16 * 4 + 4 * 6 + 16 * 6) and form.ours
