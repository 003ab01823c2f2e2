"""Kill a service's processes at random while jobs run, and hold what comes out against a run in which nothing died."""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cukiln.types import Job
from storage.judge import LIVE
from tests.faults.asker import Asker
from tests.faults.checks import damaged, once_settled
from tests.faults.contract import check_contract
from tests.faults.killed_service import KilledService, leave_environment, request, wait_until_ready
from tests.postgres_server import running_postgres

PAUSE_SECONDS = 1.0  # between two kills
ANOTHER_AFTER = 7  # kills: something else than a kill


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


def reference(folder: Path, jobs: int) -> dict[str, str]:
    """Of a service in which nothing dies."""
    service = KilledService(folder, seed=0)
    wait_until_ready(service)
    ids = [service.client.submit(request(number)).job for number in range(jobs)]
    for id in ids:
        service.client.wait(id)
    winners = winners_of(service, ids)
    left = service.stop()
    assert len(winners) == 2 * jobs and not left, (winners, left)
    return winners


def random_kills(
    jobs: int,
    kills: int,
    seed: int,
    *,
    folder: Path,
    within: float = 240.0,
    postgres: str | None = None,
    contract: int = 0,
) -> Outcome:
    """`within`: seconds after the last kill in which all jobs have to end. `postgres`: the URL of a server that may be
    crashed. `contract`: examples of each call that schemathesis asks for in the end; 0: it does not."""
    leave_environment()
    began = time.monotonic()
    expected = reference(folder / "reference", jobs)
    service = KilledService(folder / "killed", seed, postgres)
    outcome = Outcome(jobs=jobs)
    try:
        wait_until_ready(service)
        asker = Asker(service.client.url, seed)
        try:
            ids = _kill_while_they_run(service, jobs, kills, outcome)
            reports = _wait_for_the_end(service, ids, within)
        finally:
            asker.stop()
        outcome.killed, outcome.others = dict(service.killed), dict(service.others)
        outcome.requests, outcome.mismatches = asker.requests, asker.mismatches
        outcome.faults += asker.wrong
        outcome.done = sum(report.state == "done" for report in reports)
        outcome.faults += [_words(report) for report in reports if report.state != "done"]
        found = winners_of(service, ids)
        wrong = {name for name in expected if found.get(name) != expected[name]}
        outcome.wrong_winners = len(wrong)
        outcome.faults += [f"{name}: {found.get(name)} won, not {expected[name]}" for name in sorted(wrong)]
        outcome.faults += once_settled(service.settings) + damaged(service.settings)
        if contract:
            checked = check_contract(service.client.url, folder, examples=contract, seed=seed)
            outcome.requests += checked.requests
            outcome.mismatches += checked.mismatches
            outcome.faults += [checked.report] if checked.mismatches else []
    finally:
        left = service.stop()
    outcome.leftovers = len(left)
    outcome.faults += [f"left over: {one}" for one in left]
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def _kill_while_they_run(service: KilledService, jobs: int, kills: int, outcome: Outcome) -> list[str]:
    """Jobs are sent all along, so that something runs under every kill."""
    ids: list[str] = []
    while outcome.kills < kills or len(ids) < jobs:
        if len(ids) < jobs and outcome.kills >= kills * len(ids) // jobs:
            ids.append(service.ask(lambda client: client.submit(request(len(ids)))).job)
        if outcome.kills < kills and (killed := service.kill_one()) is not None:
            outcome.kills += 1
            another = service.do_another() if outcome.kills % ANOTHER_AFTER == 0 else None
            sys.stderr.write(f"{outcome.kills}: {killed}{f', {another}' if another else ''}\n")
        time.sleep(PAUSE_SECONDS)
    return ids


def _wait_for_the_end(service: KilledService, ids: list[str], within: float) -> list[Job]:
    deadline = time.monotonic() + within
    while True:
        reports = [_report(service, id) for id in ids]
        if all(report.state not in LIVE for report in reports) or time.monotonic() > deadline:
            return reports
        time.sleep(1.0)


def _words(report: Job) -> str:
    problems = [(one.name, one.state, dict(one.verdicts), one.error) for one in report.problems]
    return f"job {report.job} is {report.state}: {problems}"


def in_a_folder_of_its_own(
    jobs: int, kills: int, seed: int, *, on_postgres: bool = False, contract: int = 0
) -> Outcome:
    # Short: the path of valkey's socket is in it.
    with tempfile.TemporaryDirectory(prefix="ck-") as folder, ExitStack() as servers:
        postgres = servers.enter_context(running_postgres()) if on_postgres else None
        return random_kills(jobs, kills, seed, folder=Path(folder), postgres=postgres, contract=contract)
