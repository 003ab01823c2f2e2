"""A winner is run from its own PTX before it is published: whatever that shows to be wrong gives way to the next."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlalchemy import select

from cukiln.types import Job
from storage.database.tables import CandidateRow, LibraryRow
from tests.support.fixtures.line import Line
from workers.cpu import ptx
from workers.processes.processes import InfrastructureError

# All of one problem, from the fastest to the slowest: the first reads beyond its input, the second adds it to itself.
FAULTS = ["asm", "asm_sum", "none"]


def search(*faults: str) -> dict[str, object]:
    return {"tunables": {"way": ["copy"], "slices": [1], "factor": [1], "fault": list(faults)}}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """An entry for each kernel that is run from PTX: whether from what is stored of it."""
    seen: list[bool] = []
    real = ptx.verify_ptx

    def counted(kernels, *arguments, ptx=None, **options):  # type: ignore[no-untyped-def]
        seen.append(ptx is not None)
        return real(kernels, *arguments, ptx=ptx, **options)

    monkeypatch.setattr(ptx, "verify_ptx", counted)
    yield seen


def refusals(line: Line, job: Job) -> dict[str, tuple[str, str]]:
    """Verdict and message by fault, of those that have a message."""
    query = select(CandidateRow.schedule, CandidateRow.verdict, CandidateRow.message)
    with line.world.database.read() as session:
        rows = session.execute(query.where(CandidateRow.message.is_not(None))).all()
    return {row.schedule["fault"]: (str(row.verdict), str(row.message)) for row in rows}


def test_a_wrong_asm_text_is_refused_by_its_instruction_and_the_next_is_published(line: Line, runs: list[bool]) -> None:
    job = line.job(search(*FAULTS))
    assert (job.state, job.problems[0].verdicts) == ("done", {"ok": 1, "runtime_error": 1, "incorrect": 1})
    refused = refusals(line, job)
    verdict, message = refused["asm"]
    assert verdict == "runtime_error"
    assert re.search(r"run from its PTX on the CPU: .*probe/steps\.cuh:\d+, kernel\.ptx:\d+", message)
    assert re.search(r"\[line \d+: ld\.global\.f32 %f\d+, \[%rd\d+\+4096\];", message)
    verdict, message = refused["asm_sum"]
    assert (verdict, "elements are wrong" in message) == ("incorrect", True)
    [entry] = line.record().front
    assert entry.schedule["fault"] == "none"
    assert entry.ptx is not None
    assert (entry.ptx.verdict, entry.ptx.message) == ("ok", None)
    assert entry.ptx.cpu_seconds > 0
    assert runs == [True, False, True, True]  # the first again with the lines of its source
    winner = job.problems[0].winner
    assert winner is not None and winner.ptx == entry.ptx.model_copy(update={"promised": None})
    assert job.problems[0].seconds.verify.cpu >= entry.ptx.cpu_seconds


def test_another_job_with_the_same_winner_runs_nothing(line: Line, runs: list[bool]) -> None:
    line.job(search("asm", "none"))
    record = line.record()
    runs.clear()
    other = replace(line, problem=type(line.problem).model_validate({**line.problem.canonical(), "n": 2000}))
    job = other.job(search("asm", "none"))
    assert job.problems[0].verdicts == {"ok": 1, "runtime_error": 1}
    assert (other.record().front[0].so_sha256, other.record().front[0].ptx) == (
        record.front[0].so_sha256,
        record.front[0].ptx,
    )
    assert runs == []
    # The PTX plan has changed: all is verified again.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ptx, "ptx_plans", lambda sums: {"probe": "another version"})
        line.job(search("none"))
    assert runs == [True]


def test_a_record_that_was_published_before_loses_what_its_ptx_refuses(
    line: Line, monkeypatch: pytest.MonkeyPatch, runs: list[bool]
) -> None:
    without = line.workplace.settings.model_copy(update={"verify_ptx": "none"})
    with monkeypatch.context() as patch:
        patch.setattr(line.workplace, "settings", without)
        line.job(search("asm_sum"))
    [entry] = line.record().front
    assert (entry.schedule["fault"], entry.ptx, runs) == ("asm_sum", None, [])
    line.job(search("asm_sum", "none"))
    assert [entry.schedule["fault"] for entry in line.record().front] == ["none"]


def test_a_job_with_nothing_else_fails_with_the_message(line: Line) -> None:
    job = line.job(search("asm_sum"))
    assert job.state == "failed"
    assert "run from its PTX on the CPU: " in str(job.problems[0].error)


def test_ptx_without_a_translation_is_published_and_says_so(line: Line) -> None:
    job = line.job(search("unknown"))
    assert job.state == "done"
    [entry] = line.record().front
    assert entry.ptx is not None and entry.ptx.verdict == "untranslated"
    assert "ld.volatile.global.f32" in str(entry.ptx.message)


def test_a_fault_of_the_machine_is_no_verdict(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise InfrastructureError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(ptx, "verify_ptx", fails)
        with pytest.raises(InfrastructureError, match="the disk is full"):
            line.job(search("none"))
    with line.world.database.read() as session:
        assert session.scalars(select(LibraryRow.ptx_verdict)).all() == [None]
        assert session.scalars(select(CandidateRow.verdict)).all() == ["ok"]
