"""Where a job asks for it, every candidate is run from its PTX before one wins, and the job says what it took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlalchemy import select, update

from cukiln.cli.table import summary
from cukiln.types import CandidateReport, Job
from storage.database.session import Clock
from storage.database.tables import BuildRow, GroupRow
from storage.reports.candidates import candidate_page
from tests.support.fixtures.line import Line
from workers.cpu import ptx
from workers.steps import STEPS, run_ptx
from workers.steps.context import Cancel, StepContext
from workers.worker.run_task import run_step

KERNELS = {"way": ["copy"], "slices": [1]}


def search(*faults: str, factors: int = 1) -> dict[str, object]:
    return {"tunables": {**KERNELS, "factor": list(range(1, factors + 1)), "fault": list(faults)}}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, bool]]]:
    """An entry for each run from PTX: of how many kernels, and whether from what is stored."""
    seen: list[tuple[int, bool]] = []
    real = ptx.verify_ptx

    def counted(kernels, *arguments, ptx=None, **options):  # type: ignore[no-untyped-def]
        seen.append((len(kernels), ptx is not None))
        return real(kernels, *arguments, ptx=ptx, **options)

    monkeypatch.setattr(ptx, "verify_ptx", counted)
    yield seen


def reports(line: Line, job: Job) -> list[CandidateReport]:
    with line.world.database.read() as session:
        page = candidate_page(session, job.job)
    assert page is not None
    return page.candidates


def marks(line: Line, job: Job) -> dict[tuple[str, int], str | None]:
    """What the PTX of each candidate showed, by fault and factor."""
    return {
        (str(of.schedule["fault"]), int(of.schedule["factor"])): of.ptx.verdict if of.ptx else None
        for of in reports(line, job)
    }


def test_a_job_runs_its_winners_alone_unless_it_asks_for_all(line: Line, runs: list[tuple[int, bool]]) -> None:
    job = line.job(search("none", factors=3))
    assert (job.ptx, job.problems[0].ptx, runs) == ("winners", None, [(1, True)])
    assert set(marks(line, job).values()) == {None}
    assert "ptx" not in line.record().searches[0]
    assert "From their PTX" not in summary(job, 1.0)


def test_every_candidate_is_run_from_the_ptx_of_its_file_and_the_job_says_what_it_took(
    line: Line, runs: list[tuple[int, bool]]
) -> None:
    job = line.job(search("none", "unknown", "asm_sum", factors=2), ptx="all")
    assert job.ptx == "all" and job.state == "done"
    assert runs[0] == (6, True)
    assert marks(line, job) == {
        **{("none", factor): "ok" for factor in (1, 2)},
        **{("unknown", factor): "untranslated" for factor in (1, 2)},
        **{("asm_sum", factor): None for factor in (1, 2)},
    }
    for of in reports(line, job):
        wrong = of.schedule["fault"] == "asm_sum"
        assert of.verdict == ("incorrect" if wrong else "ok")
        assert wrong == ("run from its PTX on the CPU: " in str(of.message))
        if of.ptx is not None:
            assert (of.ptx.cpu_seconds > 0) == (of.ptx.message is None) == (of.ptx.verdict == "ok")
    [problem] = job.problems
    assert problem.verdicts == {"ok": 4, "incorrect": 2}
    assert problem.ptx is not None and problem.ptx.kernels == {"ok": 2, "untranslated": 2, "incorrect": 2}
    assert 0 < problem.ptx.cpu_seconds <= problem.seconds.verify.cpu
    assert f"From their PTX: 6 kernels (2 ok, 2 incorrect, 2 untranslated), {problem.ptx.cpu_seconds:.1f} CPU s." in (
        summary(job, 1.0)
    )
    assert line.record().searches[0]["ptx"] == "all"
    # Another problem with the same kernels runs none of them again.
    runs.clear()
    other = replace(line, problem=type(line.problem).model_validate({**line.problem.canonical(), "n": 2000}))
    again = other.job(search("none", "unknown", "asm_sum", factors=2), ptx="all").problems[0]
    assert (runs, again.verdicts) == ([], problem.verdicts)
    assert again.ptx is not None and (again.ptx.kernels, again.ptx.cpu_seconds) == (problem.ptx.kernels, 0.0)


def test_a_wrong_candidate_is_named_with_its_line_though_it_would_not_have_won(line: Line) -> None:
    job = line.job(search("asm", factors=1), ptx="all")
    assert job.state == "failed"
    [of] = reports(line, job)
    assert of.verdict == "runtime_error" and "[line " in str(of.message) and "probe/steps.cuh:" in str(of.message)
    assert "run from its PTX on the CPU: " in str(job.problems[0].error)


def test_where_the_ptx_of_a_file_is_lost_nvcc_is_asked_again(line: Line, runs: list[tuple[int, bool]]) -> None:
    line.job(search("none", factors=2))
    with line.world.database.write() as session:
        session.execute(update(GroupRow).values(ptx=None))
    runs.clear()
    job = line.job(search("none", factors=2), ptx="all")
    assert (runs[0], set(marks(line, job).values())) == ((2, False), {"ok"})


class Later(Clock):
    """100 seconds on."""

    def now(self) -> float:
        return super().now() + 100.0


def test_a_spent_budget_leaves_the_rest_and_the_search_undone(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    real, database = ptx.verify_ptx, line.world.database

    def takes_long(*arguments, **options):  # type: ignore[no-untyped-def]
        verdicts = real(*arguments, **options)
        monkeypatch.setattr(database, "clock", Later())
        return verdicts

    monkeypatch.setattr(run_ptx, "AT_ONCE", 1)
    monkeypatch.setattr(ptx, "verify_ptx", takes_long)
    job = line.job(search("none", factors=3), ptx="all", budget_seconds=50.0)
    assert job.state == "done"
    assert sorted(map(str, marks(line, job).values())) == ["None", "None", "ok"]
    assert job.problems[0].ptx is not None and job.problems[0].ptx.kernels == {"ok": 1}
    assert "ptx" not in line.record().searches[0]


def test_verdicts_of_an_older_plan_are_not_counted_as_the_jobs_own(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    line.job(search("none", factors=2), ptx="all")
    with line.world.database.write() as session:
        for id, verdict in session.execute(select(BuildRow.id, BuildRow.ptx_verdict)).all():
            older = {**verdict, "plan_version": "older"}
            session.execute(update(BuildRow).where(BuildRow.id == id).values(ptx_verdict=older))
    created = line.submit(search("none", factors=2), ptx="all", budget_seconds=50.0)
    while (lease := line.lease(*STEPS)) is not None:
        if lease.kind == "finish":
            assert line.report(created).problems[0].ptx.kernels == {}  # type: ignore[union-attr]
            monkeypatch.setattr(line.world.database, "clock", Later())
        run_step(StepContext(line.workplace, lease, Cancel()), STEPS)
    job = line.report(created)
    assert job.state == "done" and set(marks(line, job).values()) == {None}
    assert job.problems[0].ptx is not None and job.problems[0].ptx.kernels == {}
    assert "From their PTX" not in summary(job, 1.0)


def test_between_two_parts_another_jobs_turn_comes_first_and_nothing_is_run_twice(
    line: Line, monkeypatch: pytest.MonkeyPatch, runs: list[tuple[int, bool]]
) -> None:
    counted, urgent = ptx.verify_ptx, list[str]()

    def while_another_job_comes(*arguments, **options):  # type: ignore[no-untyped-def]
        if not urgent:
            urgent.append(line.submit(search("none", factors=4), priority="high"))
            lease = line.lease("plan")
            assert lease is not None
            run_step(StepContext(line.workplace, lease, Cancel()), STEPS)
        return counted(*arguments, **options)

    monkeypatch.setattr(run_ptx, "AT_ONCE", 1)
    monkeypatch.setattr(ptx, "verify_ptx", while_another_job_comes)
    created, finished = line.submit(search("none", factors=3), ptx="all"), list[str]()
    while (lease := line.lease(*STEPS)) is not None:
        finished += lease.jobs if lease.kind == "finish" else ()
        run_step(StepContext(line.workplace, lease, Cancel()), STEPS)
        if finished == [created]:
            assert [problem.ptx.kernels for problem in line.report(created).problems if problem.ptx] == [{"ok": 1}]
            spent = line.report(created).problems[0].seconds.verify.cpu
    assert finished == [created, *urgent, created]
    job = line.report(created)
    assert job.state == "done" and job.problems[0].ptx is not None and job.problems[0].ptx.kernels == {"ok": 3}
    assert [count for count, _ in runs] == [1] * 4, "three candidates, and the winner of both jobs"
    assert job.problems[0].ptx.cpu_seconds > 0 and job.problems[0].seconds.verify.cpu > spent
