"""Job requests and retries → their durable rows, before the answer, and wake-ups for the planners. Concurrent requests
are batched (`service.threads`): equal bodies are read once, and one transaction writes many jobs.

What is sent again under its Idempotency-Key makes no second job, but is answered with what became of the first."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from codegen.identity import winner_key
from codegen.job_request import JobRequest
from codegen.operators import operator
from codegen.plan.generator import generator
from codegen.search.search import Search
from cukiln.counted import counted
from cukiln.types import ENDED, FrontEntry, Job, WinnerRecord
from service.context import Alive, Service
from service.http.errors import Refused, refuse
from service.http.strict_json import read_json
from service.requests.resolve import Resolved, read_request, resolve_jobs
from storage.config.settings import Settings
from storage.database.database_errors import WrittenMeanwhile
from storage.database.session import Session
from storage.database.tables import LIVE
from storage.entities.jobs import (
    JobProblem,
    job_state,
    job_states,
    priority_name,
    problems_to_retry,
    tried_keys,
    unfinished_jobs,
)
from storage.entities.searches import MeasuredUnder, is_covered, search_entry
from storage.entities.winners import get_winners
from storage.maintenance.forget import forget_limited
from storage.reports.job import job_report
from storage.transitions.accept import (
    PROBLEMS_AT_ONCE,
    CreatedJob,
    NewJob,
    NewProblem,
    SentUnder,
    create_jobs,
    create_large_job,
    sent_before,
)
from storage.transitions.take_work import waiting_counts
from workers import wake_ups

BUSY_RETRY_SECONDS = 30
IDEMPOTENCY_KEY = "Idempotency-Key"


@dataclass(frozen=True)
class Untried:
    """Keys of records that no job is to be trying, by `storage.entities.jobs.tried_keys`, when this one is written."""

    searches: Mapping[str, dict[str, Any]]
    since: float

    def require(self, session: Session) -> None:
        """In a write transaction: writers take turns, so one of two equal jobs sees the other."""
        if tried_keys(session, self.searches, self.since):
            raise TriedMeanwhile


class TriedMeanwhile(Exception):
    """Since the caller looked, another process has written a job that is trying the same."""


@dataclass(frozen=True)
class Submission:
    """A job's body, the Idempotency-Key that it came with, and what must not be tried already."""

    body: bytes
    sent_under: SentUnder | None = None
    untried: Untried | None = None


@dataclass(frozen=True)
class _New:
    """A job to be written, and its request's body: equal bodies are equal jobs."""

    place: int
    body: bytes
    job: NewJob
    untried: Untried | None = None


def accept_jobs(service: Service, submissions: Sequence[Submission]) -> list[Job | Exception]:
    """The job of each, or what is wrong with it, of which nothing is kept. Raises where nothing can be read."""
    outcomes = _sent_before(service, submissions)
    others = {place: submission for place, submission in enumerate(submissions) if place not in outcomes}
    read = _new_jobs(service, dict.fromkeys(submission.body for submission in others.values()))
    new = []
    for place, submission in others.items():
        job = read[submission.body]
        if isinstance(job, NewJob):
            under = submission.sent_under
            job = replace(job, sent_under=under) if under else job
            new.append(_New(place, submission.body, job, submission.untried))
        else:
            outcomes[place] = job
    for some in _transactions(new):
        try:
            outcomes |= _write(service, some)
        except Exception as error:  # noqa: BLE001 - raised again for each of them
            outcomes.update((request.place, error) for request in some)
    return [outcomes[place] for place in range(len(submissions))]


def _sent_before(service: Service, submissions: Sequence[Submission]) -> dict[int, Job | Exception]:
    """The answers to those whose keys have made a job, by place."""
    if not any(submission.sent_under for submission in submissions):
        return {}
    with service.database.read() as session:
        before = _before(session, [submission.sent_under for submission in submissions])
        reports = _Reports(service, session, [])
        return {place: reports.again(made) for place, made in before.items()}


def retry_job(service: Service, job_id: str, under: SentUnder | None = None) -> Job:
    """A new job of the problems of an ended one that failed, were cancelled or lost candidates, on its terms. Verdicts
    of our own limits are forgotten first, so that they are tried again; losses never were recorded. Raises Refused."""
    with service.database.read() as session:
        before = _before(session, [under])
        made = _Reports(service, session, []).again(before[0]) if before else None
        unfinished = unfinished_jobs(session)
        job = job_state(session, job_id)
        problems = problems_to_retry(session, job_id)
    if made is not None:
        return raised(made)
    if job is None:
        raise refuse("job-not-found", f"There is no job {job_id!r}.", field="job")
    if job.state in LIVE:
        detail = f"The job is {job.state}: wait for its end, or cancel it first."
        raise refuse("job-unfinished", detail, field="job", allowed=list(ENDED))
    if not problems:
        detail = "Each of its problems was tried as a whole and has its winner: there is nothing to try again."
        raise refuse("nothing-to-retry", detail, field="job")
    _require_ptx(job.ptx, service.settings)
    require_room(unfinished, service.settings.max_queued_jobs)  # before anything is forgotten
    resolved = [_resolved(problem, service.settings.cuda) for problem in problems]
    forget_limited(service.database, job_id)
    terms = NewJob(
        (),
        priority_name(job.priority),
        job.budget_seconds,
        job.workspace_limit_bytes,
        job.deterministic,
        job.name,
        job.labels,
        under,
        job.ptx,
    )
    return raised(_write(service, [_New(0, b"", _new_job(service, terms, resolved, service.alive()))])[0])


def raised(outcome: Job | Exception) -> Job:
    """The job. Raises what it is instead."""
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _resolved(row: JobProblem, cuda: int) -> Resolved:
    kind = operator(row.operator)
    problem = kind.parse(row.problem)
    key, search = winner_key(problem.digest, row.target, row.device_class, cuda), Search.model_validate(row.search)
    return Resolved(row.name, kind, problem, row.target, row.device_class, search, key, cuda)


def _new_jobs(service: Service, bodies: Collection[bytes]) -> dict[bytes, NewJob | Exception]:
    """What each body asks for, with what is cached of it."""
    alive, jobs = service.alive(), dict[bytes, NewJob | Exception]()
    for body in bodies:
        try:
            jobs[body] = _read(service, body, alive)
        except Exception as error:  # noqa: BLE001 - a defect ends only the request that has it
            jobs[body] = error
    return jobs


def _read(service: Service, body: bytes, alive: Alive) -> NewJob:
    settings = service.settings
    request = read_request(JobRequest, read_json(body, settings.max_json_depth), settings.max_problems)
    _require_ptx(request.ptx, settings)
    resolved = resolve_jobs(request, alive.known(settings.default_target, settings.cuda), settings)
    budget = request.budget.seconds if request.budget else None
    terms = NewJob(
        (),
        request.priority,
        budget,
        request.workspace_limit_bytes,
        request.deterministic,
        request.name,
        request.labels,
        ptx=request.ptx,
    )
    return _new_job(service, terms, resolved, alive)


def _require_ptx(ptx: str, settings: Settings) -> None:
    if ptx == "all" and settings.verify_ptx == "none":
        detail = "This service runs no PTX (CUKILN_VERIFY_PTX=none): leave `ptx` out, or ask its operator to run it."
        raise refuse("invalid-value", detail, field="ptx", allowed=["winners"])


def _new_job(service: Service, terms: NewJob, resolved: Sequence[Resolved], alive: Alive) -> NewJob:
    """`terms`: what holds for all problems of the job."""
    with service.database.read() as session:
        winners = get_winners(session, [problem.key for problem in resolved])
    places = {(p.device_class, p.operator.name) for p in resolved}
    live = {place: alive.measures_under(*place) for place in places}
    cached = [cached_entry(winners.get(p.key), p, terms, live[p.device_class, p.operator.name]) for p in resolved]
    # A winner whose blobs are missing does not count as cached: the job's finish restores them.
    lost = service.blobs.missing(digest for entry in cached if entry for digest in entry.blobs)
    problems = []
    for problem, entry in zip(resolved, cached, strict=True):
        winner = entry.candidate if entry and lost.isdisjoint(entry.blobs) else None
        problems.append(
            NewProblem(
                name=problem.name,
                operator=problem.operator.name,
                problem=problem.problem.canonical(),
                target=problem.target,
                device_class=problem.device_class,
                key=problem.key,
                search=problem.search.canonical(),
                cached=winner is not None,
                winner=winner,
            )
        )
    return replace(terms, problems=problems)


def _transactions(new: Sequence[_New]) -> Iterator[list[_New]]:
    """Jobs that are written together, in order; one with more than `PROBLEMS_AT_ONCE` alone, and no two of one key."""
    some: list[_New] = []
    problems, keys = 0, set[str]()
    for request in new:
        key = request.job.sent_under.key if request.job.sent_under else ""
        if some and (problems + len(request.job.problems) > PROBLEMS_AT_ONCE or key in keys):
            yield some
            some, problems, keys = [], 0, set()
        some.append(request)
        keys |= {key} - {""}
        problems += len(request.job.problems)
    if some:
        yield some


def _write(service: Service, new: Sequence[_New]) -> dict[int, Job | Exception]:
    try:
        return _write_once(service, new)
    except WrittenMeanwhile:  # another process has written a job under one of the keys since we looked
        return _write_once(service, new)


def _write_once(service: Service, new: Sequence[_New]) -> dict[int, Job | Exception]:
    with service.database.write() as session:
        before = _before(session, [request.job.sent_under for request in new])
        others = [request for place, request in enumerate(new) if place not in before]
        alone = len(others) == 1 and len(others[0].job.problems) > PROBLEMS_AT_ONCE
        admitted, refused = (others, {}) if alone else _admitted(session, service.settings.max_queued_jobs, others)
        created = create_jobs(session, [request.job for request in admitted]) if admitted and not alone else []
    if alone:
        created = [_create_large(service, others[0])]
    outcomes: dict[int, Job | Exception] = {**refused}
    tasks = sum(job.tasks for job in created)
    with service.database.read() as session:
        reports = _Reports(service, session, created)
        for request, job in zip(admitted, created, strict=True):
            outcomes[request.place] = reports.of(request.body, job)
        outcomes |= {new[place].place: reports.again(made) for place, made in before.items()}
        waiting = waiting_counts(session) if tasks else {}
    if tasks:
        count = waiting.get((wake_ups.PLAN, None), tasks)
        service.announce(lambda redis: wake_ups.ensure_wake_ups(redis, wake_ups.PLAN, None, count))
    return outcomes


def _admitted(session: Session, at_most: int, new: Sequence[_New]) -> tuple[list[_New], dict[int, Exception]]:
    """Those for which there is room, and why the others are refused."""
    unfinished, admitted, refused = unfinished_jobs(session), list[_New](), dict[int, Exception]()
    for request in new:
        try:
            if request.untried is not None:
                request.untried.require(session)
            if not request.job.cached:
                require_room(unfinished, at_most)
                unfinished += 1
            admitted.append(request)
        except (Refused, TriedMeanwhile) as error:
            refused[request.place] = error
    return admitted, refused


def _before(session: Session, sent: Sequence[SentUnder | None]) -> dict[int, str | Refused]:
    """By place, of those whose key has made a job: that job, or what to answer where another body was sent."""
    keyed = {place: under for place, under in enumerate(sent) if under is not None}
    made = sent_before(session, {under.key for under in keyed.values()}) if keyed else {}
    before: dict[int, str | Refused] = {}
    for place, under in keyed.items():
        if under.key in made:
            job, request = made[under.key]
            before[place] = job if request == under.request else _other_body(job)
    return before


def _other_body(job: str) -> Refused:
    detail = f"Another body was sent under this key, and became job {job}. Send a new key with a new body."
    return refuse("idempotency-key-reused", detail, field=IDEMPOTENCY_KEY)


def _create_large(service: Service, new: _New) -> CreatedJob:
    job = new.job

    def admit(session: Session) -> None:
        if new.untried is not None:
            new.untried.require(session)
        if not job.cached:
            require_room(unfinished_jobs(session), service.settings.max_queued_jobs)

    created = create_large_job(service.database, job, admit)
    if created is None:
        detail = "Writing the job took too long, and nothing is kept of it. Send it again."
        raise refuse("busy", detail, headers={"Retry-After": str(BUSY_RETRY_SECONDS)})
    return created


class _Reports:
    """Of jobs that were just written. Those of equal bodies differ in their ids alone until a planner begins."""

    def __init__(self, service: Service, session: Session, created: Sequence[CreatedJob]) -> None:
        self._session, self._live_seconds = session, service.settings.toolchain_live_seconds
        self._states = job_states(session, [job.id for job in created])
        self._equal: dict[bytes, Job] = {}

    def again(self, made: str | Refused) -> Job | Refused:
        """Of a job that was written before, as it stands; where it cannot be read, why."""
        if isinstance(made, Refused):
            return made
        detail = f"The job of this key, {made}, is being removed. Send it again."
        busy = refuse("busy", detail, headers={"Retry-After": str(BUSY_RETRY_SECONDS)})
        return job_report(self._session, made, self._live_seconds) or busy

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
    record: WinnerRecord | None, asked: Resolved, terms: NewJob, live: Collection[MeasuredUnder]
) -> FrontEntry | None:
    """The kernel that answers without work: the search was done, by today's generator and a live driver and plan."""
    if record is None:
        return None
    limit, deterministic = terms.workspace_limit_bytes, terms.deterministic
    search = search_entry(
        asked.search.canonical(),
        generator(asked.operator.name),
        limit,
        deterministic=deterministic,
        every_ptx=terms.ptx == "all",
    )
    if not is_covered(record.searches, search, live):
        return None
    front = record.usable(limit, deterministic)
    return front[0] if front else None


def require_room(unfinished: int, at_most: int) -> None:
    """Raises Refused (429) at the limit of unfinished jobs."""
    if unfinished < at_most:
        return
    wait = f"Waiting or running: {counted(unfinished, 'job')}, of at most {at_most}."
    detail = f"{wait} Nothing was queued; send it again later."
    headers = {"Retry-After": str(BUSY_RETRY_SECONDS)}
    raise refuse("too-many-jobs", detail, allowed={"jobs": at_most}, headers=headers)
