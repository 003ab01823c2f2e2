"""Jobs: sent, followed, cancelled, and what there is to read of them."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import httpx2
from pydantic import ValidationError

from cukiln.errors import BadRequest, WaitTimeout
from cukiln.events import Event
from cukiln.gpu import local_target
from cukiln.http.seconds import check_seconds
from cukiln.http.transport import Call
from cukiln.job_request import check_problems, encode
from cukiln.operations.answers import json_object, parse
from cukiln.operations.steps import Follow, Listing, Operation, Pause, job_path, once
from cukiln.types import (
    ENDED,
    CandidatePage,
    CandidateReport,
    Filters,
    Job,
    JobPage,
    JobState,
    JobSummary,
    Opened,
    Priority,
    ProfileOperator,
    ProfilePage,
    Progress,
    PtxAsked,
    RejectionReport,
    Rejections,
)
from cukiln.types.problems import Problem

ProgressCallback = Callable[[Progress], None]


class JobOperations:
    def _tune(
        self,
        problems: Iterable[Problem],
        *,
        target: str | None = None,
        search: Mapping[str, Any] | None = None,
        priority: Priority | None = None,
        budget: float | None = None,
        workspace_limit_bytes: int | None = None,
        deterministic: bool = False,
        device_class: str | None = None,
        ptx: PtxAsked | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        progress: ProgressCallback | None = None,
        wait: bool = True,
        timeout: float | None = None,
    ) -> Operation[Job]:
        """Find the best kernel for each of `problems`, and return the job.

        `target`: an architecture such as `sm_90a`; default: that of this machine's GPU. `budget`: seconds the service
        may spend; `timeout`: seconds to wait here. `workspace_limit_bytes` and `deterministic` (equal bits in every
        run) say which kernels may win; `ptx="all"` runs every candidate from its PTX before, not the winners alone.
        `name` and `labels`: of the job, which `jobs` lists by them. A job that ends `partial` or `failed` is an answer,
        not an exception: look at `job.state` and each problem's `error`.
        Raises `BadRequest` when the request is wrong, `WaitTimeout` when the time is over.
        """
        options = {
            "target": target,
            "search": dict(search) if search is not None else None,
            "priority": priority,
            "budget": {"seconds": budget} if budget is not None else None,
            "workspace_limit_bytes": workspace_limit_bytes,
            "deterministic": deterministic or None,
            "device_class": device_class,
            "ptx": ptx,
            "name": name,
            "labels": dict(labels) if labels is not None else None,
        }
        request = {name: value for name, value in options.items() if value is not None}
        if timeout is not None:
            check_seconds("timeout", timeout, waited=False)
        job = yield from self._submit({**request, "problems": [dict(problem) for problem in check_problems(problems)]})
        return (yield from self._wait(job, progress=progress, timeout=timeout)) if wait else job

    def _submit(self, request: Mapping[str, Any]) -> Operation[Job]:
        """Send a whole job request (the body of `POST /v1/jobs`); returns at once. Without a target it is tuned for
        this machine's GPU."""
        response = yield Call("POST", "/v1/jobs", encode(with_target(request)), headers=once())
        return parse(response, Job)

    def _retry(self, job_id: str) -> Operation[Job]:
        """A new job of what failed, was cancelled or was not tried as a whole of one that has ended; returns at once.
        Raises `BadRequest` where it has not ended, or nothing of it is left to try."""
        response = yield Call("POST", f"{job_path(job_id)}/retry", headers=once())
        return parse(response, Job)

    def _job(self, job_id: str) -> Operation[Job]:
        """The job whose id this is, or begins so with 8 or more digits. Raises `NotFound`, and `BadRequest` where
        several begin so."""
        return parse((yield Call("GET", job_path(job_id))), Job)

    def _jobs(
        self, *, state: JobState | None = None, name: str | None = None, labels: Mapping[str, str] | None = None
    ) -> Listing[JobPage, JobSummary]:
        """Yield jobs, the newest first; of one state, of one name, with all of `labels` where given."""
        label = [f"{key}={value}" for key, value in (labels or {}).items()]
        return Listing("/v1/jobs", JobPage, lambda page: page.jobs, {"state": state, "name": name, "label": label})

    def _candidates(
        self, job_id: str, *, problem: str | None = None, verdict: str | None = None
    ) -> Listing[CandidatePage, CandidateReport]:
        """Yield the job's compiled candidates with their figures, in the order of its problems; of one problem (by
        name) or verdict where given. Raises `NotFound`, and `BadRequest` for a problem that the job lacks."""
        options = {"problem": problem, "verdict": verdict}
        return Listing(f"{job_path(job_id)}/candidates", CandidatePage, lambda page: page.candidates, options)

    def _rejections(self, job_id: str) -> Operation[list[RejectionReport]]:
        """How many schedules each rule rejected before any compile, by problem, with an example. Raises `NotFound`."""
        return parse((yield Call("GET", f"{job_path(job_id)}/rejections")), Rejections).rejections

    def _profile(
        self, job_id: str, *, filters: Filters = "secret", opened: Opened = "multiplied"
    ) -> Listing[ProfilePage, ProfileOperator]:
        """Yield what a run of each winner does, in the order of the job's problems. `filters`, `opened`: what bytes of
        a two-party evaluation are counted for. Raises `NotFound`."""
        options = {"filters": filters, "opened": opened}
        return Listing(f"{job_path(job_id)}/profile", ProfilePage, lambda page: page.operators, options)

    def _profile_pages(
        self, job_id: str, *, filters: Filters = "secret", opened: Opened = "multiplied"
    ) -> Listing[ProfilePage, ProfilePage]:
        """Yield the pages of `profile`, with the problems that have no row (`left_out`). Raises `NotFound`."""
        options = {"filters": filters, "opened": opened}
        return Listing(f"{job_path(job_id)}/profile", ProfilePage, lambda page: [page], options)

    def _trace(self, job_id: str) -> Operation[dict[str, Any]]:
        """The job's work by worker and time, so far, in Chrome's Trace Event Format: ui.perfetto.dev and
        chrome://tracing open it as a JSON file. Raises `NotFound`."""
        return json_object((yield Call("GET", f"{job_path(job_id)}/trace")))

    def _cancel(self, job_id: str) -> Operation[Job]:
        """Cancel the job: finished work stays, nothing new is started. A job that has already ended stays as it is."""
        try:
            yield Call("DELETE", job_path(job_id))
        except BadRequest as error:
            if error.status != httpx2.codes.CONFLICT:
                raise
        return (yield from self._job(job_id))

    def _wait(
        self, job: Job | str, *, progress: ProgressCallback | None = None, timeout: float | None = None
    ) -> Operation[Job]:
        """Wait until the job has ended. `progress` is called with the counts whenever they change. Raises
        `WaitTimeout` after `timeout` seconds."""
        if timeout is not None:
            check_seconds("timeout", timeout, waited=False)
        deadline = None if timeout is None else time.monotonic() + timeout
        current = job if isinstance(job, Job) else (yield from self._job(job))
        last: Progress | None = None

        def report(counts: Progress | None) -> None:
            nonlocal last
            if progress is not None and counts is not None and counts != last:
                last = counts
                progress(counts)

        report(current.progress)
        while current.state not in ENDED:
            path = f"{job_path(current.job)}/events"
            yield Follow(path, deadline, lambda event: report(progress_of(event)))
            current = yield from self._job(current.job)
            report(current.progress)
            if current.state in ENDED:
                break
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(
                    f"job {current.job} is not finished after {timeout:g} s; the service continues it",
                    job=current.job,
                )
            yield Pause(0.1)  # the last event may arrive before its row is readable
        return current


def with_target(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """The request, for this machine's GPU where neither it nor each problem names a target."""
    problems = request.get("problems")
    if "target" in request or not isinstance(problems, list):
        return request
    if all(isinstance(problem, Mapping) and "target" in problem for problem in problems):
        return request
    target = local_target()
    return request if target is None else {**request, "target": target}


def progress_of(event: Event) -> Progress | None:
    """The counts an event carries, as its data or as their `progress`; None if it carries none."""
    try:
        return Progress.model_validate(event.data.get("progress", event.data))
    except ValidationError:
        return None
