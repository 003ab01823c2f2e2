"""GET /v1/kernels/{key}, POST /v1/lookups: winner records by key or by problem, from process memory over the database.

A record by its key on the event loop: one that memory cannot answer is read by `service.threads`, with others. Misses
of a lookup become a job where the caller asks for that; what comes of it never costs the lookup its hits."""

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.routing import Route

from codegen.identity import under_cuda
from cukiln.types import Job, Lookups, PartialLookups, WinnerRecord
from service.auth import admitted, may_call, needs, require_scope
from service.context import Service, ServiceDep, service_of
from service.http.answers import PiecesResponse, none_match
from service.http.errors import Refused, refuse
from service.http.handle_errors import refused_by
from service.http.parameters import known_parameters
from service.http.strict_json import read_json
from service.openapi import BODY_PROBLEMS, EXAMPLE, body_of, problems
from service.requests.models import LOOKUP_FIELDS, LookupRequest
from service.requests.resolve import Known, LookupProblem, read_request, resolve_lookups
from service.routes.accept_job import Submission, TriedMeanwhile, Untried, accept_jobs, raised
from service.routes.body import Body
from service.routes.by_id import require_one
from service.routes.nearest import Policy, nearest_records
from service.winner_cache import WinnerCache, part_of
from storage.database.database_errors import DATABASE_ERRORS, Failure, failure_of
from storage.entities.jobs import Trying, tried_keys
from storage.entities.winners import Elsewhere

router = APIRouter(prefix="/v1", tags=["kernels"])
_KEY = re.compile(r"[0-9a-f]{64}")


@router.get(
    "/kernels/{key}",
    operation_id="get_winner",
    response_model=WinnerRecord,
    responses=problems("kernel-not-found", "ambiguous-prefix", "database-unavailable"),
)
async def get_kernel(key: str, request: Request) -> Response:
    """The winner record, by its key or 8 or more digits that no other's begins with; its ETag is its revision and its
    content."""
    service = service_of(request)
    winner = None
    if not _KEY.fullmatch(key):
        key = await run_in_threadpool(_whole_key, service, key)
    if _KEY.fullmatch(key):
        winner = service.winners.fresh(key) or await service.winner_reads.do(key)
    if winner is None:
        raise refuse("kernel-not-found", f"There is no winner record under {key[:80]!r}.", field="key")
    headers = {"ETag": winner.etag, "Cache-Control": "no-cache"}  # may be kept, must be asked for again
    if none_match(request.headers.get("if-none-match"), winner.etag):
        return Response(status_code=304, headers=headers)
    return Response(winner.json, headers=headers, media_type="application/json")


def _whole_key(service: Service, prefix: str) -> str:
    with service.database.read() as session:
        return require_one(session, "kernel", prefix)


async def _get_kernel(request: Request) -> Response:
    request.scope["route"] = DIRECT  # which Starlette, unlike FastAPI, does not say
    await may_call(request)
    await known_parameters(request)
    return await get_kernel(request.path_params["key"], request)


DIRECT = Route("/v1/kernels/{key}", _get_kernel, methods=["GET"])
"""The same before FastAPI's routes, whose way to it takes more than twice the CPU time of all else."""


MOST_ELSEWHERE = 8
"""Device classes without a live GPU that one problem is looked up on, where the policy refuses earlier records."""
FAILED_SECONDS = 86_400.0
"""A search that has failed is not repeated for so long."""
ATTEMPTS = 3
"""At a job of what is not tried: another process may be faster."""
_ONE_AT_A_TIME = threading.Lock()
"""From the look for what is tried already to the job: the processes of a training look the same problems up at once.
Requests of this process wait here, those of others are seen when the job is written (`Untried`)."""


@router.post(
    "/lookups",
    operation_id="look_up_winners",
    response_model=Lookups | PartialLookups,
    responses=problems(*BODY_PROBLEMS, "storage-full", "database-unavailable", "blobs-unavailable"),
    openapi_extra=body_of("LookupRequest", EXAMPLE),
)
@needs("read")
def post_lookups(body: Body, request: Request, service: ServiceDep) -> Response:
    """The winner record of each problem, null where there is none; nothing is queued unless `on_miss` says so, nor is
    anything answered that was tuned for another problem.

    Where no device class is named, the record is that of a class with a live GPU, else of any that was measured, else
    the predicted one; `device_class` says which."""
    settings = service.settings
    value = read_json(body, settings.max_json_depth)
    lookup = read_request(LookupRequest, value, settings.max_problems)
    if lookup.on_miss != "none":
        require_scope(admitted(request), "submit", f"on_miss: {lookup.on_miss}")
    known = service.known()
    search = _Search(service.winners, resolve_lookups(lookup, known), lookup)
    queued = tune_misses(service, known, value, search.misses()) if lookup.on_miss != "none" else Queued()
    if lookup.on_miss == "nearest":
        policy = Policy(lookup.workspace_limit_bytes, lookup.deterministic)
        search.add_nearest(nearest_records(service.winners, search.misses(), policy))
    return PiecesResponse(list(search.answer(queued)), media_type="application/json")


@dataclass(frozen=True)
class Queued:
    """`trying`: by key of the record. `refused`: why no job was made of the others."""

    trying: Mapping[str, Trying] = field(default_factory=dict)
    refused: str | None = None


def tune_misses(service: Service, known: Known, body: Mapping[str, Any], misses: dict[int, LookupProblem]) -> Queued:
    """`body`: of the lookup. `misses`: by place in it."""
    places = {
        problem.key: place
        for place, problem in reversed(misses.items())
        # No other class can be measured on.
        if problem.asked.device_class in ("", *known.device_classes(problem.asked.target))
    }
    trying: dict[str, Trying] = {}
    try:
        with _ONE_AT_A_TIME:
            for _ in range(ATTEMPTS):
                untried = Untried(
                    {key: misses[place].asked.search.canonical() for key, place in places.items()},
                    service.database.clock.now() - FAILED_SECONDS,
                )
                with service.database.read() as session:
                    trying = tried_keys(session, untried.searches, untried.since)
                new = {key: place for key, place in places.items() if key not in trying}
                if not new:
                    return Queued(trying)
                outcome = _submit(service, body, {place: misses[place] for place in sorted(new.values())}, untried)
                if not isinstance(outcome, TriedMeanwhile):
                    job = raised(outcome)
                    return Queued({**trying, **{key: Trying(job.job, "queued") for key in new}})
        return Queued(trying, f"Other processes queued some of these problems {ATTEMPTS} times over: look up again.")
    except Refused as refused:
        return Queued(trying, str(refused))
    except DATABASE_ERRORS as error:
        return Queued(trying, str(refused_by(failure_of(error) or Failure.UNAVAILABLE)))


def _submit(
    service: Service, body: Mapping[str, Any], new: Mapping[int, LookupProblem], untried: Untried
) -> Job | Exception:
    searches = {problem.key: untried.searches[problem.key] for problem in new.values()}
    submission = Submission(_job_body(body, new), untried=replace(untried, searches=searches))
    return accept_jobs(service, [submission])[0]


def _job_body(body: Mapping[str, Any], misses: Mapping[int, LookupProblem]) -> bytes:
    """In a lookup several problems may have one name, in a job none."""
    names = _unique(problem.asked.name for problem in misses.values())
    problems = [{**body["problems"][place], "name": name} for place, name in zip(misses, names, strict=True)]
    own = {name: part for name, part in body.items() if name not in LOOKUP_FIELDS}
    return json.dumps({**own, "problems": problems}).encode()


def _unique(names: Iterable[str]) -> list[str]:
    given: dict[str, None] = {}
    for name in names:
        number, own = 1, name
        while own in given:
            number += 1
            own = f"{name[:240]} ({number})"
        given[own] = None
    return list(given)


class _Search:
    """The first record of each problem with a kernel that the request allows: see `post_lookups` for the order."""

    def __init__(self, winners: WinnerCache, problems: Sequence[LookupProblem], request: LookupRequest) -> None:
        self._winners, self._problems = winners, problems
        self._policy = request.workspace_limit_bytes, request.deterministic
        self._fields = tuple(request.fields) if request.fields else None
        self._found: dict[int, tuple[str, bytes]] = {}
        self._nearest: Mapping[int, bytes] = {}
        for level in range(max((len(problem.keys) for problem in problems), default=0)):
            self._try({place: problem.keys[level] for place, problem in self._open() if level < len(problem.keys)})
        self._try_elsewhere()
        self._try({place: p.predicted for place, p in self._open() if p.predicted is not None})

    def misses(self) -> dict[int, LookupProblem]:
        """The problems without a record, by place."""
        return dict(self._open())

    def add_nearest(self, records: Mapping[int, bytes]) -> None:
        """Of misses, by place: what was tuned for a problem near by."""
        self._nearest = {place: part_of(r, self._fields) if self._fields else r for place, r in records.items()}

    def answer(self, queued: Queued) -> Iterator[bytes]:
        """The JSON of `Lookups`, put together from records that are JSON already."""
        yield b'{"results":['
        for place, problem in enumerate(self._problems):
            key, record = self._found.get(place, (problem.key, self._nearest.get(place, b"null")))
            yield b'%b{"name":%b,"key":"%b","record":' % (
                b"," if place else b"",
                json.dumps(problem.asked.name).encode(),
                key.encode(),
            )
            yield record
            trying = queued.trying.get(key) if place not in self._found else None
            yield b',"tuning":%b}' % json.dumps(vars(trying)).encode() if trying else b"}"
        hits = len(self._found)
        yield b'],"hits":%d,"misses":%d' % (hits, len(self._problems) - hits)
        yield b',"not_queued":%b}' % json.dumps(queued.refused).encode() if queued.refused else b"}"

    def _open(self) -> Iterator[tuple[int, LookupProblem]]:
        return ((place, problem) for place, problem in enumerate(self._problems) if place not in self._found)

    def _try(self, keys: dict[int, str]) -> None:
        winners = self._winners.get(keys.values())
        for place, key in keys.items():
            record = winners[key].allowed(*self._policy) if key in winners else None
            if record is None:
                continue
            if self._fields is not None:
                whole = record is winners[key].json
                record = self._winners.part(key, winners[key], self._fields) if whole else part_of(record, self._fields)
            self._found[place] = key, record

    def _try_elsewhere(self) -> None:
        after = {place: "" for place, problem in self._open() if problem.predicted is not None}
        for _ in range(MOST_ELSEWHERE):
            places = [place for place in after if place not in self._found]
            others = self._winners.elsewhere([self._elsewhere(place, after[place]) for place in places])
            after = {places[index]: device_class for index, (device_class, _) in others.items()}
            if not after:
                return
            self._try({places[index]: key for index, (_, key) in others.items()})

    def _elsewhere(self, place: int, after: str) -> Elsewhere:
        asked = self._problems[place].asked
        return Elsewhere(under_cuda(asked.problem.digest, asked.cuda), asked.target, after)
