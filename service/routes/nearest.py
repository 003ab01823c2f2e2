"""Misses of a lookup → records of a neighbour's kernels: verified, right for the very problem, tuned for another.

A neighbour has the signature of the problem and its target. Its kernel answers where a job that lists its schedule
would publish the same library: the operator's rules accept the schedule for the problem, and source, launch code,
launch-time values, toolchain and target give the id of the library that the neighbour's record names. Then its verdict,
which belongs to source and code, is one on the problem too, as where two problems' own winners share a kernel; but for
offsets, see `codegen.neighbours.reaches_no_further`. All else of the answer is computed for the problem: the call,
bytes of workspace, the predicted time. What was measured of the neighbour is left out.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from codegen.errors import CodegenError
from codegen.identity import library_id
from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.neighbours import Extents, distance, place_of, reaches_no_further
from codegen.operator import Operator
from codegen.operators import operator
from codegen.predict.roofline import predict
from codegen.search.search import Search
from codegen.targets import target as data_sheet
from codegen.text.ptxas_report import Resources
from codegen.text.render_group import slice_digest
from codegen.text.render_library import render_library
from cukiln.types import FrontEntry, TunedFor, WinnerRecord
from service.requests.resolve import Resolved, Wanted
from service.winner_cache import WinnerCache
from storage.database.database_errors import DATABASE_ERRORS
from storage.database.session import Session
from storage.database.sql import chunks, is_predicted
from storage.entities.launches import launch_of
from storage.entities.libraries import libraries_of
from storage.entities.pareto_front import pareto, point_of
from storage.entities.winners import Neighbour, neighbours_of

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


def nearest_records(winners: WinnerCache, misses: Mapping[int, Wanted], policy: Policy) -> dict[int, bytes]:
    """By place, as JSON, of the misses that a neighbour's kernel is right for. Of a database that does not answer, what
    it has answered before: it never costs a lookup its hits."""
    records: dict[int, bytes] = {}
    try:
        for some in chunks(misses.items(), MISSES_AT_ONCE):
            with winners.database.read() as session:
                for place, wanted in some:
                    record = _record(session, winners, wanted, policy)
                    if record is not None:
                        records[place] = record.model_dump_json().encode()
    except DATABASE_ERRORS as error:
        log.warning("no neighbours of %d misses: %s", len(misses) - len(records), error)
    return records


def _record(session: Session, winners: WinnerCache, wanted: Wanted, policy: Policy) -> WinnerRecord | None:
    asked = wanted.asked
    near = _nearest(asked, neighbours_of(session, place_of(asked.operator, asked.problem), asked.target, LOOKED_AT))
    cached = winners.get([neighbour.row.key for neighbour in near]) if near else {}
    for neighbour in near:
        if neighbour.row.key not in cached:  # withdrawn meanwhile
            continue
        theirs = WinnerRecord.model_validate_json(cached[neighbour.row.key].json)
        front = _front(session, asked, theirs, policy)
        if front:
            return WinnerRecord(
                key=wanted.key,
                revision=0,
                operator=asked.operator.name,
                problem=asked.problem.canonical(),
                target=asked.target,
                device_class=wanted.key_class,
                ranked_by="predicted",
                front=front,
                searches=[],
                updated_at=theirs.updated_at,
                tuned_for=TunedFor(
                    key=theirs.key,
                    revision=theirs.revision,
                    device_class=theirs.device_class,
                    problem=theirs.problem,
                    distance=round(neighbour.distance, 6),
                ),
            )
    return None


def _nearest(asked: Resolved, rows: Sequence[Neighbour]) -> list[_Near]:
    """The nearest, whose offsets reach as far; of equally near ones first what was measured."""
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


def _front(session: Session, asked: Resolved, theirs: WinnerRecord, policy: Policy) -> list[FrontEntry]:
    """Of a neighbour's kernels those that are right for the problem and within the policy, as its own front."""
    candidates = _candidates(asked, theirs, policy)
    same = {entry.candidate: _library(candidates[entry.candidate], entry, asked.target) for entry in theirs.front
            if entry.candidate in candidates}  # fmt: skip
    libraries = libraries_of(session, same.values())
    entries = [
        _entry(candidates[entry.candidate], entry, asked)
        for entry in theirs.front
        if entry.candidate in same and libraries.get(same[entry.candidate]) == entry.so_sha256
    ]
    by_id = {entry.candidate: entry for entry in entries}
    return [by_id[point.candidate] for point in pareto(point_of(entry) for entry in entries)]


def _candidates(asked: Resolved, theirs: WinnerRecord, policy: Policy) -> dict[str, Candidate]:
    """By the neighbour's candidate, the problem's own with the same schedule, where rules and policy accept it."""
    candidates = {}
    for entry in theirs.front:
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
            if candidate.kernel.id == entry.kernel:
                candidates[entry.candidate] = candidate
    return candidates


def _library(candidate: Candidate, entry: FrontEntry, target: str) -> str:
    """The id of the library that would be published for the candidate, by the toolchain of the neighbour's."""
    values = tuple(operator(candidate.kernel.operator).launch_values(candidate.schedule))
    return library_id(_slice(candidate.kernel), _host(candidate.kernel, target, values), entry.toolchain, target)


_slice = lru_cache(maxsize=4096)(slice_digest)


@lru_cache(maxsize=4096)
def _host(kernel: Kernel, target: str, launch: tuple[int, ...]) -> str:
    return hashlib.sha256(render_library([kernel], target=target, launch=launch).encode()).hexdigest()


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
