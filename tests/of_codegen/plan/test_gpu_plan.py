"""What is asked of a GPU: the CPU's cases without its orders, the candidate's own problem, and inputs never seen."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.plan.gpu_verification_plan import GpuCase, fresh_case, full_cases, reduced_cases
from codegen.plan.verification_plan import FarCase, check_output, plan_cases
from codegen.run_once import of_purpose
from tests.support.fixtures.codegen import default_candidate, matmul
from tests.support.kernels.kernel_in_numpy import computed

OP = operator("matmul")
GELU = [{"op": "bias", "axis": "n"}, {"op": "gelu"}]
HALF = {"dtype": "float16", "out_dtype": "float16"}


def half(**fields: Any) -> Candidate:
    return default_candidate(matmul(**{"m": 512, "n": 512, "k": 512, **HALF, **fields}))


def reduced(candidate: Candidate, seed: int = 7) -> list[GpuCase]:
    return list(reduced_cases(OP, candidate.kernel, seed))


def full(candidate: Candidate, seed: int = 7) -> list[GpuCase]:
    return list(full_cases(OP, candidate, seed))


def splitting(split: str) -> Candidate:
    """A candidate that divides k in that way."""
    slices: dict[str, Any] = {"stream_blocks": 100} if split == "stream" else {"split_k": 2}
    return default_candidate(matmul(m=512, n=512, k=4096, **HALF), split=split, **slices)


@pytest.mark.parametrize(
    "candidate",
    [half(), half(epilogue=GELU), splitting("workspace"), default_candidate(matmul())],
    ids=["plain", "gelu", "split", "cuda cores"],
)
def test_a_gpu_runs_the_problems_and_launches_of_the_cpu(candidate: Candidate) -> None:
    plan = plan_cases(OP, candidate.kernel, 7)
    on_cpu = [(case.problem, case.kind) for case in plan if not isinstance(case, FarCase)]
    cases = reduced(candidate)
    assert [(case.problem, case.kind) for case in cases] == on_cpu
    long = {once.problem: [once.launch] for once in of_purpose(OP.run_once(candidate.kernel), "long")}
    for case in cases:
        every = [tuple(values) for values in OP.test_launches(candidate.kernel, case.problem)]
        once = case.kind in ("positive", "special")
        assert list(case.launches) == (every[:1] if once else long.get(case.problem, every))


@pytest.mark.parametrize(("split", "repeatable"), [("workspace", True), ("stream", True), ("atomic", False)])
def test_every_launch_runs_twice_and_repeats_its_bits_where_it_must(split: str, repeatable: bool) -> None:
    candidate = splitting(split)
    long = {once.problem for once in of_purpose(OP.run_once(candidate.kernel), "long")}
    cases = [*reduced(candidate), full(candidate)[1]]
    once = [case for case in cases if case.problem in long or case.kind == "special"]
    assert {case.repeats for case in cases if case not in once} == {2}
    assert {case.repeats for case in once} == {1}
    assert {case.same_bits for case in cases} == {repeatable}


def test_equality_is_demanded_where_fp32_is_exact() -> None:
    for chain, exact in (([], True), ([{"op": "relu"}], True), (GELU, False)):
        cases = reduced(half(epilogue=chain))
        assert {case.exact for case in cases if case.kind == "integer"} == {exact}
        assert not any(case.exact for case in cases if case.kind == "normal")


def test_full_extents_are_the_candidates_own_problem_and_launch() -> None:
    candidate = half(m=640)
    schedule = candidate.schedule.as_dict()
    other = OP.candidate(candidate.problem, type(candidate.schedule).of({**schedule, "raster": 8}))
    for planned, raster in ((candidate, schedule["raster"]), (other, 8)):
        integer, normal = full(planned)
        assert (integer.kind, normal.kind) == ("integer", "normal")
        assert integer.problem == normal.problem == candidate.problem
        assert integer.launches == normal.launches == ((raster, 1, 0),)


def test_candidates_of_one_problem_share_their_inputs() -> None:
    fused, other = half(), OP.candidate(half().problem, splitting("none").schedule)
    assert [case.inputs for case in full(fused)] == [case.inputs for case in full(other)]
    assert fresh_case(OP, fused, 7).inputs == fresh_case(OP, other, 7).inputs
    assert len({case.inputs for case in full(fused)}) == 2


def test_the_fresh_case_has_inputs_of_its_own() -> None:
    candidate = half()
    fresh = fresh_case(OP, candidate, 7)
    assert (fresh.problem, fresh.kind, fresh.repeats) == (candidate.problem, "normal", 1)
    assert fresh.seed not in {case.seed for case in (*full(candidate), *reduced(candidate))}


def test_a_seed_decides_all_inputs() -> None:
    candidate = half()
    for cases in (reduced, full):
        assert cases(candidate, 7) == cases(candidate, 7)
        assert {case.seed for case in cases(candidate, 7)}.isdisjoint(case.seed for case in cases(candidate, 8))
    assert len({case.seed for case in reduced(candidate)}) == len(reduced(candidate))


def test_what_a_verdict_keeps_of_a_case_is_json_and_enough_to_run_it_again() -> None:
    case = reduced(splitting("workspace"))[0]
    described = json.loads(json.dumps(case.describe(OP.extents(case.problem))))
    assert described["extents"] == OP.extents(case.problem)
    assert [tuple(launch) for launch in described["launches"]] == list(case.launches)
    assert (described["kind"], described["exact"], described["seed"], described["repeats"]) == (
        "integer",
        True,
        case.seed,
        2,
    )


# The shipped kernel at its own extents, without the identity in the place of its activations.

LONG = {"m": 16, "n": 24, "k": 2000}
TYPES = [HALF, {"dtype": "bfloat16", "out_dtype": "bfloat16"}, {"dtype": "float32", "out_dtype": "float32"},
         {"dtype": "int8", "acc_dtype": "int32", "out_dtype": "float16"}]  # fmt: skip
# What requests have: scalars that fp32 must round.
OWN_SCALARS = [{"op": "scale", "value": 0.1}, {"op": "bias", "axis": "n"}, {"op": "leaky_relu", "slope": 0.01}]


def integer_case(types: dict[str, Any], chain: list[dict[str, Any]]) -> GpuCase:
    return full(default_candidate(matmul(**LONG, **types, epilogue=chain)))[0]


def answers(case: GpuCase, drop: int = 0) -> tuple[Any, Any, Any]:
    """What a kernel writes, the reference and its bound."""
    inputs = OP.make_inputs(case.problem, case.kind, np.random.default_rng(case.seed))
    return computed(case.problem, inputs, drop=drop), *OP.reference(case.problem, inputs, case.exact)  # type: ignore[arg-type]


@pytest.mark.parametrize("types", TYPES, ids=[type["dtype"] for type in TYPES])
@pytest.mark.parametrize("chain", [[], [{"op": "relu"}], GELU, OWN_SCALARS], ids=["none", "relu", "gelu", "scalars"])
def test_a_right_kernel_passes_the_integer_case_at_full_extents(
    types: dict[str, Any], chain: list[dict[str, Any]]
) -> None:
    case = integer_case(types, chain)
    assert check_output(*answers(case), exact=case.exact).ok


@pytest.mark.parametrize("types", TYPES, ids=[type["dtype"] for type in TYPES])
def test_sums_of_integers_must_be_equal_at_full_extents(types: dict[str, Any]) -> None:
    for chain in ([], [{"op": "bias", "axis": "n"}, {"op": "relu"}]):
        out, expected, bound = answers(integer_case(types, chain))
        assert np.max(bound) == 0.0
        assert np.array_equal(out.astype(np.float64), expected)


@pytest.mark.parametrize("chain", [[], GELU, OWN_SCALARS], ids=["none", "gelu", "scalars"])
def test_a_kernel_that_loses_a_product_fails_the_integer_case(chain: list[dict[str, Any]]) -> None:
    case = integer_case({"dtype": "float32", "out_dtype": "float32"}, chain)
    inputs = OP.make_inputs(case.problem, case.kind, np.random.default_rng(case.seed))
    last = int(np.flatnonzero(inputs["a"].any(axis=0))[-1])  # behind it k is padded with zeros
    output_check = check_output(*answers(case, drop=case.problem.k - last), exact=False)  # type: ignore[attr-defined]
    assert output_check.wrong > 0.4 * output_check.size


def test_an_activation_leaves_no_more_room_than_it_takes() -> None:
    plain, gelu = (integer_case({"dtype": "float32", "out_dtype": "float32"}, chain) for chain in ([], GELU))
    _, _, bound = answers(gelu)
    normal = full(default_candidate(gelu.problem))[1]  # type: ignore[arg-type]
    _, expected, of_sums = answers(normal)
    assert np.max(answers(plain)[2]) == 0.0
    # Of random inputs the bound is that of 2000 additions, many times as wide.
    assert np.median(bound) < 1e-5 < 1e-4 < np.median(of_sums)
    assert np.isfinite(expected).all()
