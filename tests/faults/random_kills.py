"""Kill a service's processes at random while jobs run, and hold what comes out against a run in which nothing died."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import select

from cukiln.types import Job
from storage.database import Database
from storage.tables import BuildRow, DemandRow, GroupRow, ItemRow, JobProblemRow, JobRow, VerdictRow
from tests.faults.killed_service import KilledService, leave_environment, request, wait_until_ready

ENDED = ("done", "partial", "failed", "cancelled")
PAUSE_SECONDS = 1.0  # between two kills


@dataclass
class Outcome:
    """`faults`: what must not be, in words; empty where all is well."""

    kills: int = 0
    jobs: int = 0
    done: int = 0
    wrong_winners: int = 0
    leftovers: int = 0
    faults: list[str] = field(default_factory=list)
    killed: dict[str, int] = field(default_factory=dict)
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


def random_kills(jobs: int, kills: int, seed: int, *, within: float, folder: Path) -> Outcome:
    """`within`: seconds after the last kill in which all jobs have to end."""
    leave_environment()
    began = time.monotonic()
    expected = reference(folder / "reference", jobs)
    service = KilledService(folder / "killed", seed)
    outcome = Outcome(jobs=jobs)
    try:
        wait_until_ready(service)
        ids = _kill_while_they_run(service, jobs, kills, outcome)
        outcome.killed = dict(service.killed)
        reports = _wait_for_the_end(service, ids, within)
        outcome.done = sum(report.state == "done" for report in reports)
        outcome.faults += [_words(report) for report in reports if report.state != "done"]
        found = winners_of(service, ids)
        wrong = {name for name in expected if found.get(name) != expected[name]}
        outcome.wrong_winners = len(wrong)
        outcome.faults += [f"{name}: {found.get(name)} won, not {expected[name]}" for name in sorted(wrong)]
    finally:
        left = service.stop()
    outcome.leftovers = len(left)
    outcome.faults += [f"left over: {one}" for one in left] + in_database(service.database_url)
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
            sys.stderr.write(f"{outcome.kills}: {killed}\n")
        time.sleep(PAUSE_SECONDS)
    return ids


def _wait_for_the_end(service: KilledService, ids: list[str], within: float) -> list[Job]:
    deadline = time.monotonic() + within
    while True:
        reports = [_report(service, id) for id in ids]
        if all(report.state in ENDED for report in reports) or time.monotonic() > deadline:
            return reports
        time.sleep(1.0)


def _words(report: Job) -> str:
    problems = [(one.name, one.state, dict(one.verdicts), one.error) for one in report.problems]
    return f"job {report.job} is {report.state}: {problems}"


def in_database(url: str) -> list[str]:
    """Rows that must not be once all jobs have ended."""
    database = Database(url)
    try:
        with database.read() as session:
            queries = {
                "an item has not ended": select(ItemRow.kind).where(ItemRow.state.in_(("waiting", "claimed"))),
                "a job has not ended": select(JobRow.state).where(JobRow.state.in_(("queued", "running"))),
                "a problem has not ended": select(JobProblemRow.name).where(
                    JobProblemRow.state.in_(("queued", "running"))
                ),
                "a demand is left": select(DemandRow.build),
                "a group compiles": select(GroupRow.id).where(GroupRow.state == "compiling"),
                "a build did not compile": select(BuildRow.log).where(BuildRow.state != "ok"),
                "a kernel is not right": select(VerdictRow.message).where(VerdictRow.verdict != "ok"),
            }
            return [f"{what}: {row}" for what, query in queries.items() for row in session.scalars(query)]
    finally:
        database.dispose()


def in_a_folder_of_its_own(jobs: int, kills: int, seed: int, *, within: float = 240.0) -> Outcome:
    # Short: the path of valkey's socket is in it.
    with tempfile.TemporaryDirectory(prefix="ck-") as folder:
        return random_kills(jobs, kills, seed, within=within, folder=Path(folder))
