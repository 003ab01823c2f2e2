"""Job requests → their durable rows, and tickets for the planners where there is work.

The rows come first: once a caller has read the 202, neither a crash of this process nor a flushed Redis loses the job.
Requests that come at once are taken together (`service.together`): the same body is read once, and one transaction
writes the jobs of many.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from codegen.generator import generator
from cukiln.types import FrontEntry, Job, WinnerRecord
from service.body import json_body
from service.context import Alive, Service
from service.errors import Refused, refuse
from service.requests import JobRequest, read_request
from service.resolve import Resolved, resolve_jobs
from storage.database import Session
from storage.items import waiting_counts
from storage.jobs import CreatedJob, NewJob, NewProblem, Priority, create_jobs, job_states, unfinished_jobs
from storage.report_job import job_report
from storage.searches import MeasuredUnder, is_covered, search_entry
from storage.winners import get_winners
from workers import tickets

BUSY_RETRY_SECONDS = 30
PROBLEMS_AT_ONCE = 500
"""Of several jobs in one transaction; a larger job has one of its own."""


@dataclass(frozen=True)
class Terms:
    """What holds for all problems of a job."""

    priority: Priority = "normal"
    budget_seconds: float | None = None
    workspace_limit_bytes: int | None = None
    deterministic: bool = False


@dataclass(frozen=True)
class Accepted:
    """The job as it is now; `cached` when nothing of it is left to do."""

    job: Job
    cached: bool


@dataclass(frozen=True)
class _New:
    """A job to be written, and what asked for it: equal requests are equal jobs."""

    place: int
    asked: bytes
    job: NewJob


def accept_jobs(service: Service, bodies: Sequence[bytes]) -> list[Accepted | Exception]:
    """Write the job of each body and wake the planners. What is wrong with a body, and what fails while its job is
    written, is its outcome, and nothing is kept of it. Raises where nothing can be read."""
    outcomes: dict[int, Accepted | Exception] = {}
    read: dict[bytes, NewJob | Exception] = _new_jobs(service, dict.fromkeys(bodies))
    new = []
    for place, body in enumerate(bodies):
        job = read[body]
        if isinstance(job, NewJob):
            new.append(_New(place, body, job))
        else:
            outcomes[place] = job
    for some in _transactions(new):
        try:
            outcomes |= _write(service, some)
        except Exception as error:  # noqa: BLE001 - raised again for each of them
            outcomes.update((one.place, error) for one in some)
    return [outcomes[place] for place in range(len(bodies))]


def accept_problems(service: Service, resolved: Sequence[Resolved], terms: Terms, alive: Alive) -> Accepted:
    """Write a job of problems that are known to be right, and wake the planners. Raises Refused, and then nothing was
    written."""
    outcome = _write(service, [_New(0, b"", _new_job(service, terms, resolved, alive))])[0]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _new_jobs(service: Service, bodies: Collection[bytes]) -> dict[bytes, NewJob | Exception]:
    """What each body asks for, with what is cached of it."""
    alive, found = service.alive(), dict[bytes, NewJob | Exception]()
    for body in bodies:
        try:
            found[body] = _read(service, body, alive)
        except Exception as error:  # noqa: BLE001 - a defect, too, ends the request that has it, not those beside it
            found[body] = error
    return found


def _read(service: Service, body: bytes, alive: Alive) -> NewJob:
    settings = service.settings
    request = read_request(JobRequest, json_body(body, settings.max_json_depth), settings.max_problems)
    resolved = resolve_jobs(request, alive.known(settings.default_target), settings)
    budget = request.budget.seconds if request.budget else None
    terms = Terms(request.priority, budget, request.workspace_limit_bytes, request.deterministic)
    return _new_job(service, terms, resolved, alive)


def _new_job(service: Service, terms: Terms, resolved: Sequence[Resolved], alive: Alive) -> NewJob:
    with service.database.read() as session:
        winners = get_winners(session, [one.key for one in resolved])
    live = {one.device_class: alive.measures_under(one.device_class) for one in resolved}
    cached = [cached_entry(winners.get(one.key), one, terms, live[one.device_class]) for one in resolved]
    # What is answered as cached can be fetched: where its bytes are gone, the job runs, and its finish puts them back.
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
    return NewJob(problems, **vars(terms))


def _transactions(new: Sequence[_New]) -> Iterator[list[_New]]:
    """Jobs that are written together, in order."""
    some: list[_New] = []
    problems = 0
    for one in new:
        if some and problems + len(one.job.problems) > PROBLEMS_AT_ONCE:
            yield some
            some, problems = [], 0
        some.append(one)
        problems += len(one.job.problems)
    if some:
        yield some


def _write(service: Service, new: Sequence[_New]) -> dict[int, Accepted | Exception]:
    outcomes: dict[int, Accepted | Exception] = {}
    with service.database.write() as session:
        unfinished, at_most = unfinished_jobs(session), service.settings.max_queued_jobs
        admitted = []
        for one in new:
            if (error := _no_room(unfinished, at_most)) is None or one.job.cached:
                admitted.append(one)
                unfinished += not one.job.cached
            else:
                outcomes[one.place] = error
        created = create_jobs(session, [one.job for one in admitted]) if admitted else []
    items = sum(one.items for one in created)
    with service.database.read() as session:
        reports = _Reports(service, session, created)
        for one, job in zip(admitted, created, strict=True):
            outcomes[one.place] = Accepted(reports.of(one.asked, job), job.cached)
        waiting = waiting_counts(session) if items else {}
    if items:
        count = waiting.get((tickets.PLAN, None), items)
        service.announce(lambda redis: tickets.ensure_tickets(redis, tickets.PLAN, None, count))
    return outcomes


class _Reports:
    """Of jobs that were just written. Those of equal bodies differ in their ids alone until a planner begins."""

    def __init__(self, service: Service, session: Session, created: Sequence[CreatedJob]) -> None:
        self._session, self._live_seconds = session, service.settings.toolchain_live_seconds
        self._states = job_states(session, [job.id for job in created])
        self._equal: dict[bytes, Job] = {}

    def of(self, body: bytes, created: CreatedJob) -> Job:
        untouched = self._states[created.id] == created.state
        equal = self._equal.get(body)
        if untouched and equal is not None:
            return equal.model_copy(update={"job": created.id})
        report = job_report(self._session, created.id, self._live_seconds)
        assert report is not None, "a job that was just written is there"
        if untouched:
            self._equal[body] = report
        return report


def cached_entry(
    record: WinnerRecord | None, asked: Resolved, terms: Terms, live: Collection[MeasuredUnder]
) -> FrontEntry | None:
    """The kernel that answers without work: its record's searches contain the one asked, by today's generator and, on a
    GPU, under a driver and a test plan that a live one has."""
    if record is None:
        return None
    limit, deterministic = terms.workspace_limit_bytes, terms.deterministic
    wanted = search_entry(asked.search.canonical(), generator(asked.operator.name), limit, deterministic=deterministic)
    if not is_covered(record.searches, wanted, live):
        return None
    front = record.usable(limit, deterministic)
    return front[0] if front else None


def require_room(unfinished: int, at_most: int) -> None:
    """Raises Refused (429) where the service has enough to do."""
    if (error := _no_room(unfinished, at_most)) is not None:
        raise error


def _no_room(unfinished: int, at_most: int) -> Refused | None:
    if unfinished < at_most:
        return None
    detail = f"{unfinished} jobs wait or run, at most {at_most} may. Nothing was queued; send it again later."
    headers = {"Retry-After": str(BUSY_RETRY_SECONDS)}
    return refuse("too-many-jobs", detail, allowed={"jobs": at_most}, headers=headers)
