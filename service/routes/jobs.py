"""/v1/jobs: send, list, look at, cancel; a job's candidates, rejections, profile and timeline."""

import asyncio
import contextvars
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Header, Query, Request
from pydantic import Field
from starlette.responses import Response

from codegen.counts import Openings
from codegen.job_request import Name
from cukiln.types import (
    CandidatePage,
    Filters,
    Job,
    JobPage,
    JobState,
    Opened,
    ProfilePage,
    Rejections,
    Timeline,
    VerdictName,
)
from service.auth import admitted, needs
from service.context import Service, ServiceDep
from service.http.answers import json_response
from service.http.errors import Refused, refuse
from service.openapi import BODY_PROBLEMS, EXAMPLE, body_of, problems
from service.routes.accept_job import IDEMPOTENCY_KEY, Submission, accept_jobs, raised, retry_job
from service.routes.body import Body
from service.routes.by_id import only_one
from service.threads import Together, to_its_end
from storage.database.tables import LIVE
from storage.entities.jobs import job_state, list_jobs
from storage.reports.candidates import candidate_page, has_problem, rejections
from storage.reports.job import job_report
from storage.reports.profile import profile_page
from storage.reports.times import timeline
from storage.transitions.accept import SentUnder
from storage.transitions.end_jobs import cancel_job
from workers import wake_ups

T = TypeVar("T")
POLL_SECONDS = "1"
SHARED_BYTES = 4096
"""Of a body that is batched with others, so that none waits long."""
REPORTS_AT_ONCE = 2
"""Of whole jobs: one of 10,000 problems takes seconds and tens of megabytes, and other requests need threads too."""
SUBMIT_PROBLEMS = (
    "unknown-tunable",
    "empty-search-space",
    "search-space-too-large",
    "duplicate-name",
    "idempotency-key-reused",
    "too-many-jobs",
    "storage-full",
)
JOB_PROBLEMS = ("job-not-found", "ambiguous-prefix")
RETRY_PROBLEMS = ("idempotency-key-reused", "too-many-jobs", "storage-full")

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
_ID = re.compile(r"[0-9a-f]{32}")
_PREFIX = re.compile(r"[0-9a-f]{8,31}")

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias=IDEMPOTENCY_KEY,
        pattern=r"^[\x21-\x7e]{1,255}$",
        description="Chosen by the caller: what is sent again under its key makes no second job, but is answered with "
        "the first, as long as that is kept.",
    ),
]
Cursor = Annotated[str | None, Query(max_length=512)]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}=[^\x00-\x1f\x7f-\x9f]{1,256}$")]
LabelsWanted = Annotated[
    list[Label] | None, Query(max_length=16, description="`key=value`; where it is given several times, all must fit.")
]


def labels_of(entries: Sequence[str] | None) -> list[tuple[str, str]]:
    """`key=value` each."""
    return [(entry.partition("=")[0], entry.partition("=")[2]) for entry in entries or ()]


def known_job(job: str, service: ServiceDep) -> str:
    """The id of a job that exists; `job` is all of it, or its first 8 or more digits. Raises Refused (404, 409)."""
    if is_job_id(job):
        with service.database.read() as session:
            if job_state(session, job) is not None:
                return job
    elif _PREFIX.fullmatch(job):
        with service.database.read() as session:
            if (row := only_one(session, "job", job)) is not None:
                return row
    else:
        detail = f"{job[:64]!r} names no job: give 32 lower-case hexadecimal digits, or the first 8 or more."
        raise refuse("job-not-found", detail, field="job")
    raise job_notfound(job)


KnownJob = Annotated[str, Depends(known_job)]


async def turn_for_report(request: Request) -> AsyncIterator[None]:
    """One of REPORTS_AT_ONCE, until the handler has returned. Raises Refused where the client has gone meanwhile."""
    async with request.app.state.reports:
        if await request.is_disconnected():
            raise refuse("bad-request", "The connection ended before the job was read.")
        yield


ReportTurn = Depends(turn_for_report, scope="function")


def is_job_id(job: str) -> bool:
    """Whether a job could have this id."""
    return _ID.fullmatch(job) is not None


def job_notfound(job: str) -> Refused:
    return refuse("job-not-found", f"There is no job {job[:64]!r}.", field="job")


@router.post(
    "",
    operation_id="submit_job",
    status_code=202,
    response_model=Job,
    responses={
        **problems(*BODY_PROBLEMS, *SUBMIT_PROBLEMS, "database-unavailable", "blobs-unavailable"),
        200: {"model": Job, "description": "All was cached: the job is done"},
    },
    openapi_extra=body_of("JobRequest", EXAMPLE),
)
@needs("submit")
async def post_job(
    request: Request, body: Body, service: ServiceDep, idempotency_key: IdempotencyKey = None
) -> Response:
    """Send 1 to 10,000 problems. 202 once the job is durable, 200 when every problem was answered from the cache."""
    submission = Submission(body, _sent_under(request, idempotency_key, body))
    if len(body) > SHARED_BYTES:
        return _answer(await _in_thread(lambda: raised(accept_jobs(service, [submission])[0])))
    submissions: Together[Submission, Job] = request.app.state.submissions
    return _answer(await to_its_end(submissions.do(submission)))


@router.post(
    "/{job}/retry",
    operation_id="retry_job",
    status_code=202,
    response_model=Job,
    responses={
        **problems(
            *(*JOB_PROBLEMS, "job-unfinished", "nothing-to-retry", *RETRY_PROBLEMS),
            *("database-unavailable", "blobs-unavailable"),
        ),
        200: {"model": Job, "description": "All was cached: the job is done"},
    },
)
@needs("submit")
async def post_retry(
    job: KnownJob, request: Request, service: ServiceDep, idempotency_key: IdempotencyKey = None
) -> Response:
    """A new job of what failed, was cancelled, lost candidates, or reached a limit, of a job that has ended."""
    under = _sent_under(request, idempotency_key, f"retry {job}".encode())
    return _answer(await _in_thread(lambda: retry_job(service, job, under=under)))


def _sent_under(request: Request, key: str | None, body: bytes) -> SentUnder | None:
    """Keys of different callers are different ones. Raises Refused where several keys were sent."""
    if len(request.headers.getlist(IDEMPOTENCY_KEY)) > 1:
        raise refuse("invalid-value", "Several keys were sent. Send one.", field=IDEMPOTENCY_KEY)
    if key is None:
        return None
    caller = admitted(request)
    own = f"{caller.key or caller.name}\n{key}".encode()
    return SentUnder(hashlib.sha256(own).hexdigest(), hashlib.sha256(body).hexdigest())


async def _in_thread(write: Callable[[], Job]) -> Job:
    run = contextvars.copy_context().run  # its log names the request
    return await to_its_end(asyncio.get_running_loop().run_in_executor(None, run, write))


def _answer(job: Job) -> Response:
    headers = {"Location": f"/v1/jobs/{job.job}"}
    if job.cached:
        return json_response(job, headers=headers)
    return json_response(job, status=202, headers={**headers, "Retry-After": POLL_SECONDS})


@router.get(
    "",
    operation_id="list_jobs",
    response_model=JobPage,
    responses=problems("invalid-cursor", "invalid-value", "database-unavailable"),
)
def get_jobs(
    service: ServiceDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    cursor: Cursor = None,
    state: JobState | None = None,
    name: Name | None = None,
    label: LabelsWanted = None,
) -> Response:
    """Jobs, the newest first."""
    with service.database.read() as session:
        page = list_jobs(session, limit=limit, cursor=cursor, state=state, name=name, labels=labels_of(label))
        return json_response(page)


@router.get(
    "/{job}",
    operation_id="get_job",
    response_model=Job,
    responses=problems(*JOB_PROBLEMS, "database-unavailable"),
    dependencies=[ReportTurn],
)
def get_job(job: KnownJob, service: ServiceDep) -> Response:
    """The job with its problems, stage times and an estimate of the time that is left."""
    report = _report(service, job)
    headers = {"Retry-After": POLL_SECONDS} if report.state in LIVE else {}
    return json_response(report, headers=headers)


@router.delete(
    "/{job}",
    operation_id="cancel_job",
    response_model=Job,
    responses=problems(*JOB_PROBLEMS, "job-finished", "database-unavailable"),
    dependencies=[ReportTurn],
)
@needs("submit")
def delete_job(job: KnownJob, service: ServiceDep) -> Response:
    """Cancel: finished work stays, nothing new is started. Idempotent; an ended job is a 409."""
    with service.database.write() as session:
        status = found(job, cancel_job(session, job))
    if status.state != "cancelled":
        detail = f"The job is {status.state} already: there is nothing to cancel."
        raise refuse("job-finished", detail, field="job", allowed=["queued", "running"])
    service.announce(lambda redis: wake_ups.publish(redis, job, "state", {"state": "cancelled"}))
    return json_response(_report(service, job))


@router.get(
    "/{job}/candidates",
    operation_id="list_candidates",
    response_model=CandidatePage,
    responses=problems(*JOB_PROBLEMS, "invalid-cursor", "invalid-value", "database-unavailable"),
)
def get_candidates(
    job: KnownJob,
    service: ServiceDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    cursor: Cursor = None,
    problem: Annotated[str | None, Query(pattern=r"^[^\x00-\x1f\x7f]{1,256}$")] = None,
    verdict: VerdictName | None = None,
) -> Response:
    """Compiled candidates, with figures. `problem` is a problem's name."""
    with service.database.read() as session:
        page = candidate_page(session, job, limit=limit, cursor=cursor, problem=problem, verdict=verdict)
        has_it = problem is None or bool(page and page.candidates) or has_problem(session, job, problem)
    page = found(job, page)
    if not has_it:
        raise refuse("invalid-value", f"The job has no problem {problem!r}.", field="problem")
    return json_response(page)


@router.get(
    "/{job}/profile",
    operation_id="get_job_profile",
    response_model=ProfilePage,
    responses=problems(*JOB_PROBLEMS, "invalid-cursor", "invalid-value", "database-unavailable"),
    dependencies=[ReportTurn],
)
def get_profile(
    job: KnownJob,
    service: ServiceDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Cursor = None,
    filters: Filters = "secret",
    opened: Opened = "multiplied",
) -> Response:
    """What a run of each winner does, by operator, kernel and primitive. `filters` and `opened` are of `ring_bytes`:
    whether a two-party evaluation shares the filters, and opens what is multiplied or the raw inputs."""
    with service.database.read() as session:
        page = profile_page(session, job, Openings(filters, opened), limit=limit, cursor=cursor)
    return json_response(found(job, page))


@router.get(
    "/{job}/rejections",
    operation_id="get_job_rejections",
    response_model=Rejections,
    responses=problems(*JOB_PROBLEMS, "database-unavailable"),
)
def get_rejections(job: KnownJob, service: ServiceDep) -> Response:
    """How many schedules each rule rejected before any compile, with one example each."""
    with service.database.read() as session:
        return json_response(found(job, rejections(session, job)))


@router.get(
    "/{job}/timeline",
    operation_id="get_job_timeline",
    response_model=Timeline,
    responses=problems(*JOB_PROBLEMS, "database-unavailable"),
    dependencies=[ReportTurn],
)
def get_timeline(job: KnownJob, service: ServiceDep) -> Response:
    """When each group and each problem of the job waited, was compiled, verified, measured, finished."""
    with service.database.read() as session:
        return json_response(found(job, timeline(session, job)))


def found(job: str, answer: T | None) -> T:
    """What was asked of a job that was there a moment ago. Raises Refused where it is not any more."""
    if answer is None:
        raise job_notfound(job)
    return answer


def _report(service: Service, job: str) -> Job:
    with service.database.read() as session:
        return found(job, job_report(session, job, service.settings.toolchain_live_seconds))
