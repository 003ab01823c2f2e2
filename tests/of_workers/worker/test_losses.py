"""Work that is lost again and again, in every step: it is tried alone, skipped in the end, and nothing is remembered of
it; the rest comes to its end."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from sqlalchemy import select

from codegen.kernel import Kernel
from cukiln.types import Job
from storage.database.tables import BuildRow, TaskRow, VerdictRow
from storage.queue import losses
from tests.support.fixtures.gpu_line import DEVICE, GpuLine, probe, search
from workers.processes.processes import InfrastructureError

FIVE = search(factor=[1, 2, 3, 4, 5])
POISON = 3  # its factor
PREDICTED = "predicted:sm_80"
KILLED = InfrastructureError("it was killed by SIGKILL")
STALLED = InfrastructureError("nvcc got less than 50% of a core in 300.0 s", stalled=True)


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "pause_after", lambda many: 0.0)


@pytest.fixture
def deadly(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[int]]]:
    """Have a function of a step fail as the machine does whenever the poison is among its kernels; what it was given,
    by factor."""

    def deadly(module: str, name: str, error: InfrastructureError = KILLED) -> list[list[int]]:
        step = import_module(module)
        works = getattr(step, name)
        given: list[list[int]] = []

        def fails(kernels: list[Kernel], *rest: Any, **options: Any) -> Any:
            given.append(sorted(kernel.to_json()["tunables"]["factor"] for kernel in kernels))
            if POISON in given[-1]:
                raise error
            return works(kernels, *rest, **options)

        monkeypatch.setattr(step, name, fails)
        return given

    return deadly


def run(line: GpuLine, device_class: str) -> Job:
    job = line.submit((probe(), FIVE), (probe(n=77), search(factor=[1, 2])), device_class=device_class)
    line.run()
    while line.clear():
        line.run()
    return line.report(job)


def assert_only_the_poison_is_skipped(line: GpuLine, job: Job) -> None:
    assert job.state == "partial"
    assert [problem.state for problem in job.problems] == ["done", "done"]
    assert [problem.verdicts for problem in job.problems] == [{"ok": 4, "skipped": 1}, {"ok": 2}]
    (skipped,) = [candidate for candidate in line.candidates(job.job) if candidate.verdict == "skipped"]
    assert skipped.schedule["factor"] == POISON
    assert skipped.message is not None and skipped.message.startswith("lost again and again, in the end alone")
    assert job.problems[0].error == skipped.message
    assert job.error == f"candidates were skipped; the first, p0: {skipped.message}"
    with line.world.database.read() as session:
        assert {row.verdict for row in session.scalars(select(VerdictRow))} <= {"ok"}
        assert {row.state for row in session.scalars(select(BuildRow))} == {"ok"}


def test_a_kernel_that_its_compilers_never_survive(
    gpu_line: GpuLine,
    deadly: Callable[..., list[list[int]]],
) -> None:
    given = deadly("workers.steps.compile", "compile_group")
    job = run(gpu_line, PREDICTED)
    assert_only_the_poison_is_skipped(gpu_line, job)
    assert given[: losses.TOGETHER] == [[1, 2, 3, 4, 5]] * losses.TOGETHER
    assert {len(kernels) for kernels in given[losses.TOGETHER :]} == {1}
    assert given.count([POISON]) == losses.ALONE


def test_a_kernel_that_its_verification_never_survives(
    gpu_line: GpuLine,
    deadly: Callable[..., list[list[int]]],
) -> None:
    given = deadly("workers.steps.verify", "verify_on_cpu")
    job = run(gpu_line, PREDICTED)
    assert_only_the_poison_is_skipped(gpu_line, job)
    assert given.count([POISON]) == losses.ALONE
    assert max(map(len, given[losses.TOGETHER :])) == 1, "after losses one at a time"


@pytest.mark.parametrize(
    ("module", "name"),
    [("workers.steps.compile", "compile_group"), ("workers.steps.verify", "verify_on_cpu")],
)
def test_a_tool_that_sleeps_takes_two_wall_limits_of_its_kernel(
    gpu_line: GpuLine, deadly: Callable[..., list[list[int]]], module: str, name: str
) -> None:
    given = deadly(module, name, STALLED)
    job = run(gpu_line, PREDICTED)
    assert [kernels for kernels in given if POISON in kernels] == [[1, 2, 3, 4, 5], [POISON]]
    assert (job.state, job.problems[0].verdicts) == ("partial", {"ok": 4, "skipped": 1})


def test_a_wall_limit_that_was_slept_through_counts_less_while_other_work_is_lost(gpu_line: GpuLine) -> None:
    database = gpu_line.world.database
    with database.write() as session:
        alone = losses.weight(session, 0.0, stalled=True), losses.weight(session, 0.0)
        now = database.clock.now()
        lost = {"kind": "compile", "target": "sm_80", "state": "lost", "attempt": 0, "created_at": now}
        session.add_all(TaskRow(ref=str(number), finished_at=now, **lost) for number in range(losses.OTHERS + 1))
        session.flush()
        beside = losses.weight(session, 0.0, stalled=True), losses.weight(session, 0.0)
    assert (alone, beside) == ((losses.STALL, 1.0), (1.0, losses.GENERAL_SHARE))


def test_a_candidate_that_its_measuring_never_survives(gpu_line: GpuLine) -> None:
    def killed(candidate: Any, _: Any) -> None:
        if candidate.schedule["factor"] == POISON:
            raise KILLED

    gpu_line.gpu.before = killed
    job = run(gpu_line, DEVICE.name)
    assert_only_the_poison_is_skipped(gpu_line, job)


def test_a_problem_whose_lowering_never_survives_fails_and_the_others_are_done(
    gpu_line: GpuLine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = import_module("workers.steps.plan")
    lower = step.lower_problem
    given: list[str] = []

    def fails(context: Any, problem: Any, *rest: Any) -> Any:
        given.append(problem.name)
        if problem.name == "p1":
            raise KILLED
        return lower(context, problem, *rest)

    monkeypatch.setattr(step, "lower_problem", fails)
    job = gpu_line.job(*((probe(n=n), search(factor=[1])) for n in (10, 20, 30)))
    assert [problem.state for problem in job.problems] == ["done", "failed", "done"]
    assert str(job.problems[1].error).startswith("lost again and again")
    assert (job.state, given.count("p1")) == ("partial", losses.MOST)


def test_what_was_skipped_is_tried_anew_when_it_is_sent_again(
    gpu_line: GpuLine,
    monkeypatch: pytest.MonkeyPatch,
    deadly: Callable[..., list[list[int]]],
) -> None:
    with monkeypatch.context() as poisoned:
        step = import_module("workers.steps.verify")
        poisoned.setattr(step, "verify_on_cpu", step.verify_on_cpu)  # undone at the end, with what replaces it
        deadly("workers.steps.verify", "verify_on_cpu")
        assert run(gpu_line, PREDICTED).state == "partial"
    job = run(gpu_line, PREDICTED)
    assert [problem.verdicts for problem in job.problems] == [{"ok": 5}, {"ok": 2}]
    assert job.state == "done"


@pytest.mark.parametrize(
    ("stage", "verdict", "table"), [("compile", "compile_timeout", BuildRow), ("verify", "compile_error", VerdictRow)]
)
def test_what_a_limit_ended_is_remembered_with_it_and_tried_again_under_a_larger_one(
    gpu_line: GpuLine,
    stage: str,
    verdict: str,
    table: type[BuildRow | VerdictRow],
) -> None:
    def under(cpu_seconds: float) -> tuple[dict[str, int], list[Any]]:
        settings = gpu_line.world.settings.model_copy(update={f"{stage}_cpu_seconds": cpu_seconds})
        gpu_line.workplace.settings = settings
        job = gpu_line.submit((probe(), search(factor=[1])), device_class=PREDICTED)
        gpu_line.run()
        while gpu_line.clear():
            gpu_line.run()
        with gpu_line.world.database.read() as session:
            rows = session.scalars(select(table)).all()
            reached = [row.reached if isinstance(row, BuildRow) else row.details.get("limit") for row in rows]
        return dict(gpu_line.report(job).problems[0].verdicts), reached

    assert under(0.01) == ({verdict: 1}, [{"cpu": 0.01}])
    compiled = len(gpu_line.done)
    assert under(0.01) == ({verdict: 1}, [{"cpu": 0.01}])
    assert [lease.kind for lease in gpu_line.done[compiled:]] == ["plan", "finish"], "known, so it is not done again"
    assert under(600.0) == ({"ok": 1}, [None])
