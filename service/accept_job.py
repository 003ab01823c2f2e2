"""A job request → its durable row, and a ticket for the planners where there is work.

The row comes first: once a caller has read the 202, neither a crash of this process nor a flushed Redis loses the job.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from codegen.generator import generator
from cukiln.types import FrontEntry, Job, WinnerRecord
from service.context import Alive, Service
from service.errors import refuse
from service.requests import JobRequest
from service.resolve import Resolved, resolve_jobs
from storage.items import waiting_counts
from storage.jobs import NewJob, NewProblem, create_job, unfinished_jobs
from storage.report_job import job_report
from storage.searches import MeasuredUnder, is_covered, search_entry
from storage.winners import get_winners
from workers import tickets

BUSY_RETRY_SECONDS = 30


@dataclass(frozen=True)
class Accepted:
    """The job as it is now; `cached` when nothing of it is left to do."""

    job: Job
    cached: bool


def accept_job(service: Service, request: JobRequest) -> Accepted:
    """Write the job and wake the planners. Raises Refused, and then nothing was written."""
    alive = service.alive()
    resolved = resolve_jobs(request, alive.known(service.settings.default_target), service.settings)
    with service.database.read() as session:
        winners = get_winners(session, [one.key for one in resolved])
    new = _new_job(service, request, resolved, winners, alive)
    with service.database.write() as session:
        if not all(problem.cached for problem in new.problems):
            require_room(unfinished_jobs(session), service.settings.max_queued_jobs)
        created = create_job(session, new)
    with service.database.read() as session:
        report = job_report(session, created.id, service.settings.toolchain_live_seconds)
        waiting = waiting_counts(session) if created.items else {}
    assert report is not None, "a job that was just written is there"
    if created.items and service.redis is not None:
        tickets.ensure_tickets(service.redis, tickets.PLAN, None, waiting.get((tickets.PLAN, None), created.items))
    return Accepted(report, created.cached)


def _new_job(
    service: Service,
    request: JobRequest,
    resolved: Sequence[Resolved],
    winners: Mapping[str, WinnerRecord],
    alive: Alive,
) -> NewJob:
    live = {one.device_class: alive.measures_under(one.device_class) for one in resolved}
    cached = [cached_entry(winners.get(one.key), one, request, live[one.device_class]) for one in resolved]
    # Who is told "cached" must find the bytes: where they are gone, the job runs, and its finish puts them back.
    lost = service.blobs.missing(digest for entry in cached if entry for digest in entry.blobs)
    problems = []
    for one, entry in zip(resolved, cached, strict=True):
        winner = entry.candidate if entry and lost.isdisjoint(entry.blobs) else None
        problems.append(
            NewProblem(
                name=one.name,
                operator=one.operator.name,
                problem=one.problem.canonical(),
                target=one.target,
                device_class=one.device_class,
                key=one.key,
                search=one.search.canonical(),
                cached=winner is not None,
                winner=winner,
            )
        )
    budget = request.budget.seconds if request.budget else None
    return NewJob(problems, request.priority, budget, request.workspace_limit_bytes, request.deterministic)


def cached_entry(
    record: WinnerRecord | None, asked: Resolved, request: JobRequest, live: Collection[MeasuredUnder]
) -> FrontEntry | None:
    """The kernel that answers without work: its record's searches contain the one asked, by today's generator and, on a
    GPU, under a driver and a test plan that a live one has."""
    if record is None:
        return None
    limit, deterministic = request.workspace_limit_bytes, request.deterministic
    wanted = search_entry(asked.search.canonical(), generator(asked.operator.name), limit, deterministic=deterministic)
    if not is_covered(record.searches, wanted, live):
        return None
    front = record.usable(limit, deterministic)
    return front[0] if front else None


def require_room(unfinished: int, at_most: int) -> None:
    """Raises Refused (429) where the service has enough to do."""
    if unfinished >= at_most:
        detail = f"{unfinished} jobs wait or run, at most {at_most} may. Nothing was queued; send it again later."
        headers = {"Retry-After": str(BUSY_RETRY_SECONDS)}
        raise refuse("too-many-jobs", detail, allowed={"jobs": at_most}, headers=headers)
