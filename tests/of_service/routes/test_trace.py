"""A job's trace: its work by worker and time, the waits, and a compile's phases."""

from __future__ import annotations

from typing import Any

import pytest

from cukiln.client import Client
from cukiln.errors import NotFound
from cukiln.types import StageSeconds, Timings
from service.routes.traces import chrome_trace
from storage.database.session import Database
from storage.database.tables import TaskRow
from storage.entities.groups import kernels_of, load_group
from storage.queue import new_tasks
from storage.queue.tasks import Lease
from storage.reports.times import job_trace, timings
from storage.transitions import accept, end_attempt
from storage.transitions.end_jobs import finish_problem
from storage.transitions.groups import BuildOutcome, GroupFiles, group_report
from tests.support.fixtures.api import MATMUL, Api
from tests.support.fixtures.measuring import add
from tests.support.fixtures.storage import (
    GPU_CLASS,
    add_job,
    cancel,
    compile_leased,
    compile_next,
    counted_statements,
    measure_leased,
    measured,
    new_problem,
    plan_next,
    plan_predicted,
    record,
    record_group,
    take_one,
    to_measure,
    verify_leased,
    verify_next,
)
from tests.support.run.fake_clock import FakeClock
from tests.support.service.chrome_traces import Event, checked, process_names, slices, waits

SECOND = 1_000_000


def traced(database: Database, job: str) -> list[Event]:
    with database.read() as session:
        trace = job_trace(session, job)
    assert trace is not None
    return checked(chrome_trace(trace))


def finish_next(database: Database) -> None:
    lease = take_one(database, "finish", worker="w")
    with database.write() as session:
        finish_problem(session, lease, winner="c-a", error=None)


def names(events: list[Event]) -> list[str]:
    return [event["name"] for event in events]


def test_each_item_is_a_slice_of_its_worker_and_its_wait_stands_beside_it(database: Database, clock: FakeClock) -> None:
    job = add_job(database)
    clock.advance(1)
    lease = take_one(database, "plan", worker="planner")
    clock.advance(2)
    with database.write() as session:
        record(session, lease, ["a"])
    clock.advance(3)
    lease = take_one(database, "compile", worker="host.1")
    clock.advance(9)
    compile_leased(database, lease)
    clock.advance(1)
    lease = take_one(database, "verify", worker="host.2")
    clock.advance(4)
    verify_leased(database, lease)
    finish_next(database)
    events = traced(database, job.id)

    group = next(event for event in slices(events, "compile"))["args"]["ref"]
    (whole,) = slices(events, "job")
    assert (whole["ts"], whole["dur"], whole["args"]["state"]) == (0, 20 * SECOND, "done")
    assert "open" not in whole["args"]
    assert whole["args"]["seconds"]["compile"] == {"wall": 8.0, "cpu": 8.0}
    begun = [event for event in events if event["ph"] == "X"]
    found = {event["cat"]: (event["name"], event["ts"] / SECOND, event["dur"] / SECOND) for event in begun}
    assert found["plan"] == ("plan 0-0", 1, 2)
    assert found["compile"] == (f"compile {group[:8]}", 6, 9)
    assert found["verify"] == (f"verify {group[:8]}", 16, 4)
    assert found["finish"] == ("finish p0", 20, 0)
    assert [(name.split()[1], wait / SECOND) for name, wait in waits(events)] == [
        ("plan", 1), ("compile", 3), ("verify", 1), ("finish", 0)
    ]  # fmt: skip
    assert list(process_names(events).values()).count("plan worker planner") == 1
    assert {"compile worker host.1", "compile worker host.2"} <= set(process_names(events).values())
    assert slices(events, "finish")[0]["args"]["problem"] == "p0"
    last = [event for event in events if event["ph"] == "C"][-1]
    assert last["args"] == {"waiting": 0, "working": 0}


def compile_with(
    database: Database, clock: FakeClock, phases: list[dict[str, Any]], seconds: float, lease: Lease | None = None
) -> str:
    """Compile all that is pending in so many seconds, with these phases, unless it is leased; returns the group."""
    lease = lease or take_one(database, "compile", seconds=60.0)
    clock.advance(seconds)
    with database.write() as session:
        group = load_group(session, lease.ref)
        assert group is not None
        outcomes = [BuildOutcome(kernel.build, "ok", "code", {}, library="l") for kernel in kernels_of(group)]
        codegen, compile = StageSeconds(wall=1.0), StageSeconds(wall=seconds - 1)
        record_group(session, lease, outcomes, GroupFiles(phases=phases, codegen=codegen, compile=compile))
    return lease.ref


PHASES = [
    {"name": "render", "seconds": 0.5, "start": 0.5},
    {"name": "cicc", "seconds": 4.0, "start": 1.0},
    {"name": "ptxas", "seconds": 2.0, "start": 5.0, "kernels": [1]},
    {"name": "upload", "seconds": 0.25, "start": 9.0},
]


def test_a_compiles_phases_lie_within_it(database: Database, clock: FakeClock) -> None:
    job = add_job(database)
    plan_next(database, "a", "b")
    clock.advance(7)
    compile_with(database, clock, PHASES, 10)
    events = traced(database, job.id)
    phases = [(event["name"], event["ts"] / SECOND, event["dur"] / SECOND) for event in slices(events, "phase")]
    assert phases == [("render", 7.5, 0.5), ("cicc", 8, 4), ("ptxas", 12, 2), ("upload", 16, 0.25)]
    (compiled,) = slices(events, "compile")
    assert compiled["args"]["phases"] == {"queue": 7, "render": 0.5, "cicc": 4, "ptxas": 2, "upload": 0.25}
    assert compiled["args"]["kernels"] == 2
    assert slices(events, "phase")[2]["args"] == {"seconds": 2.0, "kernels": [1]}


def test_phases_that_reach_out_of_their_compile_are_cut_and_those_without_a_place_only_counted(
    database: Database, clock: FakeClock
) -> None:
    # As another machine's clock, or a row from before phases had starts, would have it.
    job = add_job(database)
    plan_next(database, "a", "b")
    phases = [
        {"name": "cicc", "seconds": 4.0},
        {"name": "ptxas", "seconds": 2.0, "start": -1.0},
        {"name": "host", "seconds": 2.0, "start": 0.5},
        {"name": "link", "seconds": 9.0, "start": 4.0},
    ]
    compile_with(database, clock, phases, 5)
    events = traced(database, job.id)
    assert [(each["name"], each["ts"] / SECOND, each["dur"] / SECOND) for each in slices(events, "phase")] == [
        ("ptxas", 0, 1), ("host", 1, 1.5), ("link", 4, 1)
    ]  # fmt: skip
    assert slices(events, "compile")[0]["args"]["phases"]["cicc"] == 4


def test_the_phases_of_a_file_that_was_compiled_again_follow_each_other(database: Database, clock: FakeClock) -> None:
    job = add_job(database)
    plan_next(database, "a", "b")
    phases: list[dict[str, Any]] = [
        {"name": "nvcc", "seconds": 1.0, "start": 0.0},  # of both, of which the compiler named one
        {"name": "cicc", "seconds": 2.0, "start": 1.0, "kernels": [0]},
        {"name": "ptxas", "seconds": 3.0, "start": 3.0, "kernels": [0]},
        {"name": "upload", "seconds": 1.0, "start": 7.0},
    ]
    compile_with(database, clock, phases, 9)
    spans = slices(traced(database, job.id), "phase")
    assert [(each["ts"] / SECOND, each["name"], each["args"].get("kernels")) for each in spans] == [
        (0, "nvcc", None), (1, "cicc", [0]), (3, "ptxas", [0]), (7, "upload", None)
    ]  # fmt: skip


def test_a_running_job_ends_now_and_says_so(database: Database, clock: FakeClock) -> None:
    job = add_job(database, 2)
    plan_next(database, "a", "b")
    compile_next(database, kernels=1)
    clock.advance(1)
    take_one(database, "compile", worker="w1")
    clock.advance(2)
    events = traced(database, job.id)
    (_, compiling) = slices(events, "compile")
    assert (compiling["dur"], compiling["args"]["open"], compiling["args"]["how"]) == (2 * SECOND, True, "leased")
    assert slices(events, "job")[0]["args"]["open"] is True
    still = [event for event in events if event["ph"] == "b" and event["args"].get("open")]
    assert len(still) == 1 and still[0]["args"]["kind"] == "verify"
    assert ("wait: " + still[0]["name"].removeprefix("wait: "), 3 * SECOND) in waits(events)
    assert [event for event in events if event["ph"] == "C"][-2]["args"] == {"waiting": 1, "working": 1}


def test_a_job_that_has_not_begun_and_one_without_work_have_a_trace(database: Database, clock: FakeClock) -> None:
    waiting = add_job(database)
    with database.write() as session:
        cached = accept.create_jobs(session, [accept.NewJob([new_problem("x", cached=True, winner="c")])])[0]
    clock.advance(5)
    assert waits(traced(database, waiting.id)) == [("wait: plan 0-0", 5 * SECOND)]
    assert names([event for event in traced(database, cached.id) if event["ph"] != "M"]) == [f"job {cached.id}"]


ENDS: dict[str, Any] = {
    "released": lambda session, lease: end_attempt.release(session, lease),
    "failed": lambda session, lease: end_attempt.fail(session, lease, "the disk is full", retry=True),
    "lost": lambda session, lease: end_attempt.expire_leases(session),
}


def end_attempts(database: Database, clock: FakeClock, kind: str) -> list[Lease]:
    """Lease after lease, each after a second and for three, that ends in one of these ways."""
    leases = []
    for worker, end in ENDS.items():
        clock.advance(1)
        leases.append(take_one(database, kind, worker=worker, seconds=2.0))
        clock.advance(3)
        with database.write() as session:
            end(session, leases[-1])
    clock.advance(1)
    return leases


def test_every_attempt_is_there_whatever_became_of_it(database: Database, clock: FakeClock) -> None:
    job = add_job(database)
    plan_next(database, "a")
    compile_next(database)
    end_attempts(database, clock, "verify")
    verify_leased(database, take_one(database, "verify", worker="w4"))
    events = traced(database, job.id)
    spans = slices(events, "verify")
    assert [(each["args"]["how"], each["args"]["attempt"], each["dur"] / SECOND) for each in spans] == [
        ("released", 1, 3), ("failed", 1, 3), ("lost", 2, 3), ("done", 2, 0)
    ]  # fmt: skip
    verifying = [wait for name, wait in waits(events) if "verify" in name]
    assert verifying == [SECOND] * 4, "each waits from the end of the one before"


def test_every_file_that_a_kernel_was_in_is_there_whatever_became_of_it(database: Database, clock: FakeClock) -> None:
    job = add_job(database)
    plan_next(database, "a")
    groups = [lease.ref for lease in end_attempts(database, clock, "compile")]
    last = take_one(database, "compile", worker="w4")
    compile_leased(database, last)
    events = traced(database, job.id)
    spans = slices(events, "compile")
    assert [(each["args"]["how"], each["args"]["attempt"], each["dur"] / SECOND) for each in spans] == [
        ("released", 1, 3), ("failed", 1, 3), ("lost", 1, 3), ("done", 1, 0)
    ]  # fmt: skip
    assert [each["args"]["ref"] for each in spans] == [*groups, last.ref]
    compiling = [wait for name, wait in waits(events) if "compile" in name]
    assert compiling == [SECOND] * 4, "each waits from the end of the one before"
    with database.read() as session:
        report = group_report(session, last.ref)
    assert report is not None and report.phases[0].seconds == 1, "and the group's wait is that of its own builds"


def test_what_was_cancelled_ends_then(database: Database, clock: FakeClock) -> None:
    job = add_job(database)
    plan_next(database, "a", "b")
    compile_next(database, kernels=1)
    take_one(database, "compile", worker="w1")
    clock.advance(2)
    cancel(database, job.id)
    clock.advance(50)
    events = traced(database, job.id)
    assert [(each["args"]["how"], each["dur"]) for each in slices(events, "compile")] == [
        ("done", 0), ("cancelled", 2 * SECOND)
    ]  # fmt: skip
    assert max(wait for _, wait in waits(events)) == 2 * SECOND
    assert slices(events, "job")[0]["dur"] == 2 * SECOND


def test_rounds_of_measuring_and_the_comparison_are_those_of_the_gpus_worker(
    database: Database, clock: FakeClock
) -> None:
    job = add(database, GPU_CLASS).id
    plan_next(database, "a", "b")
    compile_next(database)
    clock.advance(1)
    for _ in range(2):  # a part of the candidates, then the rest
        lease = take_one(database, "measure", worker="gpu.1")
        clock.advance(5)
        measure_leased(database, lease, [measured(to_measure(database, lease)[0])])
        clock.advance(1)
    take_one(database, "compare", worker="gpu.1")
    clock.advance(3)
    events = traced(database, job)
    assert [(each["args"]["how"], each["dur"] / SECOND) for each in slices(events, "measure")] == [("done", 5)] * 2
    assert [each["dur"] / SECOND for each in slices(events, "compare")] == [3]
    assert "gpu worker gpu.1" in process_names(events).values()


def test_work_for_several_jobs_is_in_the_trace_of_each_with_all_of_them(database: Database, clock: FakeClock) -> None:
    first = add_job(database)
    plan_next(database, "a", "b")
    clock.advance(1)
    second = add_job(database)
    plan_next(database, "a")  # it finds that a is still to be made
    clock.advance(1)
    compile_next(database)
    verify_next(database)
    both = sorted([first.id, second.id])
    for job in (first, second):
        events = traced(database, job.id)
        found = [each["args"] for kind in ("compile", "verify") for each in slices(events, kind)]
        assert [sorted(args["jobs"]) for args in found] == [both] * 2
        (plan,) = slices(events, "plan")
        assert "jobs" not in plan["args"]
    clock.advance(10)
    third = add_job(database)
    plan_next(database, "a")  # all is known
    assert slices(traced(database, third.id), "compile") == [], "what was over before it came is not its own"
    fourth = add_job(database)
    plan_next(database, "c")
    compile_next(database)
    (alone,) = slices(traced(database, fourth.id), "compile")
    assert "jobs" not in alone["args"]


def test_overlapping_slices_of_one_worker_get_lanes(database: Database, clock: FakeClock) -> None:
    job = add_job(database)
    plan_next(database, "a", "b")
    leases = [take_one(database, "compile", worker="same", kernels=1) for _ in range(2)]
    clock.advance(2)
    for lease in leases:
        compile_leased(database, lease)
    assert [event["tid"] for event in slices(traced(database, job.id), "compile")] == [1, 2]


def test_what_a_row_remembers_is_bounded(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_tasks, "MAX_PAST", 8)
    add_job(database)
    for _ in range(11):
        lease = take_one(database, "plan")
        with database.write() as session:
            end_attempt.release(session, lease)
    with database.read() as session:
        assert len(session.get_one(TaskRow, lease.task_id).past) == 8


def test_a_trace_takes_as_many_queries_for_many_items_as_for_few(database: Database) -> None:
    counts = []
    for size in (1, 8):
        job = add_job(database, size)
        plan_next(database, *(f"{size}-{n}" for n in range(size)))
        for _ in range(size):
            compile_next(database, kernels=1)
        with counted_statements(database) as seen:
            traced(database, job.id)
        counts.append(len(seen))
    assert counts[0] == counts[1]


# ---- phases of groups


def test_a_files_phases_are_shared_among_its_kernels_as_predicted_and_called_attributed(
    database: Database, clock: FakeClock
) -> None:
    add_job(database)
    plan_predicted(database, a=3.0, b=1.0)
    clock.advance(2)
    group = compile_with(database, clock, PHASES, 10)
    with database.read() as session:
        report = group_report(session, group)
    assert report is not None
    first, second = report.kernels
    assert first.seconds is not None and second.seconds is not None
    assert first.seconds.attributed is True and first.predicted_seconds == 3
    assert first.seconds.phases == {"render": 0.375, "cicc": 3.0, "upload": 0.1875}
    assert second.seconds.phases == {"render": 0.125, "cicc": 1.0, "ptxas": 2.0, "upload": 0.0625}
    queue = report.phases[0]
    assert (queue.name, queue.seconds, queue.start) == ("queue", 2, -2)
    assert report.codegen.wall == 1


def test_kernels_of_which_nothing_was_predicted_share_alike(database: Database, clock: FakeClock) -> None:
    add_job(database)
    plan_next(database, "a", "b")
    lease = take_one(database, "compile", seconds=60.0)
    with database.read() as session:
        begun = group_report(session, lease.ref)
    assert begun is not None and [kernel.seconds for kernel in begun.kernels] == [None, None]
    compile_with(database, clock, PHASES[:2], 10, lease)
    with database.read() as session:
        report = group_report(session, lease.ref)
    assert report is not None
    assert [kernel.seconds.phases["cicc"] for kernel in report.kernels if kernel.seconds] == [2.0, 2.0]


def test_timings_have_the_phases_and_the_wait_of_all_work(database: Database, clock: FakeClock) -> None:
    job = add_job(database, 2)
    clock.advance(1)
    plan_next(database, "a", "b")
    clock.advance(2)
    compile_with(database, clock, [*PHASES, {"name": "fatbinary", "seconds": 0.5, "start": 9.5}], 10)
    clock.advance(4)
    verify_next(database)
    with database.read() as session:
        (by_job,) = timings(session, "job").timings
        (by_operator,) = timings(session, "operator").timings
    assert by_job.job == job.id
    assert by_job.phases == by_operator.phases
    assert {phase: seconds for phase, seconds in by_job.phases.items() if seconds} == pytest.approx(
        {"queue": 1 + 2 + 4, "render": 0.5, "cicc": 4, "ptxas": 2, "upload": 0.25, "nvcc": 0.5}
    )


# ---- over HTTP


def test_the_trace_is_answered_over_http(api: Api) -> None:
    job = api.submit(MATMUL).json()["job"]
    plan_next(api.database, "a")
    compile_next(api.database)
    answer = api.client.get(f"/v1/jobs/{job}/trace")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["otherData"]["job"] == job
    assert [event["cat"] for event in checked(answer.json()) if event["ph"] == "X"] == ["job", "plan", "compile"]
    with Client(api.url) as client:
        assert client.trace(job)["otherData"] == answer.json()["otherData"]
        with pytest.raises(NotFound):
            client.trace("0" * 32)
    rows = Timings.model_validate_json(api.client.get("/v1/timings", params={"by": "job"}).content).timings
    assert rows[0].phases["cicc"] == 1.5


@pytest.mark.parametrize("path", ["/v1/jobs/nothing/trace", f"/v1/jobs/{'0' * 32}/trace"])
def test_a_job_that_is_not_there_has_no_trace(api: Api, path: str) -> None:
    answer = api.client.get(path)
    assert (answer.status_code, answer.json()["type"].rpartition(":")[2]) == (404, "job-not-found")
