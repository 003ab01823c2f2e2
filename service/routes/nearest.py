"""Misses of a lookup → records of a neighbour's kernels: verified, right for the very problem, tuned for another.

A neighbour has the signature of the problem and its target. Its kernel answers where a job that lists its schedule
would publish the same library: the operator's rules accept the schedule for the problem, and source, launch code,
launch-time values, toolchain and target give the id of the library that the neighbour's record names. Then its verdict,
which belongs to source and code, is one on the problem too, as where two problems' own winners share a kernel; but for
offsets, see `codegen.neighbours.reaches_no_further`. All else of the answer is computed for the problem: the call,
bytes of workspace, the predicted time. What was measured of the neighbour is left out.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache

from codegen.errors import CodegenError
from codegen.identity import library_id
from codegen.kernel import Candidate
from codegen.lower import lower
from codegen.neighbours import NEAR_BYTES, Extents, distance, place_of, reaches_no_further
from codegen.operator import Operator
from codegen.operators import operator
from codegen.predict.roofline import predict
from codegen.search.search import Search
from codegen.targets import target as data_sheet
from codegen.text.ptxas_report import Resources
from codegen.text.render_group import slice_digest
from codegen.text.winner_text import host_digest
from cukiln.types import FrontEntry, TunedFor, WinnerRecord
from service.requests.resolve import LookupProblem, Resolved
from service.winner_cache import CachedWinner, WinnerCache
from storage.database.database_errors import DATABASE_ERRORS
from storage.database.session import Session
from storage.database.sql import chunks, is_predicted
from storage.entities.libraries import libraries_of
from storage.entities.pareto_front import pareto, point_of
from storage.entities.winners import Neighbour, launch_of, neighbours_of

log = logging.getLogger("cukiln.service")

LOOKED_AT = 16
"""Records of the next sizes, smaller and larger, whose distance is computed."""
TRIED = 4
"""Of them, the nearest, whose kernels are tried."""
MISSES_AT_ONCE = 100
"""Of one read transaction."""


@dataclass(frozen=True)
class Policy:
    """Which kernels the caller takes."""

    workspace_limit_bytes: int | None
    deterministic: bool


@dataclass(frozen=True)
class _Near:
    """A neighbour, so far away."""

    row: Neighbour
    distance: float


def nearest_records(winners: WinnerCache, misses: Mapping[int, LookupProblem], policy: Policy) -> dict[int, bytes]:
    """By place, as JSON, of the misses that a neighbour's kernel is right for. Of a database that does not answer, what
    it has answered before: it never costs a lookup its hits."""
    records: dict[int, bytes] = {}
    try:
        for some in chunks(misses.items(), MISSES_AT_ONCE):
            for place, record in _records(winners, dict(some), policy).items():
                records[place] = record.model_dump_json().encode()
    except DATABASE_ERRORS as error:
        log.warning("no neighbours of %d misses: %s", len(misses) - len(records), error)
    return records


def _records(winners: WinnerCache, misses: Mapping[int, LookupProblem], policy: Policy) -> dict[int, WinnerRecord]:
    """No session is held while another is opened: a pool of connections that all do that stands still."""
    with winners.database.read() as session:
        near = {place: _nearest(session, problem.asked) for place, problem in misses.items()}
    cached = winners.get([neighbour.row.key for some in near.values() for neighbour in some])
    records: dict[int, WinnerRecord] = {}
    for number in range(TRIED):
        lent = {
            place: _Lent.of(misses[place].asked, some[number], cached[some[number].row.key], policy)
            for place, some in near.items()
            if place not in records and number < len(some) and some[number].row.key in cached  # else withdrawn
        }
        if not lent:
            continue
        with winners.database.read() as session:
            libraries = libraries_of(session, [id for each in lent.values() for id in each.libraries.values()])
        for place, each in lent.items():
            if front := each.front(misses[place].asked, libraries):
                records[place] = _record(misses[place], each, front)
    return records


def _record(problem: LookupProblem, lent: "_Lent", front: list[FrontEntry]) -> WinnerRecord:
    asked, theirs = problem.asked, lent.theirs
    return WinnerRecord(
        key=problem.key,
        revision=0,
        operator=asked.operator.name,
        problem=asked.problem.canonical(),
        target=asked.target,
        emulates=data_sheet(asked.target).emulates,
        device_class=problem.key_class,
        cuda=theirs.cuda,
        ranked_by="predicted",
        front=front,
        searches=[],
        updated_at=theirs.updated_at,
        tuned_for=TunedFor(
            key=theirs.key,
            revision=theirs.revision,
            device_class=theirs.device_class,
            problem=theirs.problem,
            distance=round(lent.distance, 6),
        ),
    )


def _nearest(session: Session, asked: Resolved) -> list[_Near]:
    """The nearest, whose offsets reach as far; of equally near ones first what was measured."""
    rows = neighbours_of(session, place_of(asked.operator, asked.problem), asked.target, LOOKED_AT, asked.cuda)
    own = Extents.of(asked.operator, asked.problem)
    near = []
    for row in rows:
        theirs = _extents(asked.operator, row.problem)
        if reaches_no_further(own, theirs):
            near.append(_Near(row, distance(own, theirs)))
    near.sort(key=lambda at: (at.distance, is_predicted(at.row.device_class), at.row.key))
    return near[:TRIED]


@lru_cache(maxsize=16_384)
def _extents(kind: Operator, problem: str) -> Extents:
    """Parsing a problem takes 0.1 ms, and problems of one model have the same neighbours."""
    return Extents.of(kind, kind.parse(json.loads(problem)))


@dataclass(frozen=True)
class _Lent:
    """A neighbour's record, and by its candidates the problem's own ones of the same schedules, with the ids of the
    libraries that would be published for these."""

    theirs: WinnerRecord
    distance: float
    candidates: Mapping[str, Candidate]
    libraries: Mapping[str, str]

    @classmethod
    def of(cls, asked: Resolved, near: _Near, cached: CachedWinner, policy: Policy) -> "_Lent":
        theirs = WinnerRecord.model_validate_json(cached.json)
        candidates = _candidates(asked, theirs, policy)
        entries = [entry for entry in theirs.front if entry.candidate in candidates]
        ids = {entry.candidate: _library(candidates[entry.candidate], entry, asked.target) for entry in entries}
        return cls(theirs, near.distance, candidates, ids)

    def front(self, asked: Resolved, libraries: Mapping[str, str]) -> list[FrontEntry]:
        """Of the kernels whose library is the one of that id. `libraries`: digests by id, of those there are."""
        entries = [
            _entry(self.candidates[entry.candidate], entry, asked)
            for entry in self.theirs.front
            if entry.candidate in self.libraries and libraries.get(self.libraries[entry.candidate]) == entry.so_sha256
        ]
        by_id = {entry.candidate: entry for entry in entries}
        return [by_id[point.candidate] for point in pareto(point_of(entry) for entry in entries)]


_PREDICTED_BY = {field.name for field in fields(Resources)}


def _candidates(asked: Resolved, theirs: WinnerRecord, policy: Policy) -> dict[str, Candidate]:
    """By the neighbour's candidate, the problem's own with the same schedule, where rules and policy accept it."""
    candidates = {}
    for entry in theirs.front:
        if not entry.resources.keys() >= _PREDICTED_BY:  # as an import or an earlier release may have it
            continue
        if theirs.vendor_won(entry):  # so it may here, and frameworks have the vendor's
            continue
        try:
            lowered = lower(
                asked.problem,
                data_sheet(asked.target),
                Search(schedules=[entry.schedule]),
                policy.workspace_limit_bytes,
                deterministic=policy.deterministic,
            )
        except CodegenError:  # a schedule of an earlier release, or that no schedule of this problem is
            continue
        for candidate in lowered.candidates:
            needed = asked.operator.cost(candidate.problem, candidate.schedule).workspace_bytes
            if candidate.kernel.id == entry.kernel and (needed < NEAR_BYTES or needed <= entry.workspace_bytes):
                candidates[entry.candidate] = candidate
    return candidates


def _library(candidate: Candidate, entry: FrontEntry, target: str) -> str:
    """The id of the library that would be published for the candidate, by the toolchain of the neighbour's."""
    values = tuple(operator(candidate.kernel.operator).launch_values(candidate.schedule))
    host = _host(candidate.kernel, values, data_sheet(target))
    return library_id(_slice(candidate.kernel), host, entry.toolchain, target)


_slice = lru_cache(maxsize=4096)(slice_digest)
_host = lru_cache(maxsize=4096)(host_digest)


def _entry(candidate: Candidate, theirs: FrontEntry, asked: Resolved) -> FrontEntry:
    prediction = predict(candidate, Resources.from_dict(theirs.resources), data_sheet(asked.target))
    needed = asked.operator.cost(candidate.problem, candidate.schedule).workspace_bytes
    return theirs.model_copy(
        update={
            "candidate": candidate.id,
            "schedule": candidate.schedule.as_dict(),
            # Only the launch code has the grids, and that runs in the library.
            "launch": launch_of(candidate, functions=(), workspace_bytes=needed),
            "workspace_bytes": needed,
            "predicted_us": prediction.us,
            "prediction": prediction.as_dict(),
            "measured_us": None,
            "measurement": None,
            "measured_on": None,
        }
    )
