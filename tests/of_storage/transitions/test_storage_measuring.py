"""Measuring: candidates on a GPU are verified there and once per class, then compared, then finished; those of
`predicted:` problems on the CPU, though both share their builds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import update

from cukiln.types import StageSeconds
from storage.database.session import Database
from storage.database.tables import BuildRow, JobProblemRow
from storage.entities.jobs import load_problem
from storage.entities.task_kinds import group_of_ref, measure_ref
from storage.entities.verdicts import NewVerdict, known_verdicts
from storage.errors import LostLease
from storage.transitions import end_attempt
from storage.transitions.apply_verdicts import Followed, NextStep
from storage.transitions.groups import builds_to_verify
from storage.transitions.measure import best_measured, record_compared
from tests.support.fixtures.measuring import (
    COMPARISON,
    CPU_CLASS,
    add,
    candidates,
    compare_next,
    finish_next,
    ids_of,
    state_of,
    take_one_in,
    take_target,
    unended,
    verdicts,
)
from tests.support.fixtures.storage import (
    CPU_PLAN,
    DRIVER,
    GPU_CLASS,
    OTHER_CLASS,
    TARGET,
    EveryOperator,
    clear_all,
    compile_next,
    measure_leased,
    measure_next,
    measured,
    measurement,
    plan_next,
    problem_ids,
    record,
    record_as,
    record_verified,
    take_one,
    to_measure,
    verify_next,
)


def plan_under(database: Database, *builds: str, **versions: Any) -> Followed:
    """Plan the next task under other versions: of verification plans, of drivers."""
    lease = take_one(database, "plan")
    with database.write() as session:
        return record(session, lease, builds, **versions)


# ---- the way


def test_a_problem_on_a_gpu_is_measured_compared_and_finished(database: Database) -> None:
    job = add(database, GPU_CLASS)
    assert plan_next(database, "a", "b", "c").waiting == [("compile", TARGET)] * 3
    compiled = [compile_next(database, bad=["c"], kernels=1) for _ in range(3)]
    assert sorted(row.waiting for row in compiled) == [[], [("measure", GPU_CLASS)], [("measure", GPU_CLASS)]]
    assert [row for row in unended(database) if row[0] == "verify"] == []
    assert measure_next(database, a=12.0, b=7.0) == []
    (next_steps,) = measure_next(database, a=12.0, b=7.0)
    (problem_id,) = ids_of(database, job)
    assert next_steps == NextStep(problem_id, "compare", GPU_CLASS)
    (by_name,) = candidates(database, job)
    assert {name: (each.verdict, each.measured_us) for name, each in by_name.items()} == {
        "c-a": ("ok", 12.0),
        "c-b": ("ok", 7.0),
        "c-c": ("compile_error", None),
    }
    assert by_name["c-b"].measurement == measurement(7.0)
    assert by_name["c-b"].library is not None and by_name["c-b"].library.startswith("library-")
    with database.read() as session:
        assert best_measured(session, [problem_id, 4711]) == {problem_id: 7.0}
    assert compare_next(database) == [NextStep(problem_id, "finish", TARGET)]
    with database.read() as session:
        problem = load_problem(session, problem_id)
    assert problem is not None and problem.comparison == COMPARISON
    finish_next(database)
    assert (state_of(database, job), unended(database)) == ("done", [])


def test_what_is_to_be_measured_says_all_that_a_gpu_needs(database: Database) -> None:
    job = add(database, GPU_CLASS)
    plan_next(database, "a", "b")
    compile_next(database, bad=["b"])
    lease = take_one(database, "measure")
    (candidate,) = to_measure(database, lease)
    group = group_of_ref(lease.ref)
    assert lease.ref == measure_ref(group, GPU_CLASS)
    assert (candidate.problem_id, candidate.operator, candidate.problem) == (
        *ids_of(database, job),
        "matmul",
        {"operator": "matmul", "m": 64},
    )
    assert (candidate.candidate, candidate.schedule, candidate.build) == ("c-a", {"n": "a"}, "a")
    assert (candidate.library, candidate.code_digest, candidate.verified) == (f"library-{group}", "code-a", False)


def test_a_measure_ref_fits_whatever_the_product_is_called() -> None:
    ref = measure_ref("f" * 32, "NVIDIA Graphics Device with a Name That Fills All That a Column May Hold" * 2)
    assert len(ref) <= 64
    assert group_of_ref(ref) == "f" * 32
    assert measure_ref("f" * 32, GPU_CLASS) != measure_ref("f" * 32, OTHER_CLASS)


def test_code_that_was_verified_before_is_reported_so(database: Database) -> None:
    add(database, GPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    measure_next(database)
    add(database, OTHER_CLASS)
    plan_next(database, "a")
    assert [candidate.verified for candidate in to_measure(database, take_one(database, "measure"))] == [True]


def test_problems_on_a_cpu_and_on_two_gpus_share_builds_and_each_is_verified_in_its_own_way(database: Database) -> None:
    job = add(database, CPU_CLASS, GPU_CLASS, OTHER_CLASS)
    plan_next(database, "a", "b")
    assert sorted(compile_next(database).waiting) == [
        ("measure", OTHER_CLASS),
        ("measure", GPU_CLASS),
        ("verify", TARGET),
    ]
    ids = ids_of(database, job)
    verify_next(database, wrong=["b"])
    assert verdicts(database, job) == [{"c-a": "ok", "c-b": "incorrect"}, *[{"c-a": None, "c-b": None}] * 2]
    on_h200 = take_target(database, GPU_CLASS)
    results = [measured(candidate, us=5.0) for candidate in to_measure(database, on_h200)]
    assert {result.problem_id for result in results} == {ids[1]}
    assert measure_leased(database, on_h200, results) == [NextStep(ids[1], "compare", GPU_CLASS)]
    assert verdicts(database, job)[1:] == [{"c-a": "ok", "c-b": "ok"}, {"c-a": None, "c-b": None}]
    on_h100 = take_target(database, OTHER_CLASS)
    results = [measured(candidate, us=9.0) for candidate in to_measure(database, on_h100)]
    assert measure_leased(database, on_h100, results) == [NextStep(ids[2], "compare", OTHER_CLASS)]
    assert [by_name["c-a"].measured_us for by_name in candidates(database, job)] == [None, 5.0, 9.0]
    assert unended(database) == [("compare", GPU_CLASS), ("compare", OTHER_CLASS), ("finish", TARGET)]


def test_only_builds_that_a_predicted_problem_waits_for_are_verified_on_the_cpu(database: Database) -> None:
    add(database, CPU_CLASS)
    add(database, GPU_CLASS)
    plan_next(database, "a")
    plan_next(database, "a", "b")
    assert sorted(compile_next(database).waiting) == [("measure", GPU_CLASS), ("verify", TARGET)]
    lease = take_one(database, "verify")
    with database.read() as session:
        assert [kernel.build for kernel in builds_to_verify(session, lease.ref, **CPU_PLAN)] == ["a"]


def test_what_only_a_gpu_has_used_is_verified_when_a_predicted_problem_comes(database: Database) -> None:
    """Also while the group's other kernel is being verified: it is verified after that."""
    first = add(database, GPU_CLASS)
    plan_next(database, "a", "b")
    second = add(database, CPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    at_work = take_one(database, "verify")
    with database.read() as session:
        asked = builds_to_verify(session, at_work.ref, **CPU_PLAN)
    assert [kernel.build for kernel in asked] == ["a"]
    third = add(database, CPU_CLASS)
    assert plan_next(database, "a", "b").waiting == []
    with database.write() as session:
        record_verified(session, at_work, [NewVerdict("slice-a", "matmul", "ok", None, {}, 1.0, 1.0)], asked)
    assert ("verify", TARGET) in unended(database)
    assert verdicts(database, second) == [{"c-a": "ok"}]
    assert verdicts(database, third) == [{"c-a": "ok", "c-b": None}]
    verify_next(database)
    assert verdicts(database, third) == [{"c-a": "ok", "c-b": "ok"}]
    assert verdicts(database, first) == [{"c-a": None, "c-b": None}]


def test_what_stands_is_measured_without_compiling(database: Database) -> None:
    add(database, CPU_CLASS)
    plan_next(database, "a", "b")
    compile_next(database)
    verify_next(database)
    job = add(database, GPU_CLASS)
    assert plan_next(database, "a", "b").waiting == [("measure", GPU_CLASS)]
    measure_next(database)
    assert verdicts(database, job) == [{"c-a": "ok", "c-b": "ok"}]


def test_two_jobs_that_wait_for_one_candidate_have_it_measured_once(database: Database) -> None:
    first, second = add(database, GPU_CLASS), add(database, GPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    assert plan_next(database, "a").waiting == []
    lease = take_one(database, "measure")
    assert lease.jobs == tuple(sorted([first.id, second.id]))
    (candidate,) = to_measure(database, lease)
    next_steps = measure_leased(database, lease, [measured(candidate)])
    assert {step.problem for step in next_steps} == {*ids_of(database, first), *ids_of(database, second)}
    assert verdicts(database, first) == verdicts(database, second) == [{"c-a": "ok"}]


def test_what_comes_while_a_group_is_measured_is_measured_after_it(database: Database) -> None:
    add(database, GPU_CLASS)
    plan_next(database, "a", "b")
    compile_next(database)
    lease = take_one(database, "measure")
    results = [measured(candidate) for candidate in to_measure(database, lease)]
    later = add(database, GPU_CLASS)
    with database.write() as session:  # another problem: its candidates are others, though the builds are the same
        rename = update(JobProblemRow).where(JobProblemRow.id.in_(problem_ids(session, later.id)))
        session.execute(rename.values(name="other"))
        planned = take_one_in(session, "plan")
        recorded = record_as(session, planned, {"d-a": "a"})
    assert recorded.waiting == []
    assert ("measure", "NVIDIA H200") in [(step.kind, step.target) for step in measure_leased(database, lease, results)]
    (left,) = to_measure(database, take_one(database, "measure"))
    assert (left.candidate, left.problem_id) == ("d-a", *ids_of(database, later))
    with pytest.raises(LostLease):
        measure_leased(database, lease, results)


def test_a_part_may_be_recorded_and_the_rest_waits_again(database: Database) -> None:
    job = add(database, GPU_CLASS)
    plan_next(database, "a", "b")
    compile_next(database)
    lease = take_one(database, "measure")
    asked = to_measure(database, lease)
    assert [step.kind for step in measure_leased(database, lease, [measured(asked[0])])] == ["measure"]
    again = take_one(database, "measure")
    assert (again.ref, again.attempt) == (lease.ref, 1)
    assert [candidate.candidate for candidate in to_measure(database, again)] == ["c-b"]
    measure_leased(database, again, [measured(asked[1], us=3.0)])
    assert verdicts(database, job) == [{"c-a": "ok", "c-b": "ok"}]


def test_a_worker_that_never_answers_for_a_candidate_does_not_go_round_for_ever(database: Database) -> None:
    job = add(database, GPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    for attempt in (1, 2):
        lease = take_one(database, "measure")
        assert lease.attempt == attempt
        measure_leased(database, lease, [])
    lease = take_one(database, "measure")
    with pytest.raises(ValueError, match="no result for c-a"):
        measure_leased(database, lease, [])
    with database.write() as session:
        assert end_attempt.fail(session, lease, "no result", retry=True) == "failed"
        clear_all(session)
    assert verdicts(database, job) == [{"c-a": "skipped"}]
    assert unended(database) == [("finish", TARGET)]


@pytest.mark.parametrize(("verdict", "times"), [("ok", None), ("incorrect", measurement(1.0))])
def test_times_without_being_right_are_refused_and_the_reverse(database: Database, verdict: str, times: Any) -> None:
    add(database, GPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    lease = take_one(database, "measure")
    (candidate,) = to_measure(database, lease)
    with pytest.raises(ValueError, match="c-a"):
        measure_leased(database, lease, [replace(measured(candidate, verdict), measurement=times)])
    assert unended(database) == [("measure", GPU_CLASS)]


# ---- what is carried over


def test_times_are_carried_over_to_the_same_candidate(database: Database) -> None:
    add(database, GPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    measure_next(database, a=6.5)
    later = add(database, GPU_CLASS)
    recorded = plan_next(database, "a")
    assert recorded.next_steps == [NextStep(ids_of(database, later)[0], "compare", GPU_CLASS)]
    assert recorded.waiting == []
    (by_name,) = candidates(database, later)
    assert (by_name["c-a"].verdict, by_name["c-a"].measured_us) == ("ok", 6.5)
    assert by_name["c-a"].measurement == measurement(6.5)


def test_times_are_carried_over_to_equal_code_of_another_toolchain(database: Database) -> None:
    add(database, GPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    measure_next(database, a=6.5)
    with database.write() as session:
        session.get_one(BuildRow, "a").id = "a-older"
    later = add(database, GPU_CLASS)
    plan_next(database, "a")
    assert compile_next(database).next_steps == [NextStep(ids_of(database, later)[0], "compare", GPU_CLASS)]
    assert candidates(database, later)[0]["c-a"].measured_us == 6.5


@pytest.mark.parametrize(
    "changed",
    [
        {"gpu_plans": EveryOperator("g2")},
        {"drivers": {GPU_CLASS: "999.9"}},
        {"drivers": {OTHER_CLASS: DRIVER}},
    ],
    ids=["test plan", "driver", "driver of the class not known"],
)
def test_times_are_not_carried_over_to_another(database: Database, changed: dict[str, Any]) -> None:
    add(database, GPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    measure_next(database)
    later = add(database, GPU_CLASS)
    assert plan_under(database, "a", **changed).waiting == [("measure", GPU_CLASS)]
    assert verdicts(database, later) == [{"c-a": None}]


def test_times_are_not_carried_over_to_another_device_class_or_candidate(database: Database) -> None:
    add(database, GPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    measure_next(database)
    other = add(database, OTHER_CLASS)
    assert plan_next(database, "a").waiting == [("measure", OTHER_CLASS)]
    same = add(database, GPU_CLASS)
    with database.write() as session:
        assert record_as(session, take_one_in(session, "plan"), {"d-a": "a"}).waiting == [("measure", GPU_CLASS)]
    assert (verdicts(database, other), verdicts(database, same)) == ([{"c-a": None}], [{"d-a": None}])


def test_a_newer_measurement_replaces_the_older_one(database: Database) -> None:
    add(database, GPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    measure_next(database, a=6.5)
    add(database, GPU_CLASS)
    plan_under(database, "a", drivers={})
    measure_next(database, a=6.0)
    later = add(database, GPU_CLASS)
    plan_next(database, "a")
    assert candidates(database, later)[0]["c-a"].measured_us == 6.0


@pytest.mark.parametrize("verdict", ["incorrect", "runtime_error", "run_timeout"])
def test_wrong_code_is_wrong_for_every_candidate_on_every_gpu_and_not_on_the_cpu(
    database: Database, verdict: str
) -> None:
    waiting = add(database, OTHER_CLASS, CPU_CLASS)
    first = add(database, GPU_CLASS)
    plan_next(database, "a")
    plan_next(database, "a")
    compile_next(database)
    lease = take_target(database, GPU_CLASS)
    (candidate,) = to_measure(database, lease)
    next_steps = measure_leased(database, lease, [measured(candidate, verdict)])
    assert [(step.kind, step.target) for step in next_steps] == [("finish", TARGET), ("finish", TARGET)]
    assert verdicts(database, first) == [{"c-a": verdict}]
    assert verdicts(database, waiting) == [{"c-a": verdict}, {"c-a": None}]
    later = add(database, GPU_CLASS)
    assert plan_next(database, "a").waiting == []
    candidate = candidates(database, later)[0]["c-a"]
    assert (candidate.verdict, candidate.message) == (verdict, f"{verdict} at m=64")


def test_a_skipped_candidate_says_nothing_about_its_code(database: Database) -> None:
    job = add(database, GPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    lease = take_one(database, "measure")
    (candidate,) = to_measure(database, lease)
    measure_leased(database, lease, [measured(candidate, "skipped")])
    assert verdicts(database, job) == [{"c-a": "skipped"}]
    add(database, GPU_CLASS)
    assert plan_next(database, "a").waiting == [("measure", GPU_CLASS)]


def test_a_failure_replaces_an_ok_and_is_never_replaced(database: Database) -> None:
    """One candidate shows that the code is wrong: another of the same code, right before, is invalidated."""
    first = add(database, GPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    measure_next(database)
    assert verdicts(database, first) == [{"c-a": "ok"}]
    second = add(database, GPU_CLASS)
    with database.write() as session:
        record_as(session, take_one_in(session, "plan"), {"d-a": "a", "e-a": "a"})
    lease = take_one(database, "measure")
    asked = to_measure(database, lease)
    measure_leased(database, lease, [measured(asked[0], "incorrect"), measured(asked[1])])
    assert verdicts(database, second) == [{"d-a": "incorrect", "e-a": "incorrect"}]
    (by_name,) = candidates(database, first)
    assert (by_name["c-a"].verdict, by_name["c-a"].measured_us, by_name["c-a"].measurement) == ("incorrect", None, None)
    with database.read() as session:
        verification = known_verdicts(session, ["code-a"], "gpu", EveryOperator("g1"))["code-a"]
    assert (verification.verdict, verification.message) == ("incorrect", "incorrect at m=64")
    add(database, GPU_CLASS)
    assert [step.kind for step in plan_next(database, "a").next_steps] == ["finish"]


# ---- comparing


def test_a_problem_of_which_nothing_is_right_is_finished_without_comparing(database: Database) -> None:
    add(database, GPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    assert [step.kind for step in measure_next(database, wrong=["a"])] == ["finish"]


def test_a_problem_of_which_nothing_compiles_is_finished_without_comparing(database: Database) -> None:
    add(database, GPU_CLASS)
    plan_next(database, "a")
    assert [step.kind for step in compile_next(database, bad=["a"]).next_steps] == ["finish"]


def test_contenders_found_wrong_after_timing_are_out_and_so_is_their_code(database: Database) -> None:
    job = add(database, GPU_CLASS)
    plan_next(database, "a", "b")
    compile_next(database)
    measure_next(database)
    other = add(database, OTHER_CLASS)
    plan_next(database, "a")
    assert [step.kind for step in compare_next(database, wrong=[("c-a", "drifted")])] == ["finish", "finish"]
    candidate = candidates(database, job)[0]["c-a"]
    assert (candidate.verdict, candidate.message, candidate.measured_us) == ("incorrect", "drifted", None)
    assert verdicts(database, job) == [{"c-a": "incorrect", "c-b": "ok"}]
    assert verdicts(database, other) == [{"c-a": "incorrect"}]
    later = add(database, GPU_CLASS)
    assert [step.kind for step in plan_next(database, "a").next_steps] == ["finish"]
    assert verdicts(database, later) == [{"c-a": "incorrect"}]


def test_a_problem_of_which_the_comparison_leaves_nothing_is_still_finished(database: Database) -> None:
    add(database, GPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    measure_next(database)
    assert [step.kind for step in compare_next(database, wrong=[("c-a", "drifted")])] == ["finish"]
    assert unended(database) == [("finish", TARGET)]


def test_a_comparison_that_fails_for_good_leaves_the_choice_to_the_times_there_are(database: Database) -> None:
    job = add(database, GPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    measure_next(database)
    lease = take_one(database, "compare")
    with database.write() as session:
        assert end_attempt.fail(session, lease, "the GPU is gone", retry=False) == "failed"
    assert unended(database) == [("finish", TARGET)]
    assert verdicts(database, job) == [{"c-a": "ok"}]


def test_a_problem_is_compared_once(database: Database) -> None:
    """What is found out about its code while it is compared, or after it, does not send it there again."""
    job = add(database, GPU_CLASS)
    plan_next(database, "a", "b")
    compile_next(database)
    measure_next(database)
    lease = take_one(database, "compare")
    invalidate_in_another_job(database, "a")
    assert verdicts(database, job) == [{"c-a": "incorrect", "c-b": "ok"}]
    assert [kind for kind, _ in unended(database)].count("finish") == 1  # of the other job
    with database.write() as session:
        record_compared(session, lease, None, measure=StageSeconds())
    assert [kind for kind, _ in unended(database)] == ["finish", "finish"]
    invalidate_in_another_job(database, "b")
    assert verdicts(database, job) == [{"c-a": "incorrect", "c-b": "incorrect"}]
    assert {kind for kind, _ in unended(database)} == {"finish"}


def invalidate_in_another_job(database: Database, build: str) -> None:
    add(database, OTHER_CLASS)
    plan_next(database, build)
    measure_next(database, wrong=[build])
