"""A job that has ended → a new one of what of it failed, was cancelled, or was not tried as a whole."""

from __future__ import annotations

from codegen.identity import winner_key
from codegen.operators import operator
from codegen.search import Search
from service.accept_job import Accepted, Terms, accept_problems, require_room
from service.context import Service
from service.errors import refuse
from service.resolve import Resolved
from storage.forget import forget_limited
from storage.jobs import job_state, priority_name, unfinished_jobs
from storage.judge import LIVE
from storage.problems import JobProblem, problems_to_retry


def retry_job(service: Service, job_id: str) -> Accepted:
    """On the terms of the old one. What a limit of ours had ended of it is forgotten first, so that it is tried again;
    what was lost never was remembered. Raises Refused."""
    with service.database.read() as session:
        unfinished = unfinished_jobs(session)
        job = job_state(session, job_id)
        problems = problems_to_retry(session, job_id)
    if job is None:
        raise refuse("job-not-found", f"There is no job {job_id!r}.", field="job")
    if job.state in LIVE:
        detail = f"The job is {job.state}: wait for its end, or cancel it first."
        raise refuse("job-unfinished", detail, field="job", allowed=["done", "partial", "failed", "cancelled"])
    if not problems:
        detail = "Each of its problems was tried as a whole and has its winner: there is nothing to try again."
        raise refuse("nothing-to-retry", detail, field="job")
    require_room(unfinished, service.settings.max_queued_jobs)  # before anything is forgotten
    resolved = [_resolved(problem) for problem in problems]
    forget_limited(service.database, job_id)
    terms = Terms(priority_name(job.priority), job.budget_seconds, job.workspace_limit_bytes, job.deterministic)
    return accept_problems(service, resolved, terms, service.alive())


def _resolved(row: JobProblem) -> Resolved:
    kind = operator(row.operator)
    problem = kind.parse(row.problem)
    key = winner_key(problem.digest, row.target, row.device_class)
    return Resolved(row.name, kind, problem, row.target, row.device_class, Search.model_validate(row.search), key)
