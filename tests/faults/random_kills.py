"""Kill a service's processes at random while jobs run, and hold what comes out against a run in which nothing died."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cukiln.types import Job
from storage.database.tables import LIVE
from tests.faults.asker import PAUSE_SECONDS as ASK_SECONDS
from tests.faults.asker import Asker
from tests.faults.contract import check_contract
from tests.faults.killed_service import KilledService, leave_environment, request, wait_until_ready
from tests.faults.small_disk import small_disk
from tests.support.processes.postgres_server import running_postgres

PAUSE_SECONDS = 1.0  # between two kills
KERNELS = 6  # candidates of each problem
ANOTHER_AFTER = 7  # kills: something else than a kill
END_SECONDS = 240.0  # after the last kill, in which all jobs have to end
Asked = Callable[[int, int], dict[str, Any]]
SHORT = "ck-"  # the name of a folder: the path of valkey's socket is in it


@dataclass
class Outcome:
    """`faults`: what must not be, in words; empty where all is well."""

    kills: int = 0
    jobs: int = 0
    done: int = 0
    wrong_winners: int = 0
    leftovers: int = 0
    requests: int = 0
    mismatches: int = 0
    faults: list[str] = field(default_factory=list)
    killed: dict[str, int] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def as_result(self) -> dict[str, Any]:
        return {"benchmark": "faults", **vars(self)}


def winners_of(service: KilledService, jobs: list[str]) -> dict[str, str]:
    """The winning candidate of each problem, by the job's number and the problem's name: of a prediction it is the same
    in every run."""
    return {
        f"{number}:{problem.name}": problem.winner.candidate
        for number, id in enumerate(jobs)
        for problem in _report(service, id).problems
        if problem.winner is not None
    }


def _report(service: KilledService, id: str) -> Job:
    return service.ask(lambda client: client.job(id))


def reference(jobs: int, kernels: int = KERNELS) -> dict[str, str]:
    """Of a service in which nothing dies."""
    leave_environment()
    with tempfile.TemporaryDirectory(prefix=SHORT) as folder:
        service = KilledService(Path(folder), seed=0)
        wait_until_ready(service)
        ids = [service.client.submit(request(number, kernels)).job for number in range(jobs)]
        for id in ids:
            service.client.wait(id)
        winners = winners_of(service, ids)
        left = service.stop()
    assert len(winners) == 2 * jobs and not left, (winners, left)
    return winners


def random_kills(
    expected: Mapping[str, str],
    kills: int,
    seed: int,
    *,
    kernels: int = KERNELS,
    on_postgres: bool = False,
    contract: int = 0,
    another_after: int = ANOTHER_AFTER,
    ask_seconds: float = ASK_SECONDS,
    asked: Asked = request,
    compiled: Path | None = None,
) -> Outcome:
    """`expected`: a `reference`, of so many jobs, with as many `kernels`. `on_postgres`: on a server of its own, which
    is crashed too. `contract`: examples of each call that schemathesis asks for in the end; 0: it does not.
    `another_after`: kills, something else is done. `ask_seconds`: between two requests of the asker. `asked`: the
    request of a job of two problems, by its number, with so many kernels. `compiled`: as of KilledService."""
    leave_environment()
    with tempfile.TemporaryDirectory(prefix=SHORT) as folder, ExitStack() as servers:
        postgres = servers.enter_context(running_postgres()) if on_postgres else None
        began = time.monotonic()
        outcome = Outcome(jobs=len(expected) // 2)
        disk = servers.enter_context(small_disk(Path(folder) / "data"))
        service = KilledService(Path(folder), seed, postgres, disk, compiled)
        try:
            wait_until_ready(service)
            asker = Asker(service.client.url, seed, ask_seconds)
            requests = [asked(number, kernels) for number in range(outcome.jobs)]
            _kill_and_check(service, asker, outcome, expected, kills, requests, another_after)
            if contract:
                checked = check_contract(service.client.url, Path(folder), examples=contract, seed=seed)
                outcome.requests += checked.requests
                outcome.mismatches += checked.mismatches
                outcome.faults += [checked.report] if checked.mismatches else []
        finally:
            left = service.stop()
    outcome.leftovers = len(left)
    outcome.faults += [f"left over: {each}" for each in left]
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def _kill_and_check(
    service: KilledService,
    asker: Asker,
    outcome: Outcome,
    expected: Mapping[str, str],
    kills: int,
    requests: list[dict[str, Any]],
    another_after: int,
) -> None:
    try:
        ids = asker.seen.jobs
        _kill_while_they_run(service, ids, kills, requests, another_after, outcome)
        reports = _wait_for_the_end(service, ids)
        winners = winners_of(service, ids)
        outcome.faults += service.wrong_in_its_data()
    finally:
        asker.stop()
    outcome.killed, outcome.others = dict(service.killed), dict(service.others)
    outcome.requests, outcome.mismatches = asker.requests, asker.mismatches
    outcome.faults += asker.wrong
    outcome.done = sum(report.state == "done" for report in reports)
    outcome.faults += [_words(report) for report in reports if report.state != "done"]
    wrong = {name for name in expected if winners.get(name) != expected[name]}
    outcome.wrong_winners = len(wrong)
    outcome.faults += [f"{name}: {winners.get(name)} won, not {expected[name]}" for name in sorted(wrong)]


def _kill_while_they_run(
    service: KilledService,
    ids: list[str],
    kills: int,
    requests: list[dict[str, Any]],
    another_after: int,
    outcome: Outcome,
) -> None:
    """Jobs are sent all along, so that something runs under every kill; `ids` gets theirs."""
    while outcome.kills < kills or len(ids) < outcome.jobs:
        if len(ids) < outcome.jobs and outcome.kills >= kills * len(ids) // outcome.jobs:
            ids.append(service.ask(lambda client: client.submit(requests[len(ids)])).job)
        number = outcome.kills + 1
        if number <= kills and (killed := service.kill_one(number)) is not None:
            outcome.kills = number
            sys.stderr.write(f"{number} {killed}\n")
            if number % another_after == 0:
                sys.stderr.write(f"{number}+ {service.do_another(number)}\n")
        time.sleep(PAUSE_SECONDS)


def _wait_for_the_end(service: KilledService, ids: list[str]) -> list[Job]:
    deadline = time.monotonic() + END_SECONDS
    while True:
        reports = [_report(service, id) for id in ids]
        if all(report.state not in LIVE for report in reports) or time.monotonic() > deadline:
            return reports
        time.sleep(1.0)


def _words(report: Job) -> str:
    problems = [(problem.name, problem.state, dict(problem.verdicts), problem.error) for problem in report.problems]
    return f"job {report.job} is {report.state}: {problems}"
