"""A job's work on a time axis, and the compilers' phases with what grouping saved."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import insert

from cukiln.types import FileCosts, Timeline
from storage import items
from storage.clock import FakeClock
from storage.database import Database
from storage.phases import phase_timings
from storage.rows import core
from storage.tables import GroupRow
from storage.timeline import timeline
from tests.fixtures_storage import *  # noqa: F403 - fixtures
from tests.fixtures_storage import add_job, claim_one, compile_claimed, compile_next, plan_next, verify_next


def read(database: Database, job: str, **options: Any) -> Timeline:
    with database.read() as session:
        found = timeline(session, job, **options)
    assert found is not None
    return found


def times(found: Timeline) -> dict[str, list[tuple[str, float, float | None, float | None]]]:
    """By lane: kind, and when the step was queued, begun, ended, since the job came."""

    def since(at: float | None) -> float | None:
        return None if at is None else at - found.created_at

    return {
        lane.name.partition(" ")[0]: [
            (step.kind, step.created_at - found.created_at, since(step.started_at), since(step.finished_at))
            for step in lane.steps
        ]
        for lane in found.lanes
    }


def test_each_step_of_a_job_has_its_wait_and_its_time(database: Database, clock: FakeClock) -> None:
    job = add_job(database).id
    clock.advance(1)
    claimed = claim_one(database, "plan")
    with database.write() as session:
        items.release(session, claimed)
    plan_next(database, "a", "b")
    clock.advance(2)
    claim = claim_one(database, "compile")
    clock.advance(4)
    compile_claimed(database, claim)
    verify_next(database)
    clock.advance(8)
    found = read(database, job)
    assert times(found) == {
        "plan": [("plan", 0.0, 1.0, 1.0)],
        "group": [("compile", 1.0, 3.0, 7.0), ("verify", 7.0, 7.0, 7.0)],
        "problem": [("finish", 7.0, None, None)],
    }
    group = found.lanes[1]
    assert (group.kernels, group.name) == (2, f"group {str(group.group)[:8]}")
    assert [(phase.name, phase.seconds) for phase in group.phases] == [("cicc", 1.5)]
    assert found.at - found.created_at == 15.0


def test_a_step_that_waits_for_another_attempt_has_not_begun(database: Database, clock: FakeClock) -> None:
    job = add_job(database).id
    claim = claim_one(database, "plan")
    clock.advance(3)
    with database.write() as session:
        assert items.fail(session, claim, "no memory", retry=True) == "waiting"
    (lane,) = read(database, job).lanes
    assert [(step.state, step.attempt, step.started_at) for step in lane.steps] == [("waiting", 1, None)]


def test_lanes_beyond_the_limit_are_counted(database: Database) -> None:
    job = add_job(database, count=5).id
    plan_next(database, "a", "b", "c", groups=[["a"], ["b"], ["c"]])
    found = read(database, job, max_lanes=2)
    assert (len(found.lanes), found.lanes_left_out) == (2, 2)
    with database.read() as session:
        assert timeline(session, "0" * 32) is None


def test_phases_are_summed_over_groups_that_were_compiled_here(database: Database) -> None:
    add_job(database)
    plan_next(database, "a", "b", "c", groups=[["a", "b"], ["c"]])
    with database.read() as session:
        assert phase_timings(session).phases == []
    compile_next(database)
    compile_next(database)
    with database.read() as session:
        found = phase_timings(session)
    assert [(phase.name, phase.files, phase.seconds) for phase in found.phases] == [("cicc", 2, 3.0)]
    assert found.grouped == FileCosts(files=1, kernels=2, seconds=8.0)
    assert found.files_of_one == FileCosts(files=1, kernels=1, seconds=8.0)


@pytest.mark.parametrize(("kernels", "alone"), [(1, None), (2, 10.0 + 1 * 1.5), (5, 10.0 + 4 * 1.5)])
def test_the_estimate_pays_for_each_kernel_what_a_file_pays_once(
    kernels: int, alone: float | None, database: Database, clock: FakeClock
) -> None:
    phases = {"g++ (preprocessing 1)": 1.25, "cicc": 5.0, "ptxas": 2.0, "host": 1.0, "link": 0.25}
    row = {
        "id": "a" * 32,
        "target": "sm_80",
        "state": "compiled",
        "source": "b" * 64,
        "kernels": [{"build": str(n)} for n in range(kernels)],
        "phases": [{"name": name, "seconds": seconds} for name, seconds in phases.items()],
        "compile_seconds": {"wall": 10.0, "cpu": 9.0},
        "created_at": clock.now(),
    }
    with database.write() as session:
        session.execute(insert(core(GroupRow)).values(**row))
    with database.read() as session:
        assert phase_timings(session).alone_estimate == alone
