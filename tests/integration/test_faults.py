"""Whatever is killed, every accepted job ends with the winners of a run in which nothing died, and nothing is left.
`make test-faults` kills more."""

from __future__ import annotations

import json
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from sqlalchemy import text

from cukiln import Client
from service.http.answers import PROBLEM_JSON
from service.http.errors import TYPE_PREFIX
from storage.config.settings import load_settings
from storage.database.database_errors import DATABASE_AWAY
from storage.database.session import Database
from tests.faults import asker, schedule
from tests.faults.answers import wrong_in
from tests.faults.killed_service import request
from tests.faults.random_kills import Asked, random_kills, reference
from tests.faults.seen import Seen
from tests.faults.small_disk import SmallDisk, is_possible, small_disk
from tests.support.fixtures.compile import compiled_in_this_run
from tests.support.fixtures.queue import wait_for
from tests.support.fixtures.service import Started
from tests.support.processes.postgres_server import binaries, running_postgres
from tests.support.run.each_run import one_each_run
from tests.support.run.places import PROBE

KERNELS = 2


def cheap(number: int, kernels: int) -> dict[str, Any]:
    """Kernels that are compiled and verified soonest."""
    ways = ["copy", "workspace", "atomic"][:kernels]
    searches = [{"tunables": {"factor": [2 * number + more], "way": ways}} for more in (1, 2)]
    problems = [{"operator": "probe", "n": 1000, "scale": 2.5, "search": search} for search in searches]
    return {"target": "sm_80", "problems": problems}


@dataclass(frozen=True)
class Run:
    """`another_after` so many kills something else follows: `others` are among it."""

    seed: int
    jobs: int
    kills: int
    another_after: int
    others: list[str]
    on_postgres: bool = False
    asked: Asked = request


OTHERS = ["torn log", "full disk", "read-only blobs", "empty queue"]
LEAST = Run(59117, jobs=1, kills=4, another_after=1, others=OTHERS, asked=cheap)
# Kills of six kinds and more each, of all ten together. Beside LEAST, `make test` kills the others in `test_serve` and
# `of_service/http/test_large_bodies.py`, and crashes a PostgreSQL below.
RUNS = {
    "sqlite": Run(11817, jobs=2, kills=8, another_after=2, others=["full disk", "read-only blobs", "empty queue"]),
    "postgres": Run(19180, jobs=2, kills=8, another_after=2, others=["torn log", "database"], on_postgres=True),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, at_work: Started) -> dict[str, str]:
    """The winners of LEAST, where nothing dies."""
    data = tmp_path_factory.mktemp("reference")
    settings = load_settings(data_dir=data, port=0, workers=1, operator_path=str(PROBE))
    with at_work(settings) as running, Client(running.url, cache_dir=data / "client") as client:
        job = client.wait(client.submit(cheap(0, KERNELS)))
    return {f"0:{problem.name}": problem.winner.candidate for problem in job.problems if problem.winner is not None}


def test_the_seeds_draw_every_kind_of_kill_and_what_else_is_to_happen() -> None:
    runs = [*RUNS.values(), LEAST]
    kinds = [{schedule.kill(run.seed, kill + 1).chosen for kill in range(run.kills)} for run in runs]
    assert set.union(*kinds[:2]) == {*schedule.KINDS}
    assert min(map(len, kinds[:2])) >= 6
    assert kinds[2] == {"tool", "worker child", "worker", "api"}
    for run in runs:
        after = range(run.another_after, run.kills + 1, run.another_after)
        assert {schedule.another(run.seed, kill).chosen for kill in after} >= {*run.others}


def check(run: Run, expected: dict[str, str], compiled: Path | None = None) -> None:
    assert len(expected) == 2 * run.jobs
    outcome = random_kills(
        expected,
        run.kills,
        run.seed,
        kernels=KERNELS,
        on_postgres=run.on_postgres,
        another_after=run.another_after,
        ask_seconds=0.3,
        asked=run.asked,
        compiled=compiled,
    )
    assert outcome.faults == []
    assert (outcome.done, outcome.wrong_winners, outcome.leftovers, outcome.mismatches) == (run.jobs, 0, 0, 0)
    assert sum(outcome.killed.values()) == run.kills
    assert outcome.requests > 0
    if run.on_postgres or is_possible():  # else this user may mount nothing in a namespace of its own
        assert Counter(outcome.others) >= Counter(run.others)


@one_each_run("what was killed continues", 0)
def test_kills_a_spoilt_disk_and_a_lost_queue_change_nothing_of_what_comes_out(
    expected: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("CUKILN_WORKERS", "1")
    monkeypatch.setenv("OPERATOR_PATH", str(PROBE))
    check(LEAST, expected, compiled_in_this_run(tmp_path_factory))


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_more_kills_and_a_crashed_database_change_nothing_of_what_comes_out(name: str) -> None:
    run = RUNS[name]
    if run.on_postgres and binaries() is None:
        pytest.skip("PostgreSQL is not installed. Debian, Ubuntu: apt install postgresql")
    check(run, reference(jobs=run.jobs, kernels=KERNELS))


def test_a_crashed_postgres_is_away_for_a_moment_and_keeps_what_was_committed() -> None:
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed. Debian, Ubuntu: apt install postgresql")
    with running_postgres() as url:
        database = Database(url)
        with database.write() as session:
            session.execute(text("CREATE TABLE kept AS SELECT 17 AS number"))
        with pytest.raises(DATABASE_AWAY), database.read() as session:
            psutil.Process(session.scalar(text("SELECT pg_backend_pid()"))).kill()
            session.scalar(text("SELECT number FROM kept"))

        def answered() -> bool:
            try:
                with database.read() as session:
                    return bool(session.scalar(text("SELECT number FROM kept")) == 17)
            except DATABASE_AWAY:
                return False

        wait_for(answered)
        database.dispose()


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


def test_a_fault_follows_from_the_seed_and_its_number_alone() -> None:
    faults = [schedule.kill(3, number) for number in range(1, 301)]
    assert faults[200:] == [schedule.kill(3, number) for number in range(201, 301)]
    assert faults != [schedule.kill(4, number) for number in range(1, 301)]
    assert {fault.chosen for fault in faults} == {*schedule.KINDS}
    others = {schedule.another(3, number).chosen for number in range(1, 301)}
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


def test_an_asker_that_has_ended_by_itself_is_not_taken_for_one_that_found_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(*_: object) -> httpx.Response:
        raise SystemExit

    monkeypatch.setattr(asker, "ASKS", [end])
    monkeypatch.setattr(asker, "LOOKS", 0)
    before = set(threading.enumerate())
    asking = asker.Asker("http://127.0.0.1:1", seed=0)
    for thread in set(threading.enumerate()) - before:
        thread.join(30.0)
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
