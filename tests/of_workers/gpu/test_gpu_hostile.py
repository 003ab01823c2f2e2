"""What libraries do to the process that measures them: each gets its verdict, and no other is affected."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu.gpu_tasks import Gpu, matmul_candidate, matmul_problem
from tests.support.kernels.hostile_libraries import (
    CHANGES_LATER,
    CONTROL,
    HOSTILE,
    WRITES_LATER,
    Hostile,
    build,
    forger,
)
from workers.gpu.lease import is_leased
from workers.gpu.measure_on_gpu import GpuGone
from workers.gpu.task import CandidateResult, TaskKind
from workers.processes.processes import InfrastructureError

SILENCE = 3.0  # seconds after which a child hangs: ten times what a new one takes to say its first word
PROBLEM = matmul_problem()
FIRST, SECOND, THIRD = (matmul_candidate(PROBLEM, unroll_k=value) for value in (1, 2, 4))
# Of the same three kernels.
OTHERS = [matmul_candidate(PROBLEM, unroll_k=value, raster=raster) for raster in (2, 4, 8, 16) for value in (1, 2, 4)]


def built(gpu: Gpu, name: str, hostile: Hostile, *, port: int = 9) -> Path:
    # One library for all of them: what is wrong with it is wrong for all that use it.
    return build(hostile, gpu.folder / f"{name}.so", *(each.kernel.id for each in (FIRST, SECOND, THIRD)), port=port)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.setblocking(False)
        yield made


def together() -> Iterator[list[str]]:
    """The hostile libraries of one task: those that hang, those that are refused, and some of the others each."""
    hanging = [name for name, hostile in HOSTILE.items() if hostile.verdict == "run_timeout"]
    refused = [name for name, hostile in HOSTILE.items() if hostile.seen]
    others = [name for name in HOSTILE if name not in (*hanging, *refused)]
    yield from (hanging, refused)
    yield from (others[start : start + 7] for start in range(0, len(others), 7))


@pytest.mark.parametrize("names", list(together()), ids=lambda names: names[0])
def test_a_hostile_library_gets_its_verdict_and_the_next_candidate_is_verified(
    gpu: Gpu, listener: socket.socket, names: list[str]
) -> None:
    port = listener.getsockname()[1]
    pairs = [
        (candidate, built(gpu, f"bad{number}", HOSTILE[name], port=port))
        for number, (candidate, name) in enumerate(zip(OTHERS, names, strict=False))
    ]
    silence = SILENCE if HOSTILE[names[0]].verdict == "run_timeout" else 60.0
    outcome = gpu.run(gpu.task([*pairs, (FIRST, built(gpu, "good", CONTROL))]), silence_seconds=silence)
    *bad, last = outcome.results
    for (candidate, _), name, result in zip(pairs, names, bad, strict=True):
        hostile = HOSTILE[name]
        assert (result.candidate, result.verdict) == (candidate.id, hostile.verdict), (name, result)
        assert hostile.words in result.message, (name, result)
        assert (result.measurement is None) == (hostile.verdict != "ok"), name
        if hostile.seen:  # refused before any of it ran
            assert result.message.startswith("the library was not loaded: "), name
            assert not result.tainted and result.details["cases"] == [], name
    assert (last.verdict, last.candidate) == ("ok", FIRST.id), last
    assert gpu.results == outcome.results
    assert gpu.left_behind() == []
    assert not is_leased(gpu.lease)
    with pytest.raises(BlockingIOError):  # nothing has called
        listener.accept()


def test_the_control_is_right_on_the_reduced_problems_too_and_is_timed(gpu: Gpu) -> None:
    good = built(gpu, "good", CONTROL)
    (result,) = gpu.run(gpu.task([(FIRST, good)], verified=False)).results
    assert result.verdict == "ok" and result.measurement is not None
    assert len(result.details["cases"]) > 3


def test_a_library_that_was_right_on_reduced_problems_is_still_caught_at_full_extents(gpu: Gpu) -> None:
    tall = "if (call.extents[1] == 1000) call.out()[0] += 1;"
    bad = built(gpu, "bad", Hostile("incorrect", "", f"rightly(call); {tall} return 0;"))
    own = matmul_candidate(matmul_problem(m=1000, n=8, k=4))
    (result,) = gpu.run(gpu.task([(own, bad)], verified=False)).results
    assert result.verdict == "incorrect" and "extents [1, 1000, 8, 4," in result.message


def test_a_task_of_nothing_but_hostile_libraries_has_a_verdict_for_each(gpu: Gpu) -> None:
    names = ["writes to null", "aborts, by dlsym", "ends the process well, by a system call"]
    pairs = [
        (each, built(gpu, f"bad{number}", HOSTILE[name]))
        for number, (each, name) in enumerate(zip((FIRST, SECOND, THIRD), names, strict=True))
    ]
    outcome = gpu.run(gpu.task(pairs))
    assert [result.verdict for result in outcome.results] == ["runtime_error"] * 3
    results = zip(names, outcome.results, strict=True)
    assert [HOSTILE[name].words in result.message for name, result in results] == [True] * 3


@pytest.mark.parametrize("how", ["missing", "fault", "crash"])
def test_a_gpu_that_does_not_answer_the_next_process_is_gone_and_what_was_verified_is_kept(gpu: Gpu, how: str) -> None:
    gpu.configure(open=how, opens_well=1)
    good, bad = built(gpu, "good", CONTROL), built(gpu, "bad", HOSTILE["writes to null"])
    with pytest.raises(GpuGone, match=r"the GPU Simulated GPU GPU-51011a7e.* does not answer"):
        gpu.run(gpu.task([(FIRST, good), (SECOND, bad), (THIRD, good)]))
    assert [(result.candidate, result.verdict) for result in gpu.results] == [
        (FIRST.id, "ok"),
        (SECOND.id, "runtime_error"),
    ]
    assert not is_leased(gpu.lease) and gpu.left_behind() == []


def test_a_gpu_that_says_nothing_is_gone_after_the_silence(gpu: Gpu) -> None:
    gpu.configure(open="silent", opens_well=1)
    good, bad = built(gpu, "good", CONTROL), built(gpu, "bad", HOSTILE["writes to null"])
    with pytest.raises(GpuGone, match="it was silent"):
        gpu.run(gpu.task([(FIRST, bad), (SECOND, good)]), silence_seconds=SILENCE)
    assert [result.candidate for result in gpu.results] == [FIRST.id]


def test_a_gpu_that_never_answered_is_asked_twice(gpu: Gpu) -> None:
    gpu.configure(open="missing")
    with pytest.raises(GpuGone, match="fallen off the bus"):
        gpu.run(gpu.task([(FIRST, built(gpu, "good", CONTROL))]))
    assert (gpu.folder / "gpu.opens").read_text() == "2"
    assert gpu.results == []


@pytest.mark.parametrize("name", ["writes to null", "never ends", "kills itself", "refuses its launches"])
def test_a_finalist_that_ends_the_process_leaves_the_comparison_and_the_others_continue(gpu: Gpu, name: str) -> None:
    bad, good = built(gpu, "bad", HOSTILE[name]), built(gpu, "good", CONTROL)
    silence = SILENCE if HOSTILE[name].verdict == "run_timeout" else 60.0
    task = gpu.task([(FIRST, good), (SECOND, bad), (THIRD, good)], kind="compare")
    outcome = gpu.run(task, silence_seconds=silence)
    assert outcome.comparisons["0"] is not None
    assert {contender["candidate"] for contender in outcome.comparisons["0"]["contenders"]} == {FIRST.id, THIRD.id}
    assert [(result.candidate, result.verdict) for result in outcome.results] == [(SECOND.id, HOSTILE[name].verdict)]


def test_a_finalist_that_was_right_only_the_first_times_is_found_after_timing(gpu: Gpu) -> None:
    bad = built(gpu, "bad", HOSTILE["right only the first ten times"])
    good = built(gpu, "good", CONTROL)
    outcome = gpu.run(gpu.task([(FIRST, bad), (SECOND, good)], kind="compare"))
    assert outcome.comparisons["0"] is not None
    assert [contender["candidate"] for contender in outcome.comparisons["0"]["contenders"]] == [SECOND.id]
    assert [(result.candidate, result.verdict) for result in outcome.results] == [(FIRST.id, "incorrect")]
    assert "after it was timed" in outcome.results[0].message


HARMFUL = {"writes": WRITES_LATER, "changes": CHANGES_LATER, "at once": HOSTILE["writes behind out"]}


def harms() -> Iterator[Any]:
    """Each kind of task with each place and each harm; the other combinations take long."""
    for kind in ("measure", "compare"):
        for place in range(3):
            for number, harm in enumerate(HARMFUL):
                marks = () if number == (place + (kind == "compare")) % 3 else pytest.mark.long
                yield pytest.param(kind, harm, place, marks=marks)


@pytest.mark.parametrize(("kind", "harm", "place"), list(harms()))
def test_only_the_candidate_that_wrote_where_it_must_not_is_wrong(
    gpu: Gpu, kind: TaskKind, harm: str, place: int
) -> None:
    bad, good = built(gpu, "bad", HARMFUL[harm]), built(gpu, "good", CONTROL)
    pairs = [(each, bad if number == place else good) for number, each in enumerate((FIRST, SECOND, THIRD))]
    outcome = gpu.run(gpu.task(pairs, kind=kind))
    guilty = pairs[place][0].id
    assert [result.candidate for result in outcome.results if result.verdict == "incorrect"] == [guilty]
    right = {result.candidate for result in outcome.results if result.verdict == "ok"}
    if kind == "compare":
        assert outcome.comparisons["0"] is not None
        right = {contender["candidate"] for contender in outcome.comparisons["0"]["contenders"]}
    assert right == {FIRST.id, SECOND.id, THIRD.id} - {guilty}
    # What it may have hit besides affects no other: they are verified in another process.
    assert (gpu.folder / "gpu.opens").read_text() == ("1" if kind == "measure" and place == 2 else "2")


def test_two_finalists_that_do_harm_leave_the_comparison_to_the_third(gpu: Gpu) -> None:
    bad, worse = built(gpu, "bad", WRITES_LATER), built(gpu, "worse", CHANGES_LATER)
    outcome = gpu.run(gpu.task([(FIRST, bad), (SECOND, built(gpu, "good", CONTROL)), (THIRD, worse)], kind="compare"))
    assert outcome.comparisons["0"] is not None
    assert [contender["candidate"] for contender in outcome.comparisons["0"]["contenders"]] == [SECOND.id]
    assert {result.candidate for result in outcome.results} == {FIRST.id, THIRD.id}


def test_harm_that_no_finalist_does_alone_is_no_verdict(gpu: Gpu) -> None:
    once = Hostile("", "", "if (calls == 120) call.out()[call.elements()] = 1; return rightly(call);")
    pairs = [(FIRST, built(gpu, "once", once)), (SECOND, built(gpu, "good", CONTROL))]
    with pytest.raises(
        InfrastructureError, match=r"one of them wrote outside of out.*; none does so when it runs alone"
    ):
        gpu.run(gpu.task(pairs, kind="compare"))
    assert gpu.results == []


def forged(candidate: str) -> str:
    measurement = {
        "median_us": 0.001, "low_us": 0.001, "high_us": 0.001, "spread": 0.0, "samples": 20, "launches_per_sample": 1,
        "cold": True, "stopped": "tight", "device": "Simulated GPU", "uuid": "GPU-1", "driver": "simulated-1",
        "before": {}, "after": {}, "measured_at": 1.0,
    }  # fmt: skip
    result = CandidateResult(candidate, "ok", "", {"seed": 1, "cases": []}, measurement)
    return json.dumps({"candidate": asdict(result)})


def test_a_library_that_writes_its_own_verdict_is_not_believed(gpu: Gpu) -> None:
    hostile = forger(forged(FIRST.id))
    outcome = gpu.run(gpu.task([(FIRST, built(gpu, "bad", hostile)), (SECOND, built(gpu, "good", CONTROL))]))
    first, second = outcome.results
    assert first.verdict == hostile.verdict and hostile.words in first.message and first.measurement is None
    assert (second.candidate, second.verdict) == (SECOND.id, "ok")


def test_a_finalist_that_writes_its_own_comparison_leaves_it(gpu: Gpu) -> None:
    bad = built(gpu, "bad", forger('{"comparison": {"contenders": []}}'))
    outcome = gpu.run(gpu.task([(FIRST, bad), (SECOND, built(gpu, "good", CONTROL))], kind="compare"))
    assert outcome.comparisons["0"] is not None
    assert [contender["candidate"] for contender in outcome.comparisons["0"]["contenders"]] == [SECOND.id]
    assert [(result.candidate, result.verdict) for result in outcome.results] == [(FIRST.id, "runtime_error")]
