"""Whatever is killed, every accepted job ends with the winners of a run in which nothing died, and nothing is left.
`make test-faults` kills more."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from service.http.answers import PROBLEM_JSON
from service.http.errors import TYPE_PREFIX
from tests.faults import asker, schedule
from tests.faults.answers import wrong_in
from tests.faults.random_kills import random_kills, reference
from tests.faults.seen import Seen
from tests.faults.small_disk import SmallDisk, is_possible, small_disk
from tests.support.fixtures.queue import wait_for
from tests.support.processes.postgres_server import binaries

KERNELS, KILLS = 2, 8
# Kills of six kinds and more each, of all ten together. After every second something else follows, these among it.
ON_SQLITE, ON_POSTGRES = 11817, 19180
OTHERS = {
    ON_SQLITE: ["full disk", "read-only blobs", "empty queue"],
    ON_POSTGRES: ["torn log", "database"],
}


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    return reference(jobs=2, kernels=KERNELS)


def test_the_seeds_draw_every_kind_of_kill_and_what_else_is_to_happen() -> None:
    kinds = [{schedule.kill(seed, kill + 1).drawn for kill in range(KILLS)} for seed in OTHERS]
    assert set.union(*kinds) == {*schedule.KINDS}
    assert min(map(len, kinds)) >= 6
    for seed, others in OTHERS.items():
        drawn = {schedule.another(seed, kill + 1).drawn for kill in range(1, KILLS, 2)}
        assert drawn >= {*others}


@pytest.mark.parametrize("seed", [pytest.param(ON_SQLITE, id="sqlite"), pytest.param(ON_POSTGRES, id="postgres")])
def test_kills_a_spoilt_disk_a_lost_queue_and_a_crashed_database_change_nothing_of_what_comes_out(
    expected: dict[str, str], seed: int
) -> None:
    on_postgres = seed == ON_POSTGRES
    if on_postgres and binaries() is None:
        pytest.skip("PostgreSQL is not installed. Debian, Ubuntu: apt install postgresql")
    outcome = random_kills(
        expected, KILLS, seed, kernels=KERNELS, on_postgres=on_postgres, another_after=2, ask_seconds=0.1
    )
    assert outcome.faults == []
    assert (outcome.done, outcome.wrong_winners, outcome.leftovers, outcome.mismatches) == (2, 0, 0, 0)
    assert sum(outcome.killed.values()) == KILLS
    assert outcome.requests > 0
    if on_postgres or is_possible():  # else this user may mount nothing in a namespace of its own
        assert Counter(outcome.others) >= Counter(OTHERS[seed])


# ---- the harness itself


def test_a_small_disk_is_full_or_closed_for_what_runs_and_gone_afterwards(tmp_path: Path) -> None:
    if not is_possible():
        pytest.skip("this user may mount nothing in a namespace of its own")
    folder = tmp_path / "data"
    write = ["sh", "-c", 'head -c 9999 /dev/zero >> "$1/blobs/file"', "sh", str(folder)]

    def fault(disk: SmallDisk) -> str:
        return subprocess.run(disk.inside(*write), capture_output=True, text=True, check=False).stderr

    with small_disk(folder) as disk:
        assert disk is not None
        (disk.seen_from_here / "blobs").mkdir()
        assert fault(disk) == ""
        disk.fill()
        assert "No space left on device" in fault(disk)
        disk.empty()
        disk.close_blobs()
        assert "Read-only file system" in fault(disk)
        disk.open_blobs()
        assert fault(disk) == ""
    folder.rmdir()


def test_a_fault_is_drawn_by_the_seed_and_its_number_alone() -> None:
    drawn = [schedule.kill(3, number) for number in range(1, 301)]
    assert drawn[200:] == [schedule.kill(3, number) for number in range(201, 301)]
    assert drawn != [schedule.kill(4, number) for number in range(1, 301)]
    assert {fault.drawn for fault in drawn} == {*schedule.KINDS}
    others = {schedule.another(3, number).drawn for number in range(1, 301)}
    assert others == {*schedule.OTHERS}


NOT_FOUND = {"type": f"{TYPE_PREFIX}job-not-found", "status": 404}
PROBLEM_HEADERS = {"content-type": PROBLEM_JSON}


@pytest.mark.parametrize(
    "body",
    [b"{}", b"[]", b'{"type": "', b'{"type": 1, "status": 404}', json.dumps({**NOT_FOUND, "status": 400}).encode()],
)
def test_what_is_no_problem_of_the_service_is_a_wrong_answer(body: bytes) -> None:
    assert wrong_in(404, PROBLEM_HEADERS, json.dumps(NOT_FOUND).encode()) is None
    assert wrong_in(404, PROBLEM_HEADERS, body) is not None


def test_an_answer_that_cannot_be_checked_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> httpx.Response:
        raise KeyError("type")

    monkeypatch.setattr(asker, "ASKS", [fail])
    monkeypatch.setattr(asker, "LOOKS", 0)
    asking = asker.Asker("http://127.0.0.1:1", seed=0)
    wait_for(lambda: asking.mismatches > 1)
    asking.stop()
    assert "KeyError('type')" in asking.wrong[0]


def test_an_asker_that_has_ended_by_itself_is_not_taken_for_one_that_found_nothing() -> None:
    asking = asker.Asker("no address", seed=0)
    asking._over.set()
    asking._thread.join()
    with pytest.raises(AssertionError, match="ended before"):
        asking.stop()


JOB, KERNEL = "/v1/jobs/a", "/v1/kernels/k"
DONE = {"state": "done", "problems": [{"key": "k", "winner": {}}]}
REVISION = {"revision": 2, "front": [1]}


@pytest.mark.parametrize(
    ("path", "first", "second"),
    [
        (JOB, DONE, {**DONE, "state": "failed"}),
        (JOB, DONE, {**DONE, "state": "running"}),
        (JOB, DONE, None),
        (KERNEL, REVISION, {**REVISION, "front": [2]}),
        (KERNEL, REVISION, None),
    ],
)
def test_a_job_ends_once_and_a_revision_has_one_content(path: str, first: object, second: object) -> None:
    seen = Seen(jobs=["a"])
    answered = _answers(seen)
    assert answered(JOB, {**DONE, "state": "running"}) is None
    assert answered(path, first) is None
    assert answered(path, first) is None
    assert answered(KERNEL, {"revision": 3, "front": [3]}) is None
    assert answered(path, second) is not None


def _answers(seen: Seen) -> Callable[[str, object], str | None]:
    return lambda path, body: seen.changed(path, 404 if body is None else 200, json.dumps(body).encode())
