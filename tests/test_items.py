"""Items: which one is claimed, by whom, and what becomes of lost claims."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from storage import items, jobs
from storage.clock import FakeClock
from storage.database import Database
from storage.errors import LostClaim
from storage.items import Claim, NewItem, Renewal
from storage.new_items import parse_plan_ref, plan_ref
from storage.tables import ItemRow
from storage.toolchains import live_toolchains, register_toolchain
from tests.fixtures_storage import *  # noqa: F403 - fixtures
from tests.fixtures_storage import add_job, claim_one, plan_next

SPAWN = multiprocessing.get_context("spawn")
KINDS = ("finish", "compile", "verify")


def add(database: Database, *new: NewItem) -> int:
    with database.write() as session:
        return items.add_items(session, new)


def take(database: Database, kinds: Any = KINDS, targets: Any = None, lease: float = 5.0) -> Claim | None:
    with database.write() as session:
        return items.claim(session, kinds, targets, "w", lease)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (NewItem("verify", "a", priority=1), NewItem("finish", "b", priority=0, predicted_seconds=9)),
        (NewItem("finish", "a"), NewItem("compile", "b", predicted_seconds=9)),
        (NewItem("compile", "a"), NewItem("verify", "b", predicted_seconds=9)),
        (NewItem("compile", "a", predicted_seconds=2), NewItem("compile", "b", predicted_seconds=1)),
    ],
    ids=["priority", "finish before compile", "compile before verify", "longest first"],
)
@pytest.mark.parametrize("better_is_older", [True, False])
def test_the_best_waiting_item_is_claimed(
    database: Database, better: NewItem, worse: NewItem, better_is_older: bool
) -> None:
    add(database, *((better, worse) if better_is_older else (worse, better)))
    assert [claim.ref for claim in (take(database), take(database)) if claim] == ["a", "b"]
    assert take(database) is None


def test_of_equal_items_the_oldest_is_claimed(database: Database) -> None:
    add(database, *(NewItem("compile", ref) for ref in ("b", "a", "c")))
    assert [claim.ref for claim in (take(database), take(database), take(database)) if claim] == ["b", "a", "c"]


def test_a_worker_gets_only_its_kinds_and_targets(database: Database) -> None:
    add(database, NewItem("compile", "a", target="sm_90a"), NewItem("plan", "b"))
    assert take(database, KINDS, ["sm_80"]) is None
    anything = take(database, ["plan", "compile"], ["sm_80"])
    assert anything is not None and anything.ref == "b"  # an item without a target fits every worker
    mine = take(database, KINDS, ["sm_80", "sm_90a"])
    assert mine is not None and (mine.ref, mine.target) == ("a", "sm_90a")


def add_compiles(database: Database, job: str, count: int) -> None:
    add(database, *(NewItem("compile", f"{job}-{n}", job_id=job, predicted_seconds=4.0) for n in range(count)))


def jobs_served(database: Database, turns: int, kinds: Any = KINDS) -> list[str | None]:
    """Whose item is claimed, turn after turn, each ended before the next."""
    served = []
    for _ in range(turns):
        claim = claim_one(database, *kinds)
        served.append(claim.job_id)
        with database.write() as session:
            items.complete(session, claim)
    return served


def test_jobs_of_one_priority_take_turns_whatever_they_brought(database: Database, clock: FakeClock) -> None:
    large = add_job(database).id
    add_compiles(database, large, 20)
    assert jobs_served(database, 3) == [large] * 3
    under_way = claim_one(database, "compile")
    clock.advance(1)
    small = add_job(database).id
    add_compiles(database, small, 4)
    served = jobs_served(database, 6)
    # The newcomer at once, but no more often than the other from then on.
    assert served[0] == small
    assert Counter(served[:4]) == {small: 2, large: 2}
    assert under_way.job_id == large


def test_a_turn_is_as_long_as_its_work_is_predicted_to_be(database: Database) -> None:
    first, second = add_job(database).id, add_job(database).id
    add(database, *(NewItem("compile", f"a{n}", job_id=first, predicted_seconds=8.0) for n in range(9)))
    add(database, *(NewItem("compile", f"b{n}", job_id=second, predicted_seconds=2.0) for n in range(9)))
    assert Counter(jobs_served(database, 10)) == {first: 2, second: 8}


def test_a_job_that_could_not_go_on_does_not_catch_up_with_what_the_others_used(database: Database) -> None:
    starved, busy = add_job(database).id, add_job(database).id
    add_compiles(database, busy, 20)
    assert jobs_served(database, 10) == [busy] * 10
    under_way = claim_one(database, "compile")
    add_compiles(database, starved, 10)
    assert Counter(jobs_served(database, 10)) == {starved: 6, busy: 4}
    assert under_way.job_id == busy


def test_priority_goes_before_turns(database: Database) -> None:
    urgent, other = add_job(database, priority="high").id, add_job(database).id
    add(database, *(NewItem("compile", f"u{n}", job_id=urgent, priority=10) for n in range(5)))
    add_compiles(database, other, 5)
    assert jobs_served(database, 5) == [urgent] * 5


def test_an_item_is_added_once_whatever_became_of_it(database: Database) -> None:
    assert add(database, NewItem("compile", "a"), NewItem("verify", "a")) == 2
    assert add(database, NewItem("compile", "a"), NewItem("compile", "b")) == 1
    claim = claim_one(database, "compile")
    with database.write() as session:
        items.complete(session, claim)
    assert add(database, NewItem("compile", "a")) == 0
    assert claim.ref == "a"


def test_waiting_items_are_counted_by_kind_and_target(database: Database) -> None:
    add(database, NewItem("plan", "a"), NewItem("compile", "b", "sm_80"), NewItem("compile", "c", "sm_80"))
    add(database, NewItem("compile", "d", "sm_90a"))
    claim_one(database, "plan")
    with database.read() as session:
        assert items.waiting_counts(session) == {("compile", "sm_80"): 2, ("compile", "sm_90a"): 1}


def _claim_all(url: str, worker: str, results: Any) -> None:
    database = Database(url)
    while True:
        with database.write() as session:
            claim = items.claim(session, KINDS, None, worker, 60.0)
        if claim is None:
            return
        results.put((claim.ref, claim.token))


def test_processes_that_claim_at_once_never_get_the_same_item(database: Database, database_url: str) -> None:
    add(database, *(NewItem(KINDS[number % 3], f"i{number}") for number in range(60)))
    results: Any = SPAWN.Queue()
    processes = [SPAWN.Process(target=_claim_all, args=(database_url, f"w{n}", results)) for n in range(4)]
    for process in processes:
        process.start()
    claimed = [results.get(timeout=120) for _ in range(60)]
    for process in processes:
        process.join(120)
    assert Counter(ref for ref, _ in claimed) == {f"i{number}": 1 for number in range(60)}
    assert len({token for _, token in claimed}) == 60
    assert results.empty()


def test_an_expired_lease_is_claimed_again_under_another_token(database: Database, clock: FakeClock) -> None:
    add(database, NewItem("compile", "a", "sm_80", priority=3))
    first = claim_one(database, "compile", lease=5.0)
    clock.advance(4.9)
    with database.write() as session:
        assert items.expire_leases(session) == []
    clock.advance(0.2)
    with database.write() as session:
        (expired,) = items.expire_leases(session)
    assert (expired.ref, expired.target, expired.state) == ("a", "sm_80", "waiting")
    second = claim_one(database, "compile")
    assert (second.item_id, second.attempt) == (first.item_id, 2)
    assert second.token != first.token


def test_a_renewed_lease_does_not_expire(database: Database, clock: FakeClock) -> None:
    add(database, NewItem("compile", "a"))
    claim = claim_one(database, "compile", lease=5.0)
    for _ in range(5):
        clock.advance(4)
        with database.write() as session:
            assert items.renew(session, claim, 5.0) is Renewal.HELD
            assert items.expire_leases(session) == []


@pytest.mark.parametrize("act", ["complete", "fail", "release"])
def test_a_lost_claim_writes_nothing(database: Database, clock: FakeClock, act: str) -> None:
    add(database, NewItem("compile", "a"))
    lost = claim_one(database, "compile", lease=5.0)
    clock.advance(6)
    with database.write() as session:
        items.expire_leases(session)
    holder = claim_one(database, "compile")
    with pytest.raises(LostClaim, match="nothing was written"), database.write() as session:
        register_toolchain(session, "written by the loser", {}, [])
        match act:
            case "complete":
                items.complete(session, lost)
            case "fail":
                items.fail(session, lost, "e", retry=True)
            case _:
                items.release(session, lost)
    with database.read() as session:
        assert live_toolchains(session, 60) == []
    with database.write() as session:
        items.complete(session, holder)  # the holder is not disturbed


def test_a_claim_is_completed_once(database: Database) -> None:
    add(database, NewItem("compile", "a"))
    claim = claim_one(database, "compile")
    with database.write() as session:
        items.complete(session, claim)
    with pytest.raises(LostClaim), database.write() as session:
        items.complete(session, claim)


def test_renew_says_why_a_claim_is_over(database: Database, clock: FakeClock) -> None:
    add(database, NewItem("compile", "a"))
    claim = claim_one(database, "compile")
    with database.write() as session:
        assert items.renew(session, replace(claim, token="other"), 5) is Renewal.LOST
        assert items.renew(session, replace(claim, item_id=99), 5) is Renewal.LOST
        items.complete(session, claim)
        assert items.renew(session, claim, 5) is Renewal.LOST
    job = add_job(database)
    planning = claim_one(database, "plan")
    with database.write() as session:
        jobs.cancel_job(session, job.id)
        assert items.renew(session, planning, 5) is Renewal.CANCELLED
    add_job(database, budget_seconds=10.0)
    planning = claim_one(database, "plan", lease=60)
    clock.advance(9)
    with database.write() as session:
        assert items.renew(session, planning, 60) is Renewal.HELD
        clock.advance(1)
        assert items.renew(session, planning, 60) is Renewal.DEADLINE


def test_the_first_claim_starts_the_job_and_its_budget(database: Database, clock: FakeClock) -> None:
    job = add_job(database, count=40, budget_seconds=30.0)
    clock.advance(100)  # waiting in the queue does not use the budget up
    claim_one(database, "plan")
    started = clock.now()
    clock.advance(5)
    claim_one(database, "plan")
    with database.read() as session:
        status = jobs.job_state(session, job.id)
    assert status is not None
    assert (status.state, status.started_at, status.deadline) == ("running", started, started + 30)


def test_items_past_their_jobs_deadline_are_passed_over_but_finishing_is_not(
    database: Database, clock: FakeClock
) -> None:
    job = add_job(database, budget_seconds=10.0)
    plan_next(database, "k")
    add(database, NewItem("finish", "77", job_id=job.id))
    clock.advance(10)
    assert take(database, ["compile", "verify"]) is None
    finishing = take(database, ["compile", "finish"])
    assert finishing is not None and finishing.ref == "77"


def test_a_failed_attempt_is_retried_until_no_attempt_is_left(database: Database) -> None:
    add_job(database)
    states = []
    for _ in range(3):
        claim = claim_one(database, "plan")
        with database.write() as session:
            states.append(items.fail(session, claim, "the disk is full", retry=True, max_attempts=3))
    assert states == ["waiting", "waiting", "failed"]
    assert take(database, ["plan"]) is None


def test_what_cannot_be_retried_fails_at_once(database: Database) -> None:
    job = add_job(database)
    claim = claim_one(database, "plan")
    with database.write() as session:
        assert items.fail(session, claim, "no such operator", retry=False) == "failed"
        status = jobs.job_state(session, job.id)
    assert status is not None and status.state == "failed"
    assert status.error is not None and "no such operator" in status.error


def test_an_item_whose_workers_keep_dying_fails(database: Database, clock: FakeClock) -> None:
    job = add_job(database)
    states = []
    for _ in range(3):
        claim_one(database, "plan", worker="w7")
        clock.advance(6)
        with database.write() as session:
            states.extend(expired.state for expired in items.expire_leases(session, max_attempts=3))
    with database.read() as session:
        status = jobs.job_state(session, job.id)
    assert states == ["waiting", "waiting", "failed"]
    assert status is not None and status.state == "failed"
    assert status.error is not None and "worker w7 stopped answering during attempt 3 of 3" in status.error


def test_a_released_item_waits_again_and_its_attempt_does_not_count(database: Database) -> None:
    add(database, NewItem("compile", "a"))
    for _ in range(5):
        claim = claim_one(database, "compile")
        assert claim.attempt == 1
        with database.write() as session:
            items.release(session, claim)
    with database.read() as session:
        row = session.get_one(ItemRow, claim.item_id)
        assert (row.state, row.token, row.worker) == ("waiting", None, None)


def test_a_plan_items_ref_names_its_problems() -> None:
    assert parse_plan_ref(plan_ref("j" * 32, 32, 63)) == ("j" * 32, 32, 63)
    assert len(plan_ref("j" * 32, 9_968, 9_999)) <= 64
