"""The client: jobs, lookups, records and blobs of one cukiln service."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode

import httpx
from pydantic import BaseModel, ValidationError

from cukiln.blob_cache import BlobCache, check_digest, verify
from cukiln.counted import counted
from cukiln.errors import BadRequest, NotFound, UnexpectedAnswer, UsageError, WaitTimeout
from cukiln.events import Event, read_events
from cukiln.job_request import Problem, encode
from cukiln.settings import ClientSettings
from cukiln.transport import Transport
from cukiln.types import (
    ENDED,
    CandidateFacts,
    CandidatePage,
    CandidateReport,
    Filters,
    Forgotten,
    ImportPage,
    ImportReport,
    Job,
    LookupResult,
    Lookups,
    Opened,
    ProfileOperator,
    ProfilePage,
    Progress,
    Targets,
    WinnerRecord,
)

DEFAULT_URL = "http://127.0.0.1:8765"
LARGEST_LOOKUP = 10_000  # problems in one request
LARGEST_PAGE = 1_000  # candidates, or imports, in one answer
REMEMBERED_LOOKUPS = 100_000  # of a client; the least recently used are dropped first
REMEMBERED_RECORDS = 1_000

_Answer = TypeVar("_Answer", bound=BaseModel)
_Page = TypeVar("_Page", CandidatePage, ImportPage, ProfilePage)
_Value = TypeVar("_Value")
ProgressCallback = Callable[[Progress], None]


class Client:
    """A connection to the service at `url` (default: `CUKILN_URL`, else the local service).

    `timeout`: seconds that one request may take, not a job. `lookup_seconds`: how long a looked-up winner is answered
    from memory before the service is asked for a better one; misses are always requested. A client may be shared
    between threads. Every method raises `ServiceError` and its subclasses.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        timeout: float = 30.0,
        *,
        cache_dir: Path | str | None = None,
        lookup_seconds: float = 60.0,
        transport: Transport | None = None,
    ) -> None:
        settings = ClientSettings.from_environment()
        self._transport = transport or Transport(
            url or settings.url or DEFAULT_URL, api_key or settings.api_key, timeout
        )
        self.blobs = BlobCache(Path(cache_dir) if cache_dir is not None else settings.cache_dir)
        self._lookup_seconds = lookup_seconds
        self._lock = threading.Lock()
        self._lookups: dict[str, tuple[float, LookupResult]] = {}
        self._records: dict[str, tuple[str, WinnerRecord]] = {}

    @property
    def url(self) -> str:
        return self._transport.url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()

    def tune(
        self,
        problems: Iterable[Problem],
        *,
        target: str | None = None,
        search: Mapping[str, Any] | None = None,
        priority: str | None = None,
        budget: float | None = None,
        workspace_limit_bytes: int | None = None,
        deterministic: bool = False,
        device_class: str | None = None,
        progress: ProgressCallback | None = None,
        wait: bool = True,
        timeout: float | None = None,
    ) -> Job:
        """Find the best kernel for each of `problems`, and return the job.

        `budget`: seconds the service may spend; `timeout`: seconds to wait here. `workspace_limit_bytes` and
        `deterministic` (equal bits in every run) say which kernels may win. A job that ends `partial` or
        `failed` is an answer, not an exception: look at `job.state` and each problem's `error`.
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
        }
        request = {name: value for name, value in options.items() if value is not None}
        job = self.submit({**request, "problems": [dict(problem) for problem in problems]})
        return self.wait(job, progress=progress, timeout=timeout) if wait else job

    def submit(self, request: Mapping[str, Any]) -> Job:
        """Send a whole job request (the body of `POST /v1/jobs`); returns at once."""
        # Not repeatable: a request whose answer was lost would become two jobs.
        response = self._transport.request("POST", "/v1/jobs", repeatable=False, content=encode(request))
        return _parse(response, Job)

    def retry(self, job_id: str) -> Job:
        """A new job of what failed, was cancelled or was not tried as a whole of one that has ended; returns at once.
        Raises `BadRequest` where it has not ended, or nothing of it is left to try."""
        return _parse(self._transport.request("POST", f"{_job_path(job_id)}/retry", repeatable=False), Job)

    def forget(self, what: str) -> Forgotten:
        """Forget the winner record, else the build, whose key or id begins so: the next job tries it again. Raises
        `NotFound`, and `BadRequest` where several begin so, or a job that has not ended needs the build."""
        name = _part(what, "what to forget")
        try:
            return _parse(self._transport.request("DELETE", f"/v1/kernels/{name}", repeatable=False), Forgotten)
        except NotFound:
            return _parse(self._transport.request("DELETE", f"/v1/builds/{name}", repeatable=False), Forgotten)

    def job(self, job_id: str) -> Job:
        return _parse(self._get(_job_path(job_id)), Job)

    def candidates(
        self, job_id: str, *, problem: str | None = None, verdict: str | None = None
    ) -> Iterator[CandidateReport]:
        """Yield the job's compiled candidates with their figures, in the order of its problems; of one problem (by
        name) or verdict where given. Raises `NotFound`, and `BadRequest` for a problem that the job lacks."""
        for page in self._pages(f"{_job_path(job_id)}/candidates", CandidatePage, problem=problem, verdict=verdict):
            yield from page.candidates

    def profile(
        self, job_id: str, *, filters: Filters = "secret", opened: Opened = "multiplied"
    ) -> Iterator[ProfileOperator]:
        """Yield what a run of each winner does, in the order of the job's problems. `filters`, `opened`: what bytes of
        a two-party evaluation are counted for. Raises `NotFound`."""
        for page in self.profile_pages(job_id, filters=filters, opened=opened):
            yield from page.operators

    def profile_pages(
        self, job_id: str, *, filters: Filters = "secret", opened: Opened = "multiplied"
    ) -> Iterator[ProfilePage]:
        """Yield the pages of `profile`, with the problems that have no row (`left_out`). Raises `NotFound`."""
        return self._pages(f"{_job_path(job_id)}/profile", ProfilePage, filters=filters, opened=opened)

    def _pages(self, path: str, kind: type[_Page], **options: str | None) -> Iterator[_Page]:
        cursor = None
        while True:
            parameters = {**options, "limit": LARGEST_PAGE, "cursor": cursor}
            query = urlencode({name: value for name, value in parameters.items() if value is not None})
            page = _parse(self._get(f"{path}?{query}"), kind)
            yield page
            if (cursor := page.next_cursor) is None:
                return

    def trace(self, job_id: str) -> dict[str, Any]:
        """The job's work by worker and time, so far, in Chrome's Trace Event Format: ui.perfetto.dev and
        chrome://tracing open it as a JSON file. Raises `NotFound`."""
        return self._object(f"{_job_path(job_id)}/trace")

    def bundle(self, job_id: str) -> dict[str, Any]:
        """The input to measure the job without a service (see `cukiln export-bundle`). Raises `NotFound`."""
        return self._object(f"{_job_path(job_id)}/bundle")

    def _object(self, path: str) -> dict[str, Any]:
        """An answer without a type of its own."""
        response = self._get(path)
        answer = response.json()
        if not isinstance(answer, dict):
            raise _unexpected(response, "it is not a JSON object")
        return answer

    def send_results(self, results: Mapping[str, Any]) -> Job:
        """Import what such a machine measured; returns the job that publishes it. Idempotent. Raises `BadRequest`."""
        response = self._transport.request("POST", "/v1/results", repeatable=True, content=encode(results))
        return _parse(response, Job)

    def imports(self) -> Iterator[ImportReport]:
        """Imports, the newest first, withdrawn ones included."""
        for page in self._pages("/v1/imports", ImportPage):
            yield from page.imports

    def withdraw_import(self, import_id: str) -> ImportReport:
        """Take an import back: records are what they would be without it. Idempotent. Raises
        `NotFound`, and `NotAuthorised` where the key neither sent it nor is an admin's."""
        path = f"/v1/imports/{_part(import_id, 'the import')}"
        return _parse(self._transport.request("DELETE", path, repeatable=True), ImportReport)

    def candidate(self, candidate: str, *, job: str | None = None) -> CandidateFacts:
        """All that is known of a candidate, by its id or the first 8 or more digits of it; as one job has it, where
        that is named. Raises `NotFound`, and `BadRequest` where several candidates begin so."""
        query = "" if job is None else f"?job={_part(job, 'the job')}"
        return _parse(self._get(f"/v1/candidates/{_part(candidate, 'the candidate')}{query}"), CandidateFacts)

    def targets(self) -> Targets:
        """The architectures, compilers and GPUs that the service has now."""
        return _parse(self._get("/v1/targets"), Targets)

    def cancel(self, job_id: str) -> Job:
        """Cancel the job: finished work stays, nothing new is started. A job that has already ended stays as it is."""
        try:
            self._transport.request("DELETE", _job_path(job_id), repeatable=True)
        except BadRequest as error:
            if error.status != httpx.codes.CONFLICT:
                raise
        return self.job(job_id)

    def events(self, job_id: str, last_event_id: str | None = None) -> Iterator[Event]:
        """Yield what happens to the job until it ends, across broken connections."""
        return read_events(self._transport, f"{_job_path(job_id)}/events", last_event_id)

    def wait(self, job: Job | str, *, progress: ProgressCallback | None = None, timeout: float | None = None) -> Job:
        """Wait until the job has ended. `progress` is called with the counts whenever they change."""
        deadline = None if timeout is None else time.monotonic() + timeout
        current = job if isinstance(job, Job) else self.job(job)
        last: Progress | None = None

        def report(counts: Progress | None) -> None:
            nonlocal last
            if progress is not None and counts is not None and counts != last:
                last = counts
                progress(counts)

        report(current.progress)
        while current.state not in ENDED:
            for event in read_events(self._transport, f"{_job_path(current.job)}/events", deadline=deadline):
                report(progress_of(event))
            current = self.job(current.job)
            report(current.progress)
            if current.state in ENDED:
                break
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(
                    f"job {current.job} is not finished after {timeout:g} s; the service continues it",
                    job=current.job,
                )
            self._transport.sleep(0.1)  # the last event may arrive before its row is readable
        return current

    def lookup(
        self,
        problems: Sequence[Problem],
        *,
        target: str | None = None,
        device_class: str | None = None,
        workspace_limit_bytes: int | None = None,
        deterministic: bool = False,
        refresh: bool = False,
    ) -> list[LookupResult]:
        """The known winner of each problem, in order; `record` is None where there is none yet. Nothing is tuned.

        `workspace_limit_bytes` and `deterministic` (equal bits in every run) narrow the kernels of each record. A
        winner answered within `lookup_seconds` comes from memory, unless `refresh`. It is remembered under the digest
        of what was sent: two ways to write one problem (`1`, `1.0`) are two entries here, one in the service.
        """
        options: dict[str, Any] = {
            "target": target,
            "device_class": device_class,
            "workspace_limit_bytes": workspace_limit_bytes,
            "deterministic": deterministic or None,
        }
        shared = {name: value for name, value in options.items() if value is not None}
        keys = [hashlib.sha256(encode({**shared, "problems": [dict(p)]})).hexdigest() for p in problems]
        now = time.monotonic()
        cached = {} if refresh else {key: entry for key in keys if (entry := self._lookups.get(key))}
        answers = {key: result for key, (at, result) in cached.items() if now - at < self._lookup_seconds}
        problem_of = dict(zip(keys, problems, strict=True))
        missing = [key for key in problem_of if key not in answers]
        for start in range(0, len(missing), LARGEST_LOOKUP):
            part = missing[start : start + LARGEST_LOOKUP]
            body = encode({**shared, "problems": [dict(problem_of[key]) for key in part]})
            response = self._transport.request("POST", "/v1/lookups", repeatable=True, content=body)
            results = _parse(response, Lookups).results
            if len(results) != len(part):
                raise _unexpected(response, f"{counted(len(results), 'result')} for {counted(len(part), 'problem')}")
            answers.update(zip(part, results, strict=True))
        hits = {key: cached[key] for key in answers if key in cached and key not in missing}
        hits |= {key: (time.monotonic(), answers[key]) for key in missing if answers[key].record is not None}
        self._remember(self._lookups, hits, REMEMBERED_LOOKUPS)
        # A result without a name is named by the service after its place in the request, which is not its place here.
        named = zip(keys, problems, strict=True)
        return [answers[key].model_copy(update={"name": problem.get("name")}) for key, problem in named]

    def kernel(self, key: str) -> WinnerRecord:
        """The winner record `key`. A record that has not changed is not sent again. Raises `NotFound`."""
        stored = self._records.get(key)
        path = f"/v1/kernels/{_part(key, 'the key')}"
        response = self._get(path, {"If-None-Match": stored[0]} if stored else {})
        if response.status_code == 304 and stored:
            self._remember(self._records, {key: stored}, REMEMBERED_RECORDS)
            return stored[1]
        record = _parse(response, WinnerRecord)
        if etag := response.headers.get("ETag"):
            self._remember(self._records, {key: (etag, record)}, REMEMBERED_RECORDS)
        return record

    def blob(self, digest: str, kind: str = "so") -> bytes:
        """The bytes with this SHA-256, from the cache folder or the service.

        `kind` is the suffix of the cached file. Raises `NotFound`, and `DigestMismatch` when other bytes came.
        """
        check_digest(digest)
        data = self.blobs.get(digest, kind)
        if data is None:
            data = self._get(f"/v1/blobs/sha256/{digest}", {"Accept": "*/*"}).content
            verify(data, digest, f"the answer of {self.url}/v1/blobs/sha256/{digest}")
            self.blobs.put(digest, data, kind)
        return data

    def _get(self, path: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
        return self._transport.request("GET", path, repeatable=True, headers=headers)

    def _remember(self, memory: dict[str, _Value], new: Mapping[str, _Value], at_most: int) -> None:
        """Add `new` as the most recently used, and drop the least recently used above `at_most`."""
        with self._lock:
            for key, value in new.items():
                memory.pop(key, None)
                memory[key] = value
            for key in list(islice(memory, max(0, len(memory) - at_most))):
                del memory[key]


def progress_of(event: Event) -> Progress | None:
    """The counts an event carries, as its data or as their `progress`; None if it carries none."""
    try:
        return Progress.model_validate(event.data.get("progress", event.data))
    except ValidationError:
        return None


def _job_path(job_id: str) -> str:
    return f"/v1/jobs/{_part(job_id, 'the job')}"


def _part(value: str, what: str) -> str:
    """An id as one part of a path. Raises `UsageError` for what can be none: without it, another address is asked."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise UsageError(f"{what} is {value!r}; expected an id: printable text that is not empty")
    quoted = quote(value, safe="")
    return (
        quoted.replace(".", "%2E") if value in (".", "..") else quoted
    )  # as it stands, it would be a step in the path


def _parse(response: httpx.Response, kind: type[_Answer]) -> _Answer:
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise _unexpected(response, f"{place}: {first['msg']}") from error


def _unexpected(response: httpx.Response, why: str) -> UnexpectedAnswer:
    request = response.request
    return UnexpectedAnswer(
        f"{request.url} did not answer as cukiln does ({why}); check the address, and that client and service "
        "are of the same release",
        method=request.method,
        url=str(request.url),
    )
