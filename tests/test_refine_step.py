"""The refine step and what leads to it: all candidates are compiled fast and judged, the best then compiled in full."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from sqlalchemy import select

from cukiln.types import CandidateReport
from storage import items, jobs
from storage.candidate_facts import candidate_facts
from storage.clock import FakeClock
from storage.rows import core
from storage.searches import is_covered, search_entry
from storage.tables import BuildRow, CandidateRow, JobProblemRow
from storage.winners import get_winners
from tests.fixtures_gpu_line import DEVICE, GpuLine, gpu_line, probe, search  # noqa: F401
from tests.fixtures_queue import queue_world, valkey  # noqa: F401
from tests.fixtures_storage import end_budgets
from workers.compile_group import compile_group
from workers.steps import STEPS
from workers.steps.context import Cancel, StepContext

ON_CPU = "predicted:sm_80"
FACTORS = list(range(1, 9))
EIGHT = {**search(factor=FACTORS), "screening": 2}


@pytest.fixture
def line(gpu_line: GpuLine) -> Iterator[GpuLine]:  # noqa: F811
    return gpu_line


def kinds(line: GpuLine) -> list[str]:
    return [claim.kind for claim in line.done]


def screened(line: GpuLine, job: str) -> dict[int, bool]:
    """By factor."""
    return {int(one.schedule["factor"]): one.screening for one in line.candidates(job)}


def builds(line: GpuLine) -> dict[str, list[int]]:
    """The toolchains' builds: factors by digest."""
    found: dict[str, list[int]] = {}
    with line.world.database.read() as session:
        rows = session.execute(
            select(BuildRow.toolchain, CandidateRow.schedule)
            .join(CandidateRow, BuildRow.id.in_([CandidateRow.build, CandidateRow.screening_build]))
            .distinct()
        )
        for toolchain, schedule in rows:
            found.setdefault(toolchain, []).append(schedule["factor"])
    return {toolchain: sorted(set(factors)) for toolchain, factors in found.items()}


def toolchains(line: GpuLine) -> tuple[str, str]:
    own = line.workplace.toolchain
    return own.digest, own.for_screening().digest


def submit(line: GpuLine, device_class: str = DEVICE.name, asked: Mapping[str, Any] = EIGHT, **fields: Any) -> str:
    return line.submit((probe(), asked), device_class=device_class, **fields)


def has_record(line: GpuLine, device_class: str = DEVICE.name) -> bool:
    key = line.key(probe(), device_class)
    with line.world.database.read() as session:
        return key in get_winners(session, [key])


def reconcile(line: GpuLine) -> None:
    end_budgets(line.world.database)
    with line.world.database.write() as session:
        items.expire_leases(session)


# ---- on a GPU


def test_on_a_gpu_the_fastest_are_compiled_in_full_measured_again_and_compared(line: GpuLine) -> None:
    job = submit(line)
    line.run()
    report = line.report(job)
    assert report.state == "done", report.error
    assert kinds(line) == ["plan", "compile", "measure", "refine", "compile", "measure", "compare", "finish"]
    full, fast = toolchains(line)
    assert builds(line) == {fast: FACTORS, full: [1, 2]}
    assert [len(task.candidates) for task in line.gpu.tasks] == [8, 2, 2]
    assert screened(line, job) == {factor: factor > 2 for factor in FACTORS}
    assert {one.verdict for one in line.candidates(job)} == {"ok"}
    assert all(one.measured_us is not None and one.predicted_us is not None for one in line.candidates(job))
    problem = report.problems[0]
    assert (problem.candidates, problem.screened, problem.verdicts) == (8, 6, {"ok": 8})
    record = line.record(probe())
    assert {entry.toolchain for entry in record.front} == {full}
    assert record.runner_up is not None and record.runner_up.us == 102.0


def test_who_was_only_screened_takes_no_part_however_fast_it_was(line: GpuLine) -> None:
    """Code that is compiled in full takes a hundred times as long here."""
    line.gpu.alone = lambda schedule: float(schedule["factor"]) + (0.0 if len(line.gpu.tasks) == 1 else 1000.0)
    job = submit(line)
    line.run()
    record = line.record(probe())
    in_full = {one.candidate for one in line.candidates(job) if not one.screening}
    assert len(in_full) == 2
    assert {entry.candidate for entry in record.front} <= in_full
    assert record.front[0].measured_us == 1001.0
    assert record.runner_up is not None and record.runner_up.candidate in in_full
    assert {one["factor"] for one in line.gpu.compared()} == {1, 2}
    assert min(one.measured_us or 0 for one in line.candidates(job) if one.screening) == 3.0, "their numbers stay"


def test_the_times_of_screening_are_not_what_full_code_is_measured_against(line: GpuLine) -> None:
    line.gpu.alone = lambda schedule: 1.0 if len(line.gpu.tasks) == 1 else 1000.0
    submit(line)
    line.run()
    assert [dict(task.best_us) for task in line.gpu.tasks if task.kind == "measure"] == [{}, {}]


def test_the_front_comes_before_who_is_only_fast(line: GpuLine) -> None:
    ways = search(way=["copy", "workspace", "atomic"], factor=[1, 2, 3])
    slower = {"atomic": 0.0, "workspace": 50.0, "copy": 100.0}
    line.gpu.alone = lambda schedule: 100.0 + slower[schedule["way"]] + schedule["factor"]
    job = submit(line, asked={**ways, "screening": 4})
    line.run()
    chosen = {(one.schedule["way"], one.schedule["factor"]) for one in line.candidates(job) if not one.screening}
    assert chosen == {("atomic", 1), ("workspace", 1), ("copy", 1), ("atomic", 2)}
    assert [entry.schedule["way"] for entry in line.record(probe()).front] == ["atomic", "workspace", "copy"]


def test_full_code_that_the_gpu_finds_wrong_does_not_win_though_its_screening_was_right(line: GpuLine) -> None:
    line.gpu.alone = lambda schedule: 100.0 if schedule["way"] == "atomic" else 200.0
    line.gpu.wrong = lambda kind, schedule: len(line.gpu.tasks) > 1 and schedule["way"] == "atomic"
    job = submit(line, asked={**search(way=["copy", "workspace", "atomic"]), "screening": 2})
    line.run()
    assert line.report(job).problems[0].verdicts == {"ok": 2, "incorrect": 1}
    assert [entry.schedule["way"] for entry in line.record(probe()).front] == ["copy"]


def test_nothing_is_published_where_none_of_the_full_code_is_right(line: GpuLine) -> None:
    line.gpu.wrong = lambda kind, schedule: len(line.gpu.tasks) > 1
    job = submit(line)
    line.run()
    (problem,) = line.report(job).problems
    assert problem.state == "failed"
    assert "none of the 2 candidates compiled in full was proved right: 2 incorrect" in (problem.error or "")
    assert "the other 6 were only screened" in (problem.error or "")
    assert not has_record(line)


# ---- predicted


def test_without_a_gpu_the_best_predicted_are_compiled_in_full_and_not_proved_again(line: GpuLine) -> None:
    job = submit(line, ON_CPU)
    line.run()
    assert kinds(line) == ["plan", "compile", "verify", "refine", "compile", "finish"]
    full, fast = toolchains(line)
    found = builds(line)
    assert found[fast] == FACTORS and len(found[full]) == 2
    problem = line.report(job).problems[0]
    assert (problem.state, problem.screened, problem.verdicts) == ("done", 6, {"ok": 8})
    with line.world.database.read() as session:
        record = get_winners(session, [problem.key])[problem.key]
    assert {entry.toolchain for entry in record.front} == {full}
    best = sorted(line.candidates(job), key=lambda one: (one.screening, one.predicted_us or 0, one.candidate))
    assert record.front[0].candidate == best[0].candidate


def test_a_candidate_that_does_not_compile_when_it_is_screened_is_out_with_its_words(line: GpuLine) -> None:
    asked = {**search(way=["workspace"], factor=[1, 2, 3], fault=["none", "front_end"]), "screening": 4}
    job = submit(line, ON_CPU, asked)
    line.run()
    problem = line.report(job).problems[0]
    assert (problem.state, problem.verdicts) == ("done", {"compile_error": 3, "ok": 3})
    failed = [one for one in line.candidates(job) if one.verdict == "compile_error"]
    assert all(one.screening and one.message for one in failed)
    assert screened_of(line.candidates(job), "ok") == [False, False, False]


def screened_of(candidates: list[CandidateReport], verdict: str) -> list[bool]:
    return [one.screening for one in candidates if one.verdict == verdict]


def test_where_nothing_is_right_nothing_is_compiled_in_full(line: GpuLine) -> None:
    job = submit(line, ON_CPU, {**search(way=["workspace"], factor=[1, 2, 3], fault=["front_end"]), "screening": 1})
    line.run()
    assert kinds(line) == ["plan", "compile", "refine", "finish"]
    (problem,) = line.report(job).problems
    assert "none of 3 candidates was proved right: 3 compile_error" in (problem.error or "")


def test_kernels_that_are_no_more_than_would_be_compiled_in_full_are_not_screened(line: GpuLine) -> None:
    """Eight candidates that share a kernel are one compile, whatever is done."""
    asked = {**search(way=["workspace"], slices=FACTORS), "screening": 2}
    job = submit(line, ON_CPU, asked)
    line.run()
    assert kinds(line) == ["plan", "compile", "verify", "finish"]
    assert not any(one.screening for one in line.candidates(job))
    with line.world.database.read() as session:
        key = line.key(probe(), ON_CPU)
        (done,) = get_winners(session, [key])[key].searches
    # Nothing was left out, so the search counts as one without.
    assert "screening" not in done["search"]
    without = {name: value for name, value in asked.items() if name != "screening"}
    assert is_covered([done], search_entry(without, done["generator"], None))


def test_a_screened_search_covers_itself_and_no_search_without_screening(line: GpuLine) -> None:
    submit(line)
    line.run()
    (done,) = line.record(probe()).searches
    for asked, covered in (
        (EIGHT, True),
        ({**EIGHT, "screening": 1}, True),
        ({**EIGHT, "screening": 3}, False),
        (search(factor=FACTORS), False),
    ):
        entry = search_entry(asked, done["generator"], None)
        assert is_covered([done], entry) is covered, asked


def test_jobs_share_the_builds_of_screening_and_those_in_full(line: GpuLine) -> None:
    first, second = submit(line), submit(line)
    line.run(["plan"])
    line.run()
    assert [line.report(job).state for job in (first, second)] == ["done", "done"]
    assert kinds(line).count("compile") == 2
    assert len(line.gpu.measured()) == 10


def test_one_job_screens_what_another_compiles_in_full(line: GpuLine) -> None:
    screening, whole = submit(line), submit(line, asked=search(factor=FACTORS))
    line.run(["plan"])
    line.run()
    assert [line.report(job).state for job in (screening, whole)] == ["done", "done"]
    full, fast = toolchains(line)
    assert builds(line) == {full: FACTORS, fast: FACTORS}
    assert set(screened(line, whole).values()) == {False}
    assert sorted(screened(line, screening).values()) == [False] * 2 + [True] * 6


# ---- progress


def test_the_counts_grow_when_it_is_known_what_is_compiled_in_full_and_never_shrink(line: GpuLine) -> None:
    job = submit(line)
    before: dict[str, int] = {}
    while (claim := line.claim()) is not None:
        line.do(claim)
        progress = line.report(job).progress
        now = {name: getattr(progress, name).done for name in ("lower", "compile", "verify", "measure", "finish")}
        assert all(now[name] >= done for name, done in before.items()), (claim.kind, before, now)
        assert all(getattr(progress, name).total >= done for name, done in now.items())
        assert progress.eta_seconds is None or progress.eta_seconds >= 0
        before = now
    assert before == {"lower": 1, "compile": 10, "verify": 10, "measure": 10, "finish": 1}
    assert line.report(job).progress.candidates_done == 10


def test_the_estimate_knows_that_the_best_are_compiled_once_more(line: GpuLine) -> None:
    """Before anything was compiled: as long as nobody knows better, a kernel takes as long in either round."""
    line.submit((probe(), search(factor=FACTORS)), device_class=ON_CPU)
    line.run(["plan"])
    plain = line.claim(["compile"])
    assert plain is not None
    with line.world.database.write() as session:
        without = jobs_eta(line, plain.job_id)
        items.release(session, plain)
        jobs.cancel_job(session, str(plain.job_id))
    job = submit(line, ON_CPU, {**search(factor=FACTORS), "screening": 4})
    line.run(["plan"])
    assert line.claim(["compile"]) is not None
    # Of the same kernels, half are compiled once more; the clock runs on between the two estimates.
    assert jobs_eta(line, job) > without + 0.05


def jobs_eta(line: GpuLine, job: str | None) -> float:
    eta = line.report(str(job)).progress.eta_seconds
    assert eta is not None
    return eta


# ---- ends before its time


def with_clock(line: GpuLine) -> FakeClock:
    line.world.database.clock = clock = FakeClock()
    line.register()
    return clock


@pytest.mark.parametrize("device_class", [ON_CPU, DEVICE.name])
@pytest.mark.parametrize("until", ["plan", "judged", "claimed"])
def test_a_budget_that_ends_while_candidates_are_screened_publishes_nothing(
    device_class: str, until: str, line: GpuLine
) -> None:
    clock = with_clock(line)
    job = submit(line, device_class, budget=60.0)
    line.run(["plan"])
    if until != "plan":
        line.run(["compile", "verify", "measure"])
    refining = line.claim(["refine"]) if until == "claimed" else None
    clock.advance(61.0)
    reconcile(line)
    if refining is not None:
        line.do(refining)  # comes too late
    line.run()
    assert kinds(line)[-1] == "finish"
    (problem,) = line.report(job).problems
    assert problem.state == "failed"
    assert "its screening was not over" in (problem.error or "")
    assert "leave out `search.screening`" in (problem.error or "")
    assert ("8 ok" if until != "plan" else "the budget of 60 seconds ended") in (problem.error or "")
    assert not has_record(line, device_class)
    assert toolchains(line)[0] not in builds(line)


def test_a_budget_that_ends_after_it_publishes_what_was_compiled_in_full_by_then(line: GpuLine) -> None:
    clock = with_clock(line)
    job = submit(line, asked={**search(factor=FACTORS), "screening": 2}, budget=60.0)
    line.run(["plan", "compile", "measure", "refine"], most=5)
    line.gpu.before = lambda one, cancel: clock.advance(59.5) if line.gpu.tasks[-1].candidates[1:] == (one,) else None
    line.run(["measure"])
    clock.advance(60.0)
    reconcile(line)
    line.run()
    report = line.report(job)
    assert report.state == "done", report.error
    record = line.record(probe())
    assert {entry.toolchain for entry in record.front} == {toolchains(line)[0]}
    assert record.searches == [], "nobody says that it was done"


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_cancel_between_screening_and_the_full_compile_ends_everything(when: str, line: GpuLine) -> None:
    job = submit(line)
    line.run(["plan", "compile", "measure"])
    claim = line.claim(["refine"]) if when == "while" else None
    with line.world.database.write() as session:
        jobs.cancel_job(session, job)
    if claim is not None:
        line.do(claim)
    line.run()
    assert line.report(job).state == "cancelled"
    assert toolchains(line)[0] not in builds(line)
    assert not has_record(line)
    again = submit(line)
    line.run()
    assert line.report(again).state == "done"
    assert len(line.gpu.measured()) == 10, "what was screened before is not measured again"


def test_an_attempt_that_lost_its_lease_chooses_nothing(line: GpuLine) -> None:
    clock = with_clock(line)
    job = submit(line)
    line.run(["plan", "compile", "measure"])
    first = line.claim(["refine"])
    assert first is not None
    clock.advance(601.0)
    reconcile(line)
    second = line.claim(["refine"])
    assert second is not None and second.attempt == 2
    line.do(second)
    after = rows(line)
    line.do(first)
    assert rows(line) == after
    line.run()
    assert line.report(job).state == "done"


def rows(line: GpuLine) -> list[Any]:
    with line.world.database.read() as session:
        return [tuple(row) for table in (CandidateRow, BuildRow) for row in session.execute(select(core(table)))]


def test_a_refine_that_fails_is_tried_again_and_in_the_end_the_problem_says_why(
    line: GpuLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(context: StepContext) -> None:
        raise ValueError("no luck")

    monkeypatch.setitem(STEPS, "refine", broken)
    line.workplace.settings = replace_settings(line, max_attempts=3)
    job = submit(line)
    line.run()
    assert [claim.attempt for claim in line.done if claim.kind == "refine"] == [1, 2, 3]
    report = line.report(job)
    assert (report.state, report.problems[0].error) == ("failed", "ValueError: no luck")


def replace_settings(line: GpuLine, **changes: Any) -> Any:
    return line.workplace.settings.model_copy(update=changes)


# ---- compiling


def test_screening_builds_are_compiled_fast_and_the_others_in_full(
    line: GpuLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[bool, int]] = []

    def compiling(kernels: Any, target: Any, toolchain: Any, *rest: Any) -> Any:
        made.append((toolchain.screening, len(kernels)))
        return compile_group(kernels, target, toolchain, *rest)

    monkeypatch.setattr(import_module("workers.steps.compile"), "compile_group", compiling)
    submit(line, ON_CPU)
    line.run()
    assert made == [(True, 8), (False, 2)]


def test_a_worker_with_another_compiler_leaves_the_groups_of_either_kind(line: GpuLine) -> None:
    submit(line)
    line.run(["plan"])
    own = line.workplace.toolchain
    line.workplace.__dict__["toolchain"] = replace(own, versions=(("nvcc", "0.0.1"),))
    claim = line.claim(["compile"])
    assert claim is not None
    with pytest.raises(Exception, match=f"planned for toolchain {own.for_screening().digest}"):
        STEPS["compile"](StepContext(line.workplace, claim, Cancel()))


def test_the_facts_of_a_candidate_are_those_of_its_full_code_where_there_is_any(line: GpuLine) -> None:
    screening, whole = submit(line), submit(line, asked=search(factor=FACTORS))
    line.run()
    last = next(one.candidate for one in line.candidates(screening) if one.schedule["factor"] == 8)
    with line.world.database.read() as session:
        of_screening, of_any = (candidate_facts(session, last, job) for job in (screening, None))
    assert of_screening is not None and of_any is not None
    assert of_screening.screening and not of_any.screening
    assert of_any.job == whole and of_any.code_digest != of_screening.code_digest


def test_a_problem_past_its_screening_says_so(line: GpuLine) -> None:
    job = submit(line)
    stage = select(JobProblemRow.screening).where(JobProblemRow.job_id == job)
    seen = []
    for step in (["plan"], ["compile", "measure"], ["refine"]):
        line.run(step)
        with line.world.database.read() as session:
            seen.append(session.scalars(stage).one())
    assert seen == [True, True, False]
