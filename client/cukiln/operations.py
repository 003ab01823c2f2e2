"""What a client does, step by step: what is sent, how an answer is read, what is remembered. `cukiln.client` has the
two ways to take the steps, blocking and `async`; each operation is written here once."""

import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

import httpx2
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from cukiln.counted import counted
from cukiln.errors import (
    BadRequest,
    CukilnError,
    NotFound,
    ServiceBusy,
    ServiceError,
    ServiceFailed,
    ServiceUnreachable,
    UnexpectedAnswer,
    UsageError,
    WaitTimeout,
)
from cukiln.events import Event
from cukiln.gpu import local_target
from cukiln.job_request import encode
from cukiln.local_cache import RECORD, CachedAnswer, LocalCache, check_digest, verify
from cukiln.settings import ClientSettings
from cukiln.transport import AsyncTransport, Call, Transport
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
    JobPage,
    JobState,
    JobSummary,
    LookedUp,
    Lookups,
    OnMiss,
    Opened,
    OperatorReport,
    Operators,
    PartialLookups,
    PartialResult,
    Priority,
    ProfileOperator,
    ProfilePage,
    Progress,
    RejectionReport,
    Rejections,
    Targets,
    WinnerRecord,
)
from cukiln.types.problems import Problem

LARGEST_LOOKUP = 10_000  # problems in one request
LARGEST_PAGE = 1_000  # candidates, or imports, in one answer
REMEMBERED_LOOKUPS = 100_000  # of a client; the least recently used are dropped first
BUDGETED_PROBLEMS = 100  # of one request, within the budget of a lookup; more get more time, in proportion
FRESH_SECONDS = 60.0
NEAREST_SECONDS = 5.0  # kernels of a neighbour are asked for again after: the problem's own are being tuned

_Answer = TypeVar("_Answer", bound=BaseModel)
_Page = TypeVar("_Page", CandidatePage, ImportPage, JobPage, ProfilePage)
_Item = TypeVar("_Item")
_T = TypeVar("_T")
_Named = TypeVar("_Named", LookedUp, PartialResult)
ProgressCallback = Callable[[Progress], None]
# The service is not there, or cannot answer now: not a fault of the request.
_NO_ANSWER = (ServiceUnreachable, ServiceBusy, ServiceFailed, UnexpectedAnswer)


@dataclass(frozen=True, slots=True)
class Follow:
    """Read the events of a job to its end, or to a deadline (`time.monotonic()`), and report each."""

    path: str
    deadline: float | None
    report: Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


Step = Call | Follow | Pause
# A generator of steps: a call is sent its response, any step's error is raised where it was yielded.
Operation = Generator[Step, Any, _T]


@dataclass(frozen=True)
class Listing(Generic[_Page, _Item]):
    """Something that the service answers in pages."""

    path: str
    page: type[_Page]
    items: Callable[[_Page], Sequence[_Item]]
    options: Mapping[str, Any]

    def read(self, cursor: str | None) -> Operation[_Page]:
        """The page at `cursor`, None: the first."""
        parameters = {"limit": LARGEST_PAGE, **self.options, "cursor": cursor}
        query = urlencode({name: value for name, value in parameters.items() if value is not None})
        response = yield Call("GET", f"{self.path}?{query}")
        return parse(response, self.page)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A problem with the options of its lookup, ready to be looked up many times: `Client.prepare`."""

    digest: str  # of what is sent, and where
    name: str | None
    problem: Mapping[str, Any]
    shared: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OnMissTerms:
    """What the service is to do about misses, and by which search."""

    on_miss: OnMiss = "none"
    search: Mapping[str, Any] | None = None
    priority: Priority | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """Of the request."""
        if self.on_miss == "none":
            return {}
        given = {"on_miss": self.on_miss, "search": self.search, "priority": self.priority}
        return {name: value for name, value in given.items() if value is not None}


def _once() -> dict[str, str]:
    """Headers of a request that makes a job: sent again, it makes no second one."""
    return {"Idempotency-Key": uuid.uuid4().hex}


class Operations:
    """The state of a client, and its operations."""

    _transport: Transport | AsyncTransport

    def __init__(
        self,
        settings: ClientSettings,
        cache_dir: Path | str | None,
        lookup_budget: float,
        fresh_seconds: float,
    ) -> None:
        folder = Path(cache_dir) if cache_dir is not None else settings.cache_dir
        self.cache = LocalCache(folder, settings.cache_bytes)
        self._lookup_budget, self._fresh_seconds = lookup_budget, fresh_seconds
        self._lock = threading.Lock()
        self._lookups: dict[str, LookedUp] = {}
        self._nearest: dict[str, LookedUp] = {}  # what neighbours answer meanwhile: no winners of the problems
        self._revalidated: set[str] = set()  # requests that are asked again now

    @property
    def url(self) -> str:
        return self._transport.url

    # ---- jobs

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
        progress: ProgressCallback | None = None,
        wait: bool = True,
        timeout: float | None = None,
    ) -> Operation[Job]:
        """Find the best kernel for each of `problems`, and return the job.

        `target`: an architecture such as `sm_90a`; default: that of this machine's GPU. `budget`: seconds the service
        may spend; `timeout`: seconds to wait here. `workspace_limit_bytes` and `deterministic` (equal bits in every
        run) say which kernels may win. A job that ends `partial` or `failed` is an answer, not an exception: look at
        `job.state` and each problem's `error`.
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
        job = yield from self._submit({**request, "problems": [dict(problem) for problem in problems]})
        return (yield from self._wait(job, progress=progress, timeout=timeout)) if wait else job

    def _submit(self, request: Mapping[str, Any]) -> Operation[Job]:
        """Send a whole job request (the body of `POST /v1/jobs`); returns at once. Without a target it is tuned for
        this machine's GPU."""
        response = yield Call("POST", "/v1/jobs", encode(with_target(request)), headers=_once())
        return parse(response, Job)

    def _retry(self, job_id: str) -> Operation[Job]:
        """A new job of what failed, was cancelled or was not tried as a whole of one that has ended; returns at once.
        Raises `BadRequest` where it has not ended, or nothing of it is left to try."""
        response = yield Call("POST", f"{job_path(job_id)}/retry", headers=_once())
        return parse(response, Job)

    def _forget(self, what: str) -> Operation[Forgotten]:
        """Forget the winner record, else the build, whose key or id begins so: the next job tries it again. Raises
        `NotFound`, and `BadRequest` where several begin so, or a job that has not ended needs the build."""
        name = part(what, "what to forget")
        try:
            response = yield Call("DELETE", f"/v1/kernels/{name}", repeatable=False)
        except NotFound:
            response = yield Call("DELETE", f"/v1/builds/{name}", repeatable=False)
        return parse(response, Forgotten)

    def _job(self, job_id: str) -> Operation[Job]:
        """The job whose id this is, or begins so with 8 or more digits. Raises `NotFound`, and `BadRequest` where
        several begin so."""
        return parse((yield Call("GET", job_path(job_id))), Job)

    def _jobs(self, *, state: JobState | None = None) -> Listing[JobPage, JobSummary]:
        """Yield jobs, the newest first."""
        return Listing("/v1/jobs", JobPage, lambda page: page.jobs, {"state": state})

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

    def _bundle(self, job_id: str) -> Operation[dict[str, Any]]:
        """The input to measure the job without a service (see `cukiln export-bundle`). Raises `NotFound`."""
        return json_object((yield Call("GET", f"{job_path(job_id)}/bundle")))

    def _send_results(self, results: Mapping[str, Any]) -> Operation[Job]:
        """Import what such a machine measured; returns the job that publishes it. Idempotent. Raises `BadRequest`."""
        return parse((yield Call("POST", "/v1/results", encode(results))), Job)

    def _imports(self) -> Listing[ImportPage, ImportReport]:
        """Yield imports, the newest first, withdrawn ones included."""
        return Listing("/v1/imports", ImportPage, lambda page: page.imports, {})

    def _withdraw_import(self, import_id: str) -> Operation[ImportReport]:
        """Take an import back: records are what they would be without it. Idempotent. Raises
        `NotFound`, and `NotAuthorised` where the key neither sent it nor is an admin's."""
        return parse((yield Call("DELETE", f"/v1/imports/{part(import_id, 'the import')}")), ImportReport)

    def _candidate(self, candidate: str, *, job: str | None = None) -> Operation[CandidateFacts]:
        """All that is known of a candidate, by its id or the first 8 or more digits of it; as one job has it, where
        given, else the latest facts. Raises `NotFound`, and `BadRequest` where several begin so."""
        query = f"?job={part(job, 'the job')}" if job is not None else ""
        return parse((yield Call("GET", f"/v1/candidates/{part(candidate, 'the candidate')}{query}")), CandidateFacts)

    def _targets(self) -> Operation[Targets]:
        """The architectures, compilers and GPUs that the service has now."""
        return parse((yield Call("GET", "/v1/targets")), Targets)

    def _operators(self) -> Operation[list[OperatorReport]]:
        """The operators of the service: the JSON Schema of their problems and searches, their tunables."""
        return parse((yield Call("GET", "/v1/operators")), Operators).operators

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

    # ---- winners

    def prepare(
        self,
        problem: Problem,
        *,
        target: str | None = None,
        device_class: str | None = None,
        workspace_limit_bytes: int | None = None,
        deterministic: bool = False,
    ) -> Prepared:
        """The problem with these options, for `lookup`: what is looked up many times is written as JSON once."""
        return self._prepare(
            problem,
            {
                "target": target,
                "device_class": device_class,
                "workspace_limit_bytes": workspace_limit_bytes,
                "deterministic": deterministic or None,
            },
        )

    def _prepare(self, problem: Mapping[str, Any], options: Mapping[str, Any]) -> Prepared:
        shared = {name: value for name, value in options.items() if value is not None}
        if "target" not in shared and "target" not in problem and (target := local_target()) is not None:
            shared["target"] = target
        name = problem.get("name")
        sent = {key: value for key, value in problem.items() if key != "name"}
        digest = hashlib.sha256(self.url.encode() + b"\n" + encode({**shared, "problems": [sent]})).hexdigest()
        return Prepared(digest, name if isinstance(name, str) else None, problem, shared)

    def _asked(
        self,
        problems: Sequence[Problem | Prepared],
        target: str | None,
        device_class: str | None,
        workspace_limit_bytes: int | None,
        deterministic: bool,
    ) -> list[Prepared]:
        """The problems of a lookup; the options are those of what is not prepared."""
        options = {
            "target": target,
            "device_class": device_class,
            "workspace_limit_bytes": workspace_limit_bytes,
            "deterministic": deterministic or None,
        }
        return [problem if isinstance(problem, Prepared) else self._prepare(problem, options) for problem in problems]

    def _lookup(
        self,
        problems: Sequence[Problem | Prepared],
        *,
        target: str | None = None,
        device_class: str | None = None,
        workspace_limit_bytes: int | None = None,
        deterministic: bool = False,
        on_miss: OnMiss = "none",
        search: Mapping[str, Any] | None = None,
        priority: Priority | None = None,
        refresh: bool = False,
    ) -> Operation[list[LookedUp]]:
        """The known winner of each problem, in order; `record` is None where there is none yet. Nothing is tuned unless
        `on_miss` says so.

        `target`: an architecture; default: that of this machine's GPU. `workspace_limit_bytes` and `deterministic`
        (equal bits in every run) narrow the kernels of each record. The options are those of problems that are not
        `prepare`d.

        A winner that the service answered before, to this process or to an earlier one, comes from the local cache;
        where that is longer ago than `fresh_seconds`, the service is asked behind the caller's back. Misses are asked
        for, within the client's `lookup_budget`. A service that does not answer is a miss whose `unanswered` says why.
        `on_miss`: `tune` makes a job of misses, by `search` and `priority`, where none tries them (`tuning` names it).
        `nearest` does, and answers verified kernels that are right for the problem but were tuned for one near by:
        such a record is `tuned_for` that, and is asked for again after 5 s; it is not kept on the disk.
        `refresh`: ask the service for every problem, as patiently as for a job, and raise `ServiceError`.
        """
        missed = OnMissTerms(on_miss, search, priority)
        asked = self._asked(problems, target, device_class, workspace_limit_bytes, deterministic)
        answers: dict[str, LookedUp] = {}
        missing: dict[str, Prepared] = {}
        stale: dict[str, Prepared] = {}
        now = time.time()
        for prepared in asked:
            known = None if refresh else self._known(prepared.digest)
            fresh_seconds = self._fresh_seconds
            if known is None and on_miss == "nearest" and not refresh:
                known, fresh_seconds = self._nearest.get(prepared.digest), NEAREST_SECONDS
            if known is None:
                missing[prepared.digest] = prepared
                continue
            answers[prepared.digest] = known
            if not 0 <= now - known.at < fresh_seconds:
                stale[prepared.digest] = prepared
        if missing:
            answers |= yield from self._ask(list(missing.values()), missed, patient=refresh)
        if stale and not (self._transport.breaker.open or self._transport.offline):
            self._revalidate(list(stale.values()), missed)
        return [_named(answers[prepared.digest], prepared.name) for prepared in asked]

    def _lookup_fields(
        self,
        problems: Sequence[Problem | Prepared],
        fields: Sequence[str],
        *,
        target: str | None = None,
        device_class: str | None = None,
        workspace_limit_bytes: int | None = None,
        deterministic: bool = False,
        on_miss: OnMiss = "none",
        search: Mapping[str, Any] | None = None,
        priority: Priority | None = None,
    ) -> Operation[list[PartialResult]]:
        """As `lookup`, but of each record these fields alone, as JSON: `revision`, or `front.so_sha256` of each kernel.
        The service is asked for every problem, as patiently as for a job: nothing is taken from a cache, or kept.
        Raises `ServiceError`."""
        asked = self._asked(problems, target, device_class, workspace_limit_bytes, deterministic)
        terms = {"fields": list(fields), **OnMissTerms(on_miss, search, priority).fields}
        answers: dict[str, PartialResult] = {}
        for shared, part in _requests(list({prepared.digest: prepared for prepared in asked}.values())):
            body = encode({**shared, **terms, "problems": [dict(one.problem) for one in part]})
            response = yield Call("POST", "/v1/lookups", body)
            results = _as_many(response, parse(response, PartialLookups).results, part)
            answers |= {one.digest: result for one, result in zip(part, results, strict=True)}
        return [_named(answers[prepared.digest], prepared.name) for prepared in asked]

    def _known(self, digest: str) -> LookedUp | None:
        """What is remembered of the request, here or on the disk."""
        result = self._lookups.get(digest) or self._of_disk(digest)
        if result is not None:
            self._remember(self._lookups, {digest: result})
        return result

    def _of_disk(self, digest: str) -> LookedUp | None:
        answer = self.cache.answer(digest)
        record = None if answer is None else self._cached_record(answer)
        if answer is None or record is None:
            return None
        return LookedUp(name=None, key=answer.key, record=record, at=answer.at)

    def _cached_record(self, answer: CachedAnswer) -> WinnerRecord | None:
        data = self.cache.get(answer.record, RECORD)
        try:
            # A fifth less time than reading and checking at once takes: most of a record is free-form.
            return None if data is None else WinnerRecord.model_validate(from_json(data, cache_strings="keys"))
        except ValueError:  # of another release
            return None

    def _ask(
        self, prepared: Sequence[Prepared], missed: OnMissTerms, *, patient: bool
    ) -> Operation[dict[str, LookedUp]]:
        """Of the service, by digest; it is remembered what it has. `patient`: without a budget; raise errors."""
        answers: dict[str, LookedUp] = {}
        for shared, part in _requests(prepared):
            body = encode({**shared, **missed.fields, "problems": [dict(one.problem) for one in part]})
            seconds = self._lookup_budget * max(1.0, len(part) / BUDGETED_PROBLEMS)
            try:
                response = yield Call("POST", "/v1/lookups", body, seconds=None if patient else seconds)
            except _NO_ANSWER as error:
                if patient:
                    raise
                miss = LookedUp(name=None, key="", record=None, unanswered=str(error))
                answers |= {one.digest: miss for one in part}
                continue
            results = _as_many(response, parse(response, Lookups).results, part)
            now = time.time()
            for one, result in zip(part, results, strict=True):
                answers[one.digest] = LookedUp(
                    name=None, key=result.key, record=result.record, tuning=result.tuning, at=now
                )
        self._keep(answers)
        return answers

    def _keep(self, answers: Mapping[str, LookedUp]) -> None:
        """Remember winners here and on the disk, and forget those that the service has no more."""
        hits = {digest: answer for digest, answer in answers.items() if answer.is_winner}
        self._remember(self._lookups, hits)
        self._remember(self._nearest, {digest: answer for digest, answer in answers.items() if answer.is_of_neighbour})
        for digest, answer in hits.items():
            if answer.record is not None:
                data = record_bytes(answer.record)
                sha256 = hashlib.sha256(data).hexdigest()
                kept = CachedAnswer(self.url, answer.key, answer.record.revision, sha256, answer.at)
                self.cache.keep_answer(digest, kept, data)
        for digest, answer in answers.items():
            if not answer.is_of_neighbour and answer.unanswered is None:
                self._nearest.pop(digest, None)
            if not answer.is_winner and answer.unanswered is None:
                self._lookups.pop(digest, None)
                self.cache.drop_answer(digest)

    def _revalidate(self, stale: Sequence[Prepared], missed: OnMissTerms) -> None:
        """Ask the service again, behind the caller's back."""
        raise NotImplementedError

    def _claim(self, stale: Sequence[Prepared]) -> list[Prepared]:
        """Those of `stale` that are not asked for already; `_asked_again` gives them back."""
        with self._lock:
            new = [prepared for prepared in stale if prepared.digest not in self._revalidated]
            self._revalidated.update(prepared.digest for prepared in new)
        return new

    def _asked_again(self, prepared: Sequence[Prepared], missed: OnMissTerms) -> Operation[None]:
        try:
            yield from self._ask(prepared, missed, patient=False)
        except CukilnError:
            # It refuses now what it has answered: what is known stays, and is not asked for at every call.
            now = time.time()
            for memory in (self._lookups, self._nearest):
                known = {one.digest: answer for one in prepared if (answer := memory.get(one.digest)) is not None}
                again = {digest: answer.model_copy(update={"at": now}) for digest, answer in known.items()}
                self._remember(memory, again)
        finally:
            with self._lock:
                self._revalidated.difference_update(one.digest for one in prepared)

    def _kernel(self, key: str) -> Operation[WinnerRecord]:
        """The winner record `key`, or the one whose key begins so. A record that has not changed is not sent again;
        where the service does not answer, it comes from the local cache. Raises `NotFound`."""
        path = f"/v1/kernels/{part(key, 'the key')}"
        request = hashlib.sha256(f"{self.url}{path}".encode()).hexdigest()
        answer = self.cache.answer(request)
        stored = None if answer is None else self._cached_record(answer)
        headers = {"If-None-Match": answer.etag} if answer and stored and answer.etag else {}
        try:
            response = yield Call("GET", path, headers=headers, seconds=self._lookup_budget)
        except _NO_ANSWER:
            if stored is None:
                raise
            return stored
        if response.status_code == httpx2.codes.NOT_MODIFIED and stored is not None:
            return stored
        record = parse(response, WinnerRecord)
        data = record_bytes(record)
        sha256, etag = hashlib.sha256(data).hexdigest(), response.headers.get("ETag")
        self.cache.keep_answer(
            request, CachedAnswer(self.url, record.key, record.revision, sha256, time.time(), etag), data
        )
        return record

    def _blob(self, digest: str, kind: str = "so") -> Operation[bytes]:
        """The bytes with this SHA-256, from the local cache or the service.

        `kind` is the suffix of the cached file. Raises `NotFound`, and `DigestMismatch` when other bytes came.
        """
        check_digest(digest)
        data = self.cache.get(digest, kind)
        if data is None:
            path = f"/v1/blobs/sha256/{digest}"
            response = yield Call("GET", path, headers={"Accept": "*/*"}, seconds=self._transport.timeout)
            data = verify(response.content, digest, f"the answer of {self.url}{path}")
            self.cache.put(digest, data, kind)
        return data

    def _remember(self, memory: dict[str, LookedUp], new: Mapping[str, LookedUp]) -> None:
        """Add `new` as the most recently used, and drop the least recently used above the limit."""
        with self._lock:
            for digest, result in new.items():
                memory.pop(digest, None)
                memory[digest] = result
            if len(memory) > REMEMBERED_LOOKUPS:
                for digest in list(islice(memory, len(memory) - REMEMBERED_LOOKUPS)):
                    del memory[digest]


def _as_many(response: httpx2.Response, results: list[_T], asked: Sequence[Prepared]) -> list[_T]:
    """The results, one of each problem. Raises `UnexpectedAnswer`."""
    if len(results) != len(asked):
        raise unexpected(response, f"{counted(len(results), 'result')} for {counted(len(asked), 'problem')}")
    return results


def _named(result: _Named, name: str | None) -> _Named:
    """A result without a name is named by the service after its place in the request, which is not its place here."""
    return result if result.name == name else result.model_copy(update={"name": name})


def _requests(prepared: Sequence[Prepared]) -> list[tuple[Mapping[str, Any], list[Prepared]]]:
    """As few requests as possible: of problems with the same options, so many at most."""
    groups: dict[bytes, list[Prepared]] = {}
    for one in prepared:
        groups.setdefault(encode(one.shared), []).append(one)
    return [
        (group[0].shared, group[start : start + LARGEST_LOOKUP])
        for group in groups.values()
        for start in range(0, len(group), LARGEST_LOOKUP)
    ]


def record_bytes(record: WinnerRecord) -> bytes:
    """The record as JSON, one way to write it: its SHA-256 is what a lock file pins. What has its default value is left
    out, so that a later release's fields change nothing."""
    return encode(record.model_dump(mode="json", exclude_defaults=True))


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


def job_path(job_id: str) -> str:
    return f"/v1/jobs/{part(job_id, 'the job')}"


def part(value: str, what: str) -> str:
    """An id as one part of a path. Raises `UsageError` for what can be none: without it, another address is asked."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise UsageError(f"{what} is {value!r}; expected an id: printable text that is not empty")
    quoted = quote(value, safe="")
    return (
        quoted.replace(".", "%2E") if value in (".", "..") else quoted
    )  # as it stands, it would be a step in the path


def parse(response: httpx2.Response, kind: type[_Answer]) -> _Answer:
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise unexpected(response, f"{place}: {first['msg']}") from error


def json_object(response: httpx2.Response) -> dict[str, Any]:
    """An answer without a type of its own."""
    answer = response.json()
    if not isinstance(answer, dict):
        raise unexpected(response, "it is not a JSON object")
    return answer


def unexpected(response: httpx2.Response, why: str) -> UnexpectedAnswer:
    request = response.request
    return UnexpectedAnswer(
        f"{request.url} did not answer as cukiln does ({why}); check the address, and that client and service "
        "are of the same release",
        method=request.method,
        url=str(request.url),
    )


__all__ = ["Follow", "Listing", "Operation", "Operations", "Pause", "Prepared", "ServiceError", "Step"]
