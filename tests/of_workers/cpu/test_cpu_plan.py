"""The test plan reaches every launch, order and problem, and verifies without mercy."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.identity import PlanVersions
from codegen.operators import operator
from codegen.operators.matmul.grid import k_steps
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.split import all_steps
from codegen.plan.verification_plan import EXACT_ORDERS, Case, FarCase, check_output, differing, plan_cases
from codegen.run_once import of_purpose
from storage.config import own_modules
from storage.config import own_modules as plan_version
from storage.config.own_modules import gpu_plans
from tests.support.kernels.cpu_helpers import LIMITS, loaded, matmul_kernel, processes, tensor_kernel, toolchain
from tests.support.run.forget_caches import forget_caches
from tests.support.run.places import FAULTY
from workers.cpu import verify
from workers.cpu.build import build_cpu
from workers.cpu.library import CpuLibrary
from workers.cpu.run import plan_test
from workers.cpu.verify import cpu_plans

MATMUL = operator("matmul")


def cases(seed: int = 1) -> list[Case]:
    return list(plan_cases(MATMUL, matmul_kernel(epilogue=("bias.n", "gelu")), seed))


def test_every_problem_is_run_exactly_and_approximately() -> None:
    problems = MATMUL.test_problems(matmul_kernel(epilogue=("bias.n", "gelu")))
    assert [(case.problem, case.kind, case.exact) for case in cases()[: 2 * len(problems)]] == [
        pair for problem in problems for pair in ((problem, "integer", True), (problem, "normal", False))
    ]


def test_a_far_problem_is_run_once_exactly_at_the_end() -> None:
    kernel = matmul_kernel(split="workspace")
    far, _ = of_purpose(MATMUL.run_once(kernel), "far")
    *_, last, _ = plan_cases(MATMUL, kernel, 1)
    assert isinstance(last, FarCase)
    assert (last.problem, last.part, last.kind, last.exact) == (far.problem, far.part, "integer", True)
    assert [run.launch for run in last.runs] == [far.launch]
    (a, b, out) = MATMUL.operands(far.problem)
    assert min(a.elements, b.elements, out.elements) > 2**31


def test_where_no_address_space_is_to_be_had_its_case_is_not_run_and_that_is_said(tmp_path: Path) -> None:
    kernel = matmul_kernel()
    built = build_cpu([kernel], toolchain(), processes(), LIMITS, folder=tmp_path)
    library = CpuLibrary(built.libraries[0][0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    test = plan_test(library, kernel, 1, 60.0)
    # Each of three operands has 8 GiB of guards, and 8 of its own where it is far.
    resource.setrlimit(resource.RLIMIT_AS, (own + 36 * 2**30, hard))
    try:
        assert test.failure() is None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    *near, far = test.described
    assert "no memory for" in far["not_run"]
    assert not any("not_run" in case for case in near)


def test_a_long_problem_is_run_once_exactly_before_it() -> None:
    kernel = matmul_kernel(split="workspace")
    (long,) = of_purpose(MATMUL.run_once(kernel), "long")
    problem, launch = long.problem, long.launch
    (last,) = (case for case in plan_cases(MATMUL, kernel, 1) if case.problem == problem)
    assert (last.problem, last.kind, last.exact) == (problem, "integer", True)
    assert [(run.launch, run.watch) for run in last.runs] == [(launch, False)]
    assert launch[1] == 64
    assert isinstance(problem, MatmulProblem)
    assert k_steps(problem.k, int(kernel.tunables.as_dict()["tile_k"])) == 65


def test_every_launch_and_every_order_runs_exactly_on_every_problem() -> None:
    exact = [case for case in cases() if case.exact and len(case.runs) > 1]
    for case in exact:
        launches = {tuple(values) for values in MATMUL.test_launches(matmul_kernel(), case.problem)}
        assert {run.launch for run in case.runs} == launches
        assert {run.order for run in case.runs} == set(EXACT_ORDERS)
    assert max(len({run.launch for run in case.runs}) for case in exact) > len(EXACT_ORDERS)


def test_approximate_runs_are_repeated_in_another_order_with_the_same_launch() -> None:
    for case in cases():
        if case.kind == "normal":
            assert len(case.runs) == 2
            assert len({run.order for run in case.runs}) == 2
            assert len({run.launch for run in case.runs}) == 1


def test_the_first_exact_run_of_every_problem_is_watched_and_no_other() -> None:
    for case in cases():
        is_race_checked = case.exact and len(case.runs) > 1
        assert [run.watch for run in case.runs] == [is_race_checked] + [False] * (len(case.runs) - 1)


@pytest.mark.parametrize("split", ["workspace", "atomic", "stream"])
@pytest.mark.parametrize("stages", range(2, 9))
@pytest.mark.parametrize(("tile", "static_k"), [(32, 0), (128, 0), (256, 0), (256, 512)])
def test_the_first_watched_launch_gives_every_block_more_steps_than_stages(
    split: str, stages: int, tile: int, static_k: int
) -> None:
    """Else the ring of tiles never turns while races are looked for."""
    kernel = tensor_kernel(split=split, stages=stages, tile_m=tile, tile_n=tile, static_k=static_k)
    first = next(plan_cases(MATMUL, kernel, 1))
    problem, run = first.problem, first.runs[0]
    assert isinstance(problem, MatmulProblem)
    assert run.watch
    t: dict[str, Any] = {**kernel.tunables.as_dict(), **dict(zip(MATMUL.launch_tunables, run.launch, strict=True))}
    # Shares of k, or of the steps of all tiles, differ by one step at most.
    of_tile = k_steps(problem.k, t["tile_k"])
    least = all_steps(problem, t) // t["stream_blocks"] if split == "stream" else of_tile // t["split_k"]
    assert least > stages


def test_a_launch_is_not_always_paired_with_the_same_order() -> None:
    pairs = Counter((run.launch, run.order) for case in cases() if case.exact for run in case.runs)
    assert max(pairs.values()) < len([case for case in cases() if case.exact])


def test_the_seed_alone_decides_a_plan() -> None:
    assert cases(seed=5) == cases(seed=5)
    assert not {case.seed for case in cases(seed=5)} & {case.seed for case in cases(seed=6)}
    assert len({case.seed for case in cases()}) == len(cases())


def test_an_exact_comparison_forgives_nothing_but_the_sign_of_zero() -> None:
    expected = np.array([[1.0, -2.0], [0.0, 4.0]])
    loose = np.full(expected.shape, 1e3)
    assert check_output(np.float32([[1, -2], [-0.0, 4]]), expected, loose, exact=True).ok
    output_check = check_output(np.nextafter(np.float32([[1, -2], [0, 4]]), np.float32(9)), expected, loose, exact=True)
    assert (output_check.wrong, output_check.index, output_check.expected, output_check.bound) == (4, (0, 0), 1.0, 0.0)


def test_where_signs_count_a_zero_of_another_is_wrong_unless_its_bound_leaves_it_open() -> None:
    got, expected = np.float32([0.0, -0.0, -0.0, 1.0]), np.array([0.0, -0.0, 0.0, 1.0])
    bound = np.array([0.0, 0.0, 2.0**-149, 0.0])
    assert check_output(got, expected, bound, exact=False, signed=True).ok
    assert check_output(-got, expected, bound, exact=False).wrong == 1
    assert check_output(-got, expected, bound, exact=False, signed=True).wrong == 3


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_wrong_whatever_the_finite_bound(bad: float, exact: bool) -> None:
    output_check = check_output(np.float32([1, bad, 3]), np.array([1.0, 2.0, 3.0]), np.full(3, 1e300), exact=exact)
    assert (output_check.wrong, output_check.index, output_check.size) == (1, (1,), 3)
    assert ("never written" in output_check.sentence()) == np.isnan(bad)


def test_infinities_that_agree_are_right_and_an_infinite_bound_allows_anything() -> None:
    assert check_output(np.float32([np.inf]), np.array([np.inf]), np.zeros(1), exact=False).ok
    output_check = check_output(np.float32([np.inf, 7]), np.array([1.0, 7.0]), np.array([np.inf, 0.0]), exact=True)
    assert (output_check.wrong, output_check.max_error, output_check.max_ratio) == (0, 0.0, 0.0)


def test_the_bound_is_reported_where_the_error_is_largest() -> None:
    got, expected = np.float32([1.5, 2.25, 3.0]), np.array([1.0, 2.0, 3.0])
    output_check = check_output(got, expected, np.array([4.0, 0.25, 9.0]), exact=False)
    # The second element is nearer to its bound, the first has the larger error.
    assert (output_check.max_error, output_check.error_bound, output_check.max_ratio) == (0.5, 4.0, 1.0)
    wrong = check_output(np.float32([1.0, np.nan, 9.0]), expected, np.array([4.0, 0.25, 9.0]), exact=False)
    assert (np.isnan(wrong.max_error), wrong.error_bound) == (True, 0.25)


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=8), st.integers(0, 7), st.floats(1e-3, 10))
def test_an_error_is_wrong_just_when_it_exceeds_its_bound(values: list[float], place: int, bound: float) -> None:
    expected = np.array(values)
    place %= len(values)
    bounds = np.full(expected.shape, bound)
    for factor in (0.9, 1.1):
        got = expected.copy()
        got[place] += factor * bound
        output_check = check_output(got, expected, bounds, exact=False)
        assert output_check.ok == (factor < 1)
        assert output_check.max_ratio == pytest.approx(factor, rel=1e-6)
        assert output_check.index == (None if factor < 1 else (place,))


def test_the_sentence_counts_and_places_what_is_wrong() -> None:
    output_check = check_output(
        np.float32([[1, 5], [3, 9]]), np.array([[1.0, 2.0], [3.0, 4.0]]), np.array(0.5), exact=False
    )
    assert output_check.sentence() == "2 of 4 elements are wrong; the first is out[0, 1] = 5.0, expected 2.0 within 0.5"


def test_bits_that_differ_are_counted_even_where_values_are_equal() -> None:
    assert differing(np.float32([0.0, 1.0, np.nan]), np.float32([-0.0, 1.0, np.nan])) == 1


def test_the_plan_version_follows_everything_that_gives_a_verdict_its_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cpu_plans()
    assert len(set(before.values())) == len(before)  # of two operators none is the same
    assert cpu_plans(sanitize=True).keys() == before.keys()
    assert set(cpu_plans(sanitize=True).values()).isdisjoint(before.values())
    monkeypatch.setattr(verify, "CPU_FLAGS", ("-O0",))
    forget_caches(verify)
    assert set(cpu_plans().values()).isdisjoint(before.values())
    monkeypatch.undo()
    forget_caches(verify)
    assert cpu_plans() == before


def test_a_loaded_operator_changes_the_version_of_no_other() -> None:
    before = cpu_plans()
    with loaded([FAULTY]):
        assert {name: version for name, version in cpu_plans().items() if name in before} == before
        assert cpu_plans().keys() - before.keys() == {"faulty"}


@pytest.mark.parametrize(
    ("module", "operators"),
    [
        ("codegen.operators.convolution.reference", {"conv2d", "conv2d_dgrad", "conv2d_wgrad"}),
        ("codegen.operators.conv2d_dgrad.residue_classes", {"conv2d_dgrad"}),
        ("codegen.operators.reduce.inputs", {"reduce"}),
        ("codegen.rows.reference", {"softmax", "rms_norm", "layer_norm"}),
    ],
)
@pytest.mark.parametrize("plans", [cpu_plans, gpu_plans])
def test_an_edit_verifies_the_operators_anew_that_import_it(
    plans: Callable[[], PlanVersions], module: str, operators: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, read = plans(), own_modules.text_and_imports

    def edited(name: str) -> tuple[str, tuple[str, ...]] | None:
        found = read(name)
        return (found[0] + "# edited\n", found[1]) if found and name == module else found

    def forget() -> None:
        forget_caches(verify, plan_version)

    monkeypatch.setattr(own_modules, "text_and_imports", edited)
    forget()
    try:
        assert {name for name, version in plans().items() if version != before[name]} == operators
    finally:
        monkeypatch.undo()
        forget()
