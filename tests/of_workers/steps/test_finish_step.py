"""The finish step publishes: beside what the record knows, and over what the store no longer has."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from codegen.operators import operator
from cukiln.types import FrontEntry, WinnerRecord
from storage.blobs.blob_store import BlobStore
from storage.config.settings import load_settings
from storage.entities.jobs import job_state, load_problem
from storage.entities.pareto_front import Point
from storage.entities.searches import search_entry
from storage.entities.winners import get_winners, publish_winner
from storage.transitions import take_work
from storage.transitions.accept import NewJob, create_jobs
from tests.support.fixtures.queue import QueueWorld
from tests.support.fixtures.storage import new_problem, problem_ids, winner_record
from workers.processes.processes import Processes
from workers.steps import run_ptx
from workers.steps.context import Cancel, StepContext, Workplace
from workers.steps.finish import Ranked, build_front, lost_blobs, publish_front
from workers.steps.winner_library import WinnerNotBuilt

finish_step = sys.modules["workers.steps.finish"]  # `workers.steps.finish` by name is the step function

KEY = "a" * 64
BEFORE = search_entry({"level": 2}, "today", None)
NOW = search_entry({"level": 1}, "today", None)


def published(world: QueueWorld, *, keep_blobs: bool) -> WinnerRecord:
    """The record after a slower kernel of a smaller search was published beside a faster one."""
    blobs = BlobStore(world.database, world.settings.blobs_url)
    library = blobs.put(b"a library", "application/x-sharedlib").digest
    files = dict.fromkeys(("so_sha256", "cubin_sha256", "source_sha256"), library)
    known = winner_record(KEY, "fast", searches=[BEFORE])
    if keep_blobs:
        known = known.model_copy(update={"front": [known.front[0].model_copy(update=files)]})
    slow: FrontEntry = known.front[0].model_copy(update={**files, "candidate": "slow", "predicted_us": 99.0})
    matmul = operator("matmul").parse({"operator": "matmul", "m": 8, "n": 8, "k": 8})
    with world.database.write() as session:
        publish_winner(session, known, attempt="before")
        job = create_jobs(session, [NewJob([new_problem(key=KEY, problem=matmul.canonical())])])[0]
        lease = take_work.take(session, ["plan"], None, "w", 60.0)
        problem = load_problem(session, problem_ids(session, job.id)[0])
    assert lease is not None and problem is not None
    workplace = Workplace(world.settings, world.database, blobs, world.redis, Processes(), "w")
    context = StepContext(workplace, lease, Cancel())
    lost = lost_blobs(context, KEY, None)
    with world.database.write() as session:
        status = job_state(session, job.id)
        assert status is not None
        winner = publish_front(context, session, problem, status, [slow], [NOW], lost, None)
    with world.database.read() as session:
        record = get_winners(session, [KEY])[KEY]
    assert winner == record.front[0].candidate
    return record


@pytest.mark.parametrize("keep_blobs", [True, False])
def test_a_faster_kernel_stays_the_winner_only_while_its_files_are_there(
    queue_world: QueueWorld,
    keep_blobs: bool,
) -> None:
    record = published(queue_world, keep_blobs=keep_blobs)
    assert [entry.candidate for entry in record.front] == (["fast"] if keep_blobs else ["slow"])
    # Without its best kernel the larger search does not count as done: the next job does it again.
    assert record.searches == ([BEFORE] if keep_blobs else [NOW])


@pytest.mark.parametrize("fate", ["other code", "does not compile alone"])
def test_a_candidate_that_cannot_be_published_as_it_was_verified_gives_way_to_the_next(
    fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (
        Ranked(
            SimpleNamespace(code_digest="own", verification=None), SimpleNamespace(id=name), SimpleNamespace(), point
        )  # type: ignore[arg-type]
        for name, point in (("first", Point("first", 1.0, 0, True)), ("second", Point("second", 2.0, 0, True)))
    )
    database = SimpleNamespace(write=contextlib.nullcontext)
    context = SimpleNamespace(settings=load_settings(), database=database, toolchain=None, processes=None, cancel=None)
    problem = SimpleNamespace(id=7, target="sm_80")
    refused: list[tuple[int, str, str]] = []
    monkeypatch.setattr(run_ptx, "refuse_candidate", lambda session, *words: refused.append(words))

    def library(context: Any, candidate: Any, target: Any) -> tuple[Any, float]:
        if candidate.id == "first" and fate == "does not compile alone":
            raise WinnerNotBuilt("first", "error: too bad")
        return SimpleNamespace(code_digest="other" if candidate.id == "first" else "own"), 1.0

    monkeypatch.setattr(finish_step, "winner_library", library)
    monkeypatch.setattr(finish_step, "plan_launch", lambda *_: "launch")
    monkeypatch.setattr(finish_step, "verify_winner", lambda *_: None)
    runs = SimpleNamespace()
    built, whole = build_front(context, problem, [first, second], runs)  # type: ignore[arg-type]
    assert [each.ranked for each in built] == [second]
    assert whole
    assert [each[:2] for each in refused] == ([(7, "first")] if fate == "other code" else [])
    assert build_front(context, problem, [first], runs) == ([], True)  # type: ignore[arg-type]
