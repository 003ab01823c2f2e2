"""The measure step: what it asks the GPU for, what it keeps of the answers, and what becomes of the rest."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from sqlalchemy import select

from storage.database.tables import JobProblemRow
from storage.entities.heartbeats import drained_reason, live_devices
from storage.queue import losses
from storage.transitions import end_jobs
from tests.support.fixtures.gpu_line import DEVICE, VENDOR, GpuLine, probe, search
from tests.support.fixtures.storage import end_budgets
from tests.support.run.fake_clock import FakeClock
from workers.gpu.measure_on_gpu import GpuGone, Outcome
from workers.gpu.task import GpuTask
from workers.processes.processes import InfrastructureError
from workers.steps import STEPS
from workers.steps.compile import WrongToolchain
from workers.steps.context import Cancel, StepContext

engine = import_module("workers.gpu.engine")
step = import_module("workers.steps.measure")  # the package has its function under the same name
THREE = search(factor=[1, 2, 3])


def kinds(line: GpuLine) -> list[str]:
    return [lease.kind for lease in line.done]


def test_a_problem_on_a_gpu_is_verified_and_measured_there_and_never_on_the_cpu(gpu_line: GpuLine) -> None:
    job = gpu_line.job((probe(), THREE))
    assert job.state == "done"
    assert kinds(gpu_line) == ["plan", "compile", "measure", "compare", "finish"]
    winner = job.problems[0].winner
    assert winner is not None
    assert (winner.verified, winner.ranked_by, winner.measured_us) == ("gpu", "measured", 101.0)
    assert winner.schedule["factor"] == 1
    candidates = gpu_line.candidates(job.job)
    assert [(one.verdict, one.measured_us) for one in sorted(candidates, key=lambda each: each.schedule["factor"])] == [
        ("ok", 101.0), ("ok", 102.0), ("ok", 103.0)
    ]  # fmt: skip
    record = gpu_line.record(probe())
    assert record.vendor is not None and record.vendor.median_us == VENDOR["median_us"]
    assert record.front[0].verdict["venue"] == "gpu"
    with gpu_line.world.database.read() as session:
        [seconds] = session.scalars(select(JobProblemRow.seconds)).all()
    assert seconds["ptx"]["wall"] > 0  # of the winner's PTX, beside the GPU's
    assert job.problems[0].seconds.verify.wall == pytest.approx(3 * 0.25 + seconds["ptx"]["wall"])
    assert job.problems[0].seconds.measure.wall == pytest.approx(3 * 0.5 + 1.0)


def test_a_task_says_all_that_the_child_needs(gpu_line: GpuLine) -> None:
    gpu_line.job((probe(), THREE))
    task = gpu_line.gpu.tasks[0]
    settings = gpu_line.world.settings
    assert (task.kind, task.gpu, task.device) == ("measure", settings.gpu_module, DEVICE.uuid)
    assert task.lease == str(settings.gpu_lock_dir / f"{DEVICE.uuid}.lock")
    assert list(task.problems.values()) == [probe().canonical()]
    assert task.operators.keys() == {"probe"}
    assert task.seconds == settings.measure_seconds
    assert len({candidate.library for candidate in task.candidates}) == 1
    assert not any(candidate.verified for candidate in task.candidates)


def test_all_problems_of_a_group_are_one_task_and_every_task_has_its_own_seed(gpu_line: GpuLine) -> None:
    gpu_line.job((probe(64), THREE), (probe(96), THREE))
    measuring = [task for task in gpu_line.gpu.tasks if task.kind == "measure"]
    assert len(measuring) == 1
    first, second = measuring[0].problems
    assert [candidate.problem for candidate in measuring[0].candidates] == [first] * 3 + [second] * 3
    assert len({task.seed for task in gpu_line.gpu.tasks}) == 3


def test_a_candidate_that_the_gpu_finds_wrong_loses_with_its_message(gpu_line: GpuLine) -> None:
    gpu_line.gpu.alone = lambda schedule: {"atomic": 100.0, "copy": 200.0}[schedule["way"]]
    gpu_line.gpu.wrong = lambda kind, schedule: schedule["way"] == "atomic"
    job = gpu_line.job((probe(), search(way=["copy", "atomic"])))
    assert job.problems[0].winner is not None
    assert job.problems[0].winner.schedule["way"] == "copy"
    wrong = next(candidate for candidate in gpu_line.candidates(job.job) if candidate.verdict == "incorrect")
    assert (wrong.schedule["way"], wrong.message) == ("atomic", "3 of 9 elements are wrong")
    assert wrong.measured_us is None


def test_a_larger_search_measures_only_what_is_new_and_keeps_the_best_time_so_far(gpu_line: GpuLine) -> None:
    gpu_line.job((probe(), search(factor=[1, 2])))
    first = gpu_line.gpu.measured()
    job = gpu_line.job((probe(), THREE))
    assert job.problems[0].verdicts == {"ok": 3}
    assert len(gpu_line.gpu.measured()) == 3
    assert len(set(gpu_line.gpu.measured())) == 3
    second = [task for task in gpu_line.gpu.tasks if task.kind == "measure"][-1]
    assert second.best_us == {next(iter(second.problems)): 101.0}
    assert {candidate.candidate for candidate in second.candidates}.isdisjoint(first)


def test_a_group_with_many_candidates_is_measured_part_by_part(
    gpu_line: GpuLine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step, "MOST_CANDIDATES", 2)
    job = gpu_line.job((probe(), search(factor=[1, 2, 3, 4, 5])))
    assert job.problems[0].verdicts == {"ok": 5}
    assert kinds(gpu_line) == ["plan", "compile", "measure", "measure", "measure", "compare", "finish"]
    assert len(gpu_line.gpu.measured()) == len(set(gpu_line.gpu.measured())) == 5
    assert {lease.attempt for lease in gpu_line.done} == {1}


# ---- what may fail


@pytest.mark.parametrize("damage", ["gone", "damaged"])
def test_what_waits_for_a_lost_library_is_skipped_and_compiled_by_the_next_job(
    damage: str,
    gpu_line: GpuLine,
) -> None:
    job = gpu_line.submit((probe(), THREE))
    gpu_line.run(["plan", "compile"])
    digest = library_of(gpu_line)
    path = gpu_line.blobs.path(digest)
    assert path is not None
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"\0" * path.stat().st_size)
    gpu_line.run()
    assert gpu_line.gpu.tasks == []
    assert gpu_line.report(job).problems[0].verdicts == {"skipped": 3}
    assert f"sha256:{digest}" in str(gpu_line.candidates(job)[0].message)
    again = gpu_line.job((probe(), THREE))
    assert again.state == "done"
    assert again.problems[0].verdicts == {"ok": 3}


def library_of(line: GpuLine) -> str:
    from storage.entities.groups import load_group

    ref = next(lease.ref for lease in line.done if lease.kind == "compile")
    with line.world.database.read() as session:
        group = load_group(session, ref)
    assert group is not None and group.library is not None
    return group.library


def after(count: int, error: Exception) -> Any:
    """Raise it before the candidate that follows `count` others; once."""
    seen: list[str] = []

    def before(candidate: Any, cancel: Any) -> None:
        seen.append(candidate.candidate)
        if len(seen) == count + 1:
            raise error

    return before


@pytest.mark.parametrize("before", [0, 2])
def test_a_gpu_that_is_gone_is_drained_and_the_task_waits_uncounted_with_what_came_kept(
    before: int,
    gpu_line: GpuLine,
) -> None:
    job = gpu_line.submit((probe(), THREE))
    gpu_line.run(["plan", "compile"])
    gpu_line.gpu.before = after(before, GpuGone("the GPU does not answer"))
    gpu_line.run(["measure"], most=1)
    with gpu_line.world.database.read() as session:
        assert drained_reason(session, DEVICE.uuid) == "the GPU does not answer"
        assert live_devices(session, 60.0) == []
    verdicts = [candidate.verdict for candidate in gpu_line.candidates(job)]
    assert verdicts.count("ok") == before
    lease = gpu_line.take(["measure"])
    assert lease is not None
    assert lease.attempt == 1
    gpu_line.do(lease)
    gpu_line.run()
    assert gpu_line.report(job).problems[0].verdicts == {"ok": 3}
    assert len(gpu_line.gpu.tasks[1].candidates) == 3 - before


def test_a_machine_that_fails_is_tried_again_without_what_was_done(
    gpu_line: GpuLine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(losses, "pause_after", lambda many: 0.0)
    gpu_line.gpu.before = after(1, InfrastructureError("No space left on device"))
    job = gpu_line.job((probe(), THREE))
    assert job.problems[0].verdicts == {"ok": 3}
    assert [len(task.candidates) for task in gpu_line.gpu.tasks] == [3, 2, 3]


def test_a_stopping_worker_keeps_what_it_has_measured(gpu_line: GpuLine) -> None:
    job = gpu_line.submit((probe(), THREE))
    gpu_line.run(["plan", "compile"])
    lease = gpu_line.take(["measure"])
    assert lease is not None
    cancel = Cancel()
    seen: list[str] = []

    def stop(candidate: Any, _: Any) -> None:
        seen.append(candidate.candidate)
        if len(seen) == 3:
            cancel.because("stopping")

    gpu_line.gpu.before = stop
    gpu_line.do(lease, cancel)
    assert [candidate.verdict for candidate in gpu_line.candidates(job)].count("ok") == 2
    gpu_line.run()
    assert [len(task.candidates) for task in gpu_line.gpu.tasks[:2]] == [3, 1]
    assert gpu_line.report(job).state == "done"


def test_an_attempt_that_lost_its_task_writes_nothing(gpu_line: GpuLine) -> None:
    job = gpu_line.submit((probe(), THREE))
    gpu_line.run(["plan", "compile"])
    lease = gpu_line.take(["measure"])
    assert lease is not None
    cancel = Cancel()
    gpu_line.gpu.before = lambda candidate, _: cancel.because("lost") if candidate else None
    gpu_line.do(lease, cancel)
    assert {candidate.verdict for candidate in gpu_line.candidates(job)} == {None}


def test_a_cancelled_job_is_measured_no_more(gpu_line: GpuLine) -> None:
    job = gpu_line.submit((probe(), THREE))
    gpu_line.run(["plan", "compile"])
    with gpu_line.world.database.write() as session:
        end_jobs.cancel_job(session, job)
    gpu_line.run()
    assert gpu_line.gpu.tasks == []
    assert gpu_line.report(job).state == "cancelled"


# ---- a budget that ends


def slow(line: GpuLine, clock: FakeClock, seconds: float, also: Callable[[int], None] = lambda number: None) -> None:
    """Each candidate takes so long; `also` is called after each, with its number."""
    count = itertools.count(1)

    def before(candidate: Any, cancel: Any) -> None:
        clock.advance(seconds)
        also(next(count))

    line.gpu.before = before


def with_clock(line: GpuLine) -> FakeClock:
    line.world.database.clock = clock = FakeClock()
    line.register()
    return clock


def test_a_budget_that_ends_keeps_what_was_measured_by_then(gpu_line: GpuLine) -> None:
    clock = with_clock(gpu_line)
    job = gpu_line.submit((probe(), search(factor=[1, 2, 3, 4, 5, 6])), budget=60.0)
    gpu_line.run(["plan", "compile"])
    slow(gpu_line, clock, 14.8)  # the fourth would end less than a second before the budget does
    gpu_line.run(["measure"], most=1)
    assert [candidate.verdict for candidate in gpu_line.candidates(job)].count("ok") == 3
    assert gpu_line.report(job).state == "running"
    clock.advance(1.0)
    gpu_line.run()  # no worker takes up the rest
    assert len(gpu_line.gpu.tasks) == 1
    assert end_budgets(gpu_line.world.database) == [job]
    gpu_line.run()
    ended = gpu_line.report(job)
    assert (ended.state, ended.problems[0].verdicts) == ("done", {"ok": 3, "skipped": 3})
    assert ended.problems[0].winner is not None and ended.problems[0].winner.ranked_by == "measured"


def test_what_was_measured_for_a_budget_that_has_been_ended_is_kept_for_the_next_job(gpu_line: GpuLine) -> None:
    clock = with_clock(gpu_line)
    job = gpu_line.submit((probe(), THREE), budget=60.0)
    gpu_line.run(["plan", "compile"])
    lease = gpu_line.take(["measure"])
    assert lease is not None
    cancel = Cancel()

    def reconcile(number: int) -> None:
        if number == 3:
            clock.advance(60.0)
            end_budgets(gpu_line.world.database)
            cancel.because("cancelled")

    slow(gpu_line, clock, 1.0, reconcile)
    gpu_line.do(lease, cancel)
    assert gpu_line.report(job).problems[0].verdicts == {"skipped": 3}
    gpu_line.gpu.before = lambda candidate, cancel: None
    gpu_line.register()
    again = gpu_line.job((probe(), THREE))
    assert again.problems[0].verdicts == {"ok": 3}
    assert [len(task.candidates) for task in gpu_line.gpu.tasks if task.kind == "measure"] == [3, 1]


def test_a_task_whose_job_has_spent_its_budget_is_at_once_anothers(gpu_line: GpuLine) -> None:
    clock = with_clock(gpu_line)
    gpu_line.submit((probe(), THREE), budget=60.0)
    gpu_line.run(["plan"])
    heir = gpu_line.submit((probe(), THREE))
    gpu_line.run(["plan", "compile"])
    lease = gpu_line.take(["measure"])
    assert lease is not None and heir in lease.jobs
    cancel = Cancel()
    slow(gpu_line, clock, 61.0, lambda number: cancel.because("deadline"))
    gpu_line.do(lease, cancel)
    gpu_line.gpu.before = lambda candidate, cancel: None
    end_budgets(gpu_line.world.database)
    again = gpu_line.take(["measure"])
    assert again is not None
    assert (again.task_id, again.attempt, again.jobs) == (lease.task_id, 1, (heir,))
    gpu_line.do(again)
    assert gpu_line.report(heir).problems[0].verdicts == {"ok": 3}


def test_attempts_that_find_nothing_are_as_many_as_the_settings_say(
    gpu_line: GpuLine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(task: GpuTask, *_: Any, **__: Any) -> Outcome:
        gpu_line.gpu.tasks.append(task)
        return Outcome(DEVICE, [], {}, 1.0, 1.0)

    monkeypatch.setattr(engine, "run_gpu_task", nothing)
    monkeypatch.setattr(gpu_line.workplace, "settings", gpu_line.world.settings.model_copy(update={"max_attempts": 2}))
    job = gpu_line.job((probe(), THREE))
    assert len(gpu_line.gpu.tasks) == 2
    assert job.problems[0].verdicts == {"skipped": 3}


def test_a_worker_with_another_compiler_leaves_a_group(gpu_line: GpuLine) -> None:
    gpu_line.submit((probe(), THREE))
    gpu_line.run(["plan"])
    own = gpu_line.workplace.toolchain
    lease = gpu_line.take(["compile"])
    assert lease is not None
    gpu_line.workplace.__dict__["toolchain"] = replace(own, versions=(("nvcc", "0.0.1"),))
    with pytest.raises(WrongToolchain, match=f"planned for toolchain {own.digest}"):
        STEPS["compile"](StepContext(gpu_line.workplace, lease, Cancel()))
