"""Reports of what is measured: progress, seconds, times, rates, the vendor's time."""

from __future__ import annotations

import pytest
from sqlalchemy import select, update

from codegen.lower import lower
from codegen.operators import operator
from codegen.search.search import Search
from codegen.targets import target
from cukiln.types import MeasuredOn, RunnerUp, VendorResult
from storage.database.session import Database
from storage.database.tables import CandidateRow, TaskRow
from storage.entities.candidates import candidates_of_problem
from storage.entities.jobs import load_problem
from storage.entities.winners import publish_winner
from storage.reports.candidates import candidate_page
from storage.reports.job import job_report
from storage.reports.progress import COMPARE_SECONDS, FINISH_SECONDS, job_progress
from storage.transitions import accept, end_jobs
from storage.transitions.accept import CreatedJob
from storage.transitions.apply_verdicts import MEASURE_SECONDS
from storage.transitions.end_jobs import finish_problem
from storage.transitions.measure import (
    candidates_to_measure,
)
from tests.support.fixtures.measuring import (
    CPU_CLASS,
    add,
    compare_next,
    ids_of,
    take_one_in,
    verdicts,
)
from tests.support.fixtures.storage import (
    GPU_CLASS,
    VERSIONS,
    clear_all,
    compile_next,
    measure_leased,
    measure_next,
    measured,
    new_problem,
    plan_next,
    plan_predicted,
    problem_ids,
    record,
    record_as,
    take_one,
    to_measure,
    verify_next,
    winner_record,
)
from tests.support.run.fake_clock import FakeClock

# ---- what is reported


def test_seconds_go_to_the_problem_of_each_candidate(database: Database) -> None:
    job = add(database, GPU_CLASS, CPU_CLASS)
    plan_next(database, "a", "b")
    other = add(database, GPU_CLASS)
    with database.write() as session:
        record_as(session, take_one_in(session, "plan"), {"d-a": "a"})
    compile_next(database)
    verify_next(database)
    measure_next(database)
    compare_next(database)
    compare_next(database)
    with database.read() as session:
        spent = [load_problem(session, row) for row in (*problem_ids(session, job.id), *problem_ids(session, other.id))]
    seconds = [problem.seconds for problem in spent if problem is not None]
    # Two candidates of the first problem, one of the other job's: a second of verification and two of timing each.
    assert seconds[0]["verify"] == {"wall": 2.0, "cpu": 1.0}
    assert seconds[0]["measure"] == {"wall": 2 * 2.0 + 3, "cpu": 2 * 0.25 + 1}
    assert (seconds[2]["verify"]["wall"], seconds[2]["measure"]["wall"]) == (1.0, 2.0 + 3)
    # Proving on the CPU is the work of the problem that has no GPU.
    assert seconds[1]["verify"]["wall"] == 4.0
    assert "measure" not in seconds[1]


def measuring(database: Database, job: CreatedJob) -> tuple[int, int]:
    with database.read() as session:
        progress = job_progress(session, job.id)
    assert progress is not None
    return progress.progress.measure.done, progress.progress.measure.total


def test_progress_counts_what_is_measured_of_what_may_be_right(database: Database) -> None:
    job = add(database, GPU_CLASS, CPU_CLASS)
    plan_next(database, "a", "b", "c")
    assert measuring(database, job) == (0, 3)
    for _ in range(3):
        compile_next(database, bad=["c"], kernels=1)
    assert measuring(database, job) == (0, 2)
    measure_next(database)
    assert measuring(database, job) == (1, 2)
    measure_next(database, wrong=["a", "b"])
    assert measuring(database, job) == (1, 1)


def eta(database: Database, job: CreatedJob) -> float | None:
    with database.read() as session:
        progress = job_progress(session, job.id)
    assert progress is not None
    return progress.progress.eta_seconds


def test_the_eta_counts_measuring_and_comparing(database: Database, clock: FakeClock) -> None:
    job = add(database, GPU_CLASS)
    plan_predicted(database, a=2.0, b=2.0)
    to_come = COMPARE_SECONDS + FINISH_SECONDS
    # Two kernels of predicted 2 s, nothing is verified on the CPU; then two candidates.
    assert eta(database, job) == pytest.approx(2 * 2 + 2 * MEASURE_SECONDS + to_come)
    compile_next(database, kernels=1)  # took 8 s instead of 2
    compile_next(database, kernels=1)
    assert eta(database, job) == pytest.approx(2 * MEASURE_SECONDS + to_come)
    lease = take_one(database, "measure", worker="gpu", seconds=100)
    clock.advance(4 * MEASURE_SECONDS)
    measure_leased(database, lease, [measured(candidate) for candidate in to_measure(database, lease)])
    assert eta(database, job) == pytest.approx(4 * MEASURE_SECONDS + to_come)  # it takes four times as long here
    measure_next(database)
    take_one(database, "compare", worker="gpu", seconds=100)
    clock.advance(COMPARE_SECONDS / 2)
    left = eta(database, job)
    assert left == pytest.approx(COMPARE_SECONDS / 2 + FINISH_SECONDS)


def test_the_eta_counts_the_measuring_of_the_jobs_that_take_turns_with_it(database: Database, clock: FakeClock) -> None:
    large = add(database, GPU_CLASS)
    plan_next(database, "a", "b", "c")
    compile_next(database)
    clock.advance(1)
    job = add(database, GPU_CLASS)
    plan_next(database, "d")
    compile_next(database)
    # As much of the larger one as of its own; and all of its own before the larger one's end.
    assert eta(database, job) == pytest.approx(2 * (MEASURE_SECONDS + COMPARE_SECONDS + FINISH_SECONDS))
    assert eta(database, large) == pytest.approx(4 * MEASURE_SECONDS + 2 * COMPARE_SECONDS + 2 * FINISH_SECONDS)


REAL = {"operator": "matmul", "m": 64, "n": 32, "k": 16}


def test_a_measured_candidate_is_reported_with_its_times(database: Database) -> None:
    with database.write() as session:
        problems = [new_problem("p", device_class=GPU_CLASS, problem=REAL)]
        job = accept.create_jobs(session, [accept.NewJob(problems)])[0]
    plan_next(database, "a", "b")
    compile_next(database)
    measure_next(database, wrong=["b"], a=2.0)
    with database.read() as session:
        page = candidate_page(session, job.id)
    assert page is not None
    fine, wrong = page.candidates
    assert (fine.device_class, fine.verified, fine.measured_us, fine.spread) == (GPU_CLASS, "gpu", 2.0, 0.02)
    assert fine.max_error == 0.25
    assert (wrong.verdict, wrong.verified, wrong.measured_us, wrong.spread, wrong.tflops) == (
        "incorrect",
        None,
        None,
        None,
        None,
    )


def test_a_rate_is_reported_where_the_operator_has_the_schedule(database: Database) -> None:
    kind = operator("matmul")
    problem = kind.parse(REAL)
    best = lower(problem, target("sm_80"), Search(level=0)).candidates[0]
    with database.write() as session:
        job = accept.create_jobs(session, [accept.NewJob([new_problem("p", device_class=GPU_CLASS, problem=REAL)])])[0]
        lease = take_one_in(session, "plan")
        record(session, lease, ["a"])
        (candidate,) = candidates_of_problem(session, *problem_ids(session, job.id))
    assert candidate.candidate == "c-a"
    with database.write() as session:
        session.execute(update(CandidateRow).values(schedule=best.schedule.as_dict()))
    compile_next(database)
    measure_next(database, a=2.0)
    with database.read() as session:
        page = candidate_page(session, job.id)
    assert page is not None
    (report,) = page.candidates
    flops = kind.cost(problem, best.schedule).flops
    assert flops >= 2 * 64 * 32 * 16
    assert report.tflops == pytest.approx(flops / 2e-6 / 1e12)


def test_what_the_cpu_verified_is_not_called_verified_on_a_gpu_that_found_it_wrong(database: Database) -> None:
    job = add(database, CPU_CLASS, GPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    verify_next(database)
    measure_next(database, wrong=["a"])
    with database.read() as session:
        page = candidate_page(session, job.id)
    assert page is not None
    on_cpu, on_gpu = page.candidates
    assert on_cpu.verdict == "ok" and str(on_cpu.verified).startswith("cpu")
    assert (on_gpu.verdict, on_gpu.verified) == ("incorrect", None)


MEASURED_ON = MeasuredOn(
    device=GPU_CLASS,
    uuid="GPU-0",
    driver="580.1",
    cold=True,
    before={},
    after={},
    measured_at=0.0,
    unsteady=["u"],
    limited_by=["l"],
    vendor_missing="m",
)


def test_a_winner_is_summed_up_with_the_vendors_time_and_the_runner_up(database: Database) -> None:
    job = add(database, GPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    measure_next(database)
    compare_next(database)
    vendor = VendorResult(
        library="cuBLASLt",
        version="12",
        algorithm="the first",
        fused=True,
        workspace_bytes=0,
        median_us=8.5,
        low_us=8.4,
        high_us=8.6,
    )
    runner_up = RunnerUp(candidate="c-b", us=11.0, margin=0.1, tie=False)
    lease = take_one(database, "finish")
    with database.write() as session:
        problem = load_problem(session, int(lease.ref))
        assert problem is not None
        published = winner_record(problem.key, "c-a", vendor=vendor, runner_up=runner_up, ranked_by="measured")
        entry = published.front[0].model_copy(update={"measured_on": MEASURED_ON})
        published = published.model_copy(update={"front": [entry]})
        publish_winner(session, published, attempt=lease.token)
        finish_problem(session, lease, winner="c-a", error=None)
        report = job_report(session, job.id)
    assert report is not None
    winner = report.problems[0].winner
    assert winner is not None and (winner.vendor_us, winner.runner_up) == (8.5, runner_up)
    assert (winner.unsteady, winner.limited_by, winner.vendor_missing) == (["u"], ["l"], "m")


def test_candidates_of_cancelled_jobs_are_not_measured(database: Database) -> None:
    first = add(database, GPU_CLASS)
    plan_next(database, "a", "b")
    second = add(database, GPU_CLASS)
    with database.write() as session:
        record_as(session, take_one_in(session, "plan"), {"d-a": "a"})
    compile_next(database)
    with database.write() as session:
        end_jobs.cancel_job(session, first.id)
        (ref,) = session.scalars(select(TaskRow.ref).where(TaskRow.kind == "measure"))
        to_measure = candidates_to_measure(session, ref, GPU_CLASS, VERSIONS["gpu_plans"])
    assert [(row.candidate, row.problem_id) for row in to_measure] == [("d-a", *ids_of(database, second))]
    lease = take_one(database, "measure")
    measure_leased(database, lease, [measured(row) for row in to_measure])
    assert verdicts(database, first) == [{"c-a": None, "c-b": None}]
    with database.write() as session:
        clear_all(session)
    assert verdicts(database, first) == [{"c-a": "skipped", "c-b": "skipped"}]
    assert verdicts(database, second) == [{"d-a": "ok"}]
