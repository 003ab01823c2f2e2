"""The compare step and its use by a finish: the finalists, the verdicts that count, what a record has beside it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import pytest

from codegen.kernel import Candidate
from cukiln.types import Contender, Launch, MeasuredOn, Measurement
from storage.entities.candidates import candidates_of_problem
from storage.entities.verdicts import NewVerdict, write_verdicts
from storage.entities.winners import get_winners
from storage.transfer.imports import refuse_candidate
from tests.support.fixtures.gpu_line import DEVICE, GpuLine, probe, search
from tests.support.fixtures.storage import EveryOperator
from workers.gpu.measure_on_gpu import GpuGone
from workers.steps import STEPS
from workers.steps.context import GiveUp, StepContext
from workers.steps.winner_library import plan_launch

N = 1000
# The faster, the more it asks for.
WAYS = search(way=["copy", "workspace", "atomic"], factor=[1, 2])
TIMES = {"copy": 300.0, "workspace": 200.0, "atomic": 100.0}


@pytest.fixture
def gpu_line(gpu_line: GpuLine) -> GpuLine:
    """What winners' PTX shows is another test's."""
    gpu_line.workplace.settings = gpu_line.workplace.settings.model_copy(update={"verify_ptx": "none"})
    return gpu_line


def by_way(schedule: Mapping[str, Any]) -> float:
    return TIMES[schedule["way"]] + 20.0 * (schedule["factor"] - 1)


def ways(line: GpuLine) -> list[tuple[str, int]]:
    return sorted((str(each["way"]), int(each["factor"])) for each in line.gpu.compared())


def test_the_front_and_all_near_the_best_take_part(gpu_line: GpuLine) -> None:
    gpu_line.gpu.alone = by_way
    gpu_line.job((probe(N), WAYS))
    assert ways(gpu_line) == [("atomic", 1), ("copy", 1), ("workspace", 1)]
    near = search(way=["atomic"], factor=[1, 2, 3])
    gpu_line.gpu.alone = lambda schedule: {1: 100.0, 2: 104.9, 3: 105.1}[schedule["factor"]]
    gpu_line.job((probe(2 * N), near))
    assert ways(gpu_line) == [("atomic", 1), ("atomic", 2)]
    assert all(candidate.verified for candidate in gpu_line.gpu.tasks[-1].candidates)


def test_the_record_has_the_times_of_the_comparison_and_what_stands_beside_them(gpu_line: GpuLine) -> None:
    gpu_line.gpu.alone = by_way
    gpu_line.gpu.together = lambda schedule: 2 * by_way(schedule)
    job = gpu_line.job((probe(N), WAYS))
    record = gpu_line.record(probe(N))
    assert [(entry.schedule["way"], entry.measured_us) for entry in record.front] == [
        ("atomic", 200.0), ("workspace", 400.0), ("copy", 600.0)
    ]  # fmt: skip
    assert record.ranked_by == "measured"
    assert {entry.verified for entry in record.front} == {"gpu"}
    assert all(isinstance(entry.measurement, Contender) for entry in record.front)
    assert all(entry.predicted_us and entry.predicted_us > 0 for entry in record.front)
    assert record.runner_up is not None
    assert (record.runner_up.us, record.runner_up.margin, record.runner_up.tie) == (400.0, 1.0, False)
    assert record.vendor is not None and record.vendor.library == "cuBLASLt"
    # The candidates keep what was measured of each alone.
    assert min(candidate.measured_us or 0 for candidate in gpu_line.candidates(job.job)) == 100.0


@pytest.mark.parametrize(("near", "first"), [(0.01, "atomic"), (0.05, "copy")])
def test_a_tie_is_called_a_tie_and_then_the_smaller_workspace_wins(
    near: float,
    first: str,
    gpu_line: GpuLine,
) -> None:
    gpu_line.gpu.alone = lambda schedule: {"atomic": 100.0, "copy": 104.0}[schedule["way"]]
    gpu_line.gpu.near = near
    gpu_line.job((probe(N), search(way=["copy", "atomic"])))
    record = gpu_line.record(probe(N))
    assert record.front[0].schedule["way"] == first
    assert record.runner_up is not None
    assert record.runner_up.tie == (first == "copy")
    if first == "copy":
        assert len(record.front) == 1
        assert record.front[0].measured_us == 104.0  # its own
        assert record.runner_up.margin == pytest.approx(100 / 104 - 1)


def test_a_finalist_that_is_wrong_in_the_end_is_not_published(gpu_line: GpuLine) -> None:
    gpu_line.gpu.alone = by_way
    gpu_line.gpu.wrong = lambda kind, schedule: kind == "compare" and schedule["way"] == "atomic"
    job = gpu_line.job((probe(N), search(way=["copy", "workspace", "atomic"])))
    record = gpu_line.record(probe(N))
    assert [entry.schedule["way"] for entry in record.front] == ["workspace", "copy"]
    assert job.problems[0].verdicts == {"ok": 2, "incorrect": 1}
    wrong = next(candidate for candidate in gpu_line.candidates(job.job) if candidate.verdict == "incorrect")
    assert wrong.message == "3 of 9 elements are wrong"


@pytest.mark.parametrize("verdict", ["runtime_error", pytest.param("run_timeout", marks=pytest.mark.long), "skipped"])
def test_what_a_finalist_dies_of_is_its_verdict_and_being_skipped_is_none(
    verdict: str,
    gpu_line: GpuLine,
) -> None:
    gpu_line.gpu.alone = by_way
    gpu_line.gpu.finding = verdict
    gpu_line.gpu.wrong = lambda kind, schedule: kind == "compare" and schedule["way"] == "atomic"
    job = gpu_line.job((probe(N), search(way=["copy", "workspace", "atomic"])))
    (candidate,) = (candidate for candidate in gpu_line.candidates(job.job) if candidate.schedule["way"] == "atomic")
    with gpu_line.world.database.read() as session:
        stored = candidates_of_problem(session, 1)
    (verification,) = (each.verification for each in stored if each.candidate == candidate.candidate)
    assert verification is not None
    assert [entry.schedule["way"] for entry in gpu_line.record(probe(N)).front] == ["workspace", "copy"]
    if verdict == "skipped":
        assert (candidate.verdict, candidate.measured_us, verification.verdict) == ("ok", 100.0, "ok")
    else:
        words = "3 of 9 elements are wrong"
        assert (candidate.verdict, candidate.message) == (verdict, words)
        assert (verification.verdict, verification.message) == (verdict, words)
        assert verification.details["cases"] == [{"exact": False, "max_error": 0.25, "error_bound": 0.5}]


def test_a_record_says_where_each_of_its_times_comes_from(gpu_line: GpuLine) -> None:
    gpu_line.job((probe(N), search(factor=[1, 2])))
    (entry,) = gpu_line.record(probe(N)).front
    assert isinstance(entry.measurement, Contender)
    assert entry.measured_on == MeasuredOn(
        device=DEVICE.name, uuid=DEVICE.uuid, driver=DEVICE.driver, cold=True, rounds=9, before={}, after={},
        measured_at=1.0,
    )  # fmt: skip


def test_times_of_another_driver_do_not_compete_with_todays(gpu_line: GpuLine) -> None:
    gpu_line.job((probe(N), search(way=["copy", "workspace"])))
    old = gpu_line.record(probe(N))
    assert [search["measured"]["driver"] for search in old.searches] == [DEVICE.driver]
    gpu_line.new_driver("999.9")
    gpu_line.gpu.alone = lambda schedule: 500.0
    job = gpu_line.job((probe(N), search(way=["copy"])))
    assert job.problems[0].verdicts == {"ok": 1}
    assert len(gpu_line.gpu.measured()) == 3  # the copy again, under the new driver
    record = gpu_line.record(probe(N))
    assert [(entry.measured_us, entry.measured_on and entry.measured_on.driver) for entry in record.front] == [
        (500.0, "999.9")
    ]
    assert [search["measured"] for search in record.searches] == [
        {"driver": "999.9", "plan_version": record.front[0].verdict["plan_version"]}
    ]


def test_code_that_is_found_wrong_is_answered_no_more(gpu_line: GpuLine) -> None:
    gpu_line.gpu.alone = by_way
    first = gpu_line.job((probe(N), search(way=["copy", "workspace"])), (probe(2 * N), search(way=["workspace"])))
    assert [entry.schedule["way"] for entry in gpu_line.record(probe(N)).front] == ["workspace", "copy"]
    gpu_line.gpu.wrong = lambda kind, schedule: schedule["way"] == "workspace"
    gpu_line.submit((probe(3 * N), search(way=["workspace"])))
    gpu_line.run(["plan", "compile", "measure"])
    record = gpu_line.record(probe(N))
    assert ([entry.schedule["way"] for entry in record.front], record.searches) == (["copy"], [])
    assert record.revision == 2
    with gpu_line.world.database.read() as session:
        assert get_winners(session, [gpu_line.key(probe(2 * N))]) == {}
    second = gpu_line.report(first.job).problems[1]
    assert (second.winner, second.state) == (None, "done")
    assert "withdrawn" in str(second.error)
    gpu_line.gpu.wrong = lambda kind, schedule: False
    gpu_line.job((probe(2 * N), search(way=["copy"])))
    again = gpu_line.record(probe(2 * N))
    assert ([entry.schedule["way"] for entry in again.front], again.revision) == (["copy"], 3)


def test_a_problem_without_a_right_candidate_is_not_compared_and_fails(gpu_line: GpuLine) -> None:
    gpu_line.gpu.wrong = lambda kind, schedule: True
    job = gpu_line.job((probe(N), search()))
    assert [lease.kind for lease in gpu_line.done] == ["plan", "compile", "measure", "finish"]
    assert "1 incorrect" in str(job.problems[0].error)


def test_a_candidate_without_its_library_is_left_out_and_published_all_the_same(gpu_line: GpuLine) -> None:
    job = gpu_line.submit((probe(N), search()))
    gpu_line.run(["plan", "compile", "measure"])
    for task in gpu_line.gpu.tasks:
        for candidate in task.candidates:
            digest = candidate.library.rpartition("/")[2].removesuffix(".so")
            path = gpu_line.blobs.path(digest)
            assert path is not None
            path.unlink()
    gpu_line.run()
    assert [task.kind for task in gpu_line.gpu.tasks] == ["measure"]
    assert gpu_line.report(job).state == "done"
    assert isinstance(gpu_line.record(probe(N)).front[0].measurement, Measurement)


def test_a_comparison_that_cannot_be_had_leaves_the_times_of_each_alone_and_is_made_up_by_the_next_job(
    gpu_line: GpuLine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(context: StepContext) -> None:
        raise GiveUp("no comparison today")

    compare = STEPS["compare"]
    monkeypatch.setitem(STEPS, "compare", broken)
    gpu_line.gpu.alone = by_way
    gpu_line.job((probe(N), search(way=["copy", "atomic"])))
    record = gpu_line.record(probe(N))
    assert [entry.measured_us for entry in record.front] == [100.0, 300.0]
    assert all(isinstance(entry.measurement, Measurement) for entry in record.front)
    assert (record.vendor, record.searches) == (None, [])
    assert record.runner_up is not None and record.runner_up.us == 300.0

    monkeypatch.setitem(STEPS, "compare", compare)
    gpu_line.job((probe(N), search(way=["copy", "atomic"])))
    record = gpu_line.record(probe(N))
    assert record.vendor is not None
    assert record.searches != []
    assert len(gpu_line.gpu.measured()) == 2  # not again


def test_a_gpu_that_is_gone_in_a_comparison_leaves_the_task_to_the_next(gpu_line: GpuLine) -> None:
    job = gpu_line.submit((probe(N), search()))
    gpu_line.run(["plan", "compile", "measure"])

    def gone(candidate: Any, cancel: Any) -> None:
        raise GpuGone("the GPU does not answer")

    gpu_line.gpu.before = gone
    gpu_line.run(["compare"], most=1)
    assert gpu_line.report(job).state == "running"
    gpu_line.gpu.before = lambda candidate, cancel: None
    gpu_line.run()
    assert gpu_line.report(job).state == "done"
    assert {lease.attempt for lease in gpu_line.done if lease.kind == "compare"} == {1}


# ---- across runs


def test_a_new_comparison_replaces_the_older_times_of_a_candidate(gpu_line: GpuLine) -> None:
    gpu_line.job((probe(N), search(factor=[1, 2])))
    assert gpu_line.record(probe(N)).front[0].measured_us == 101.0
    gpu_line.gpu.together = lambda schedule: 110.0 + schedule["factor"]  # today the clocks are lower
    gpu_line.job((probe(N), search(factor=[1, 2, 3])))
    record = gpu_line.record(probe(N))
    assert [(entry.schedule["factor"], entry.measured_us) for entry in record.front] == [(1, 111.0)]
    assert len(record.searches) == 1


def test_what_an_earlier_run_measured_keeps_its_place_while_nothing_beats_it(gpu_line: GpuLine) -> None:
    gpu_line.gpu.alone = by_way
    gpu_line.job((probe(N), search(way=["atomic"])))
    before = gpu_line.record(probe(N))
    gpu_line.job((probe(N), search(way=["workspace", "copy"])))
    record = gpu_line.record(probe(N))
    assert [entry.schedule["way"] for entry in record.front] == ["atomic", "workspace", "copy"]
    assert record.vendor == before.vendor
    assert record.runner_up is not None
    assert (record.runner_up.us, record.runner_up.tie) == (200.0, False)


def test_predictions_stay_under_a_record_of_their_own(gpu_line: GpuLine) -> None:
    gpu_line.job((probe(N), search()))
    gpu_line.submit((probe(N), search(way=["workspace"])), device_class="predicted:sm_80")
    gpu_line.run()
    assert gpu_line.record(probe(N)).ranked_by == "measured"
    assert len(gpu_line.record(probe(N)).front) == 1
    from storage.entities.winners import get_winners

    key = gpu_line.key(probe(N), "predicted:sm_80")
    with gpu_line.world.database.read() as session:
        other = get_winners(session, [key])[key]
    assert (other.ranked_by, other.front[0].measured_us, other.runner_up, other.vendor) == (
        "predicted",
        None,
        None,
        None,
    )
    assert other.front[0].verified != "gpu"


def test_code_that_a_gpu_found_wrong_wins_nowhere(gpu_line: GpuLine) -> None:
    gpu_line.gpu.wrong = lambda kind, schedule: schedule["way"] == "copy"
    gpu_line.job((probe(N), search(way=["copy", "workspace"])))
    job = gpu_line.submit((probe(N), search(way=["copy", "workspace"])), device_class="predicted:sm_80")
    gpu_line.run()
    assert gpu_line.report(job).problems[0].verdicts == {"ok": 2}, "the CPU finds nothing wrong with either"
    with gpu_line.world.database.read() as session:
        key = gpu_line.key(probe(N), "predicted:sm_80")
        (entry,) = get_winners(session, [key])[key].front
    assert (entry.schedule["way"], entry.verified, entry.measured_us) == ("workspace", "gpu", None)
    job = gpu_line.submit((probe(N), search()), device_class="predicted:sm_80")
    gpu_line.run()
    assert "3 of 9 elements are wrong" in str(gpu_line.report(job).problems[0].error)


def test_a_candidate_found_wrong_while_its_library_is_built_is_not_published(
    gpu_line: GpuLine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[str] = []

    def plan(candidate: Candidate, *rest: Any) -> Launch:
        if not built:
            problem = int(gpu_line.done[-1].ref)
            with gpu_line.world.database.write() as session:
                refuse_candidate(session, problem, candidate.id, "found wrong in another job")
        built.append(candidate.id)
        return plan_launch(candidate, *rest)

    monkeypatch.setattr(import_module("workers.steps.finish"), "plan_launch", plan)
    job = gpu_line.job((probe(N), search(factor=[1, 2])))
    assert [problem.state for problem in job.problems] == ["done"]
    assert [entry.candidate for entry in gpu_line.record(probe(N)).front] == [built[-1]] != [built[0]]


def test_a_kernel_of_the_record_with_a_finding_does_not_stay_in_front(gpu_line: GpuLine) -> None:
    """Of a record that an older release wrote, which did not withdraw it."""
    gpu_line.gpu.alone = by_way
    gpu_line.job((probe(N), search(way=["workspace"])))
    (entry,) = gpu_line.record(probe(N)).front
    finding = NewVerdict(entry.code_digest, "matmul", "incorrect", "1 of 9 elements is wrong", {}, 0.0, 0.0)
    with gpu_line.world.database.write() as session:
        write_verdicts(session, [finding], "gpu", EveryOperator(entry.verdict["plan_version"]))
    gpu_line.job((probe(N), search(way=["copy"])))
    record = gpu_line.record(probe(N))
    assert [each.schedule["way"] for each in record.front] == ["copy"]
    assert [search["search"]["tunables"]["way"] for search in record.searches] == [["copy"]]
