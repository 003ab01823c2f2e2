"""Results that were measured elsewhere become a job: its problems, candidates, verdicts and measurements, ready to
finish.

Everything that finish needs is written in one transaction, so that an import is there as a whole or not at all. Builds
get ids of their own: nobody here has compiled them, and a job that needs such a kernel compiles it itself. Winners are
then built alone and published by the ordinary finish step, which takes a library only where its code is the measured
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert, select, update

from codegen.canonical import digest
from cukiln.types import StageSeconds
from storage.database import Session, clock_of
from storage.jobs import PRIORITIES
from storage.judge import FINISH_SECONDS
from storage.new_items import FINISH, NewItem, add_items
from storage.rows import core, insert_new
from storage.tables import BuildRow, CandidateRow, JobProblemRow, JobRow, MeasurementRow, VerdictRow
from storage.verdicts import GPU, wrong_codes
from storage.winners import withdraw_code

COMPILE_FAILURES = ("compile_error", "compile_timeout")
BUILD_SCHEMA = 1


@dataclass(frozen=True)
class ImportedCandidate:
    """`code_digest` and `resources` where its kernel compiled, `toolchain` where somebody tried. `measurement`:
    `cukiln.types.Measurement` as JSON, of those that are right."""

    candidate: str
    schedule: dict[str, Any]
    kernel: str
    slice: str
    toolchain: str | None
    code_digest: str | None
    resources: dict[str, Any] | None
    verdict: str
    message: str | None
    details: dict[str, Any]
    measurement: dict[str, Any] | None
    prediction: dict[str, Any] | None
    verify: StageSeconds
    measure: StageSeconds


@dataclass(frozen=True)
class ImportedProblem:
    """`problem` and `search` are canonical; `comparison`: `cukiln.types.Comparison` as JSON."""

    name: str
    operator: str
    problem: dict[str, Any]
    target: str
    key: str
    search: dict[str, Any]
    space_size: int
    candidates: Sequence[ImportedCandidate]
    comparison: dict[str, Any] | None


@dataclass(frozen=True)
class Import:
    """`digest`: of all that was sent. `provenance` goes into every verdict: which device, which driver, when."""

    digest: str
    device_class: str
    driver: str
    plan_version: str
    provenance: Mapping[str, Any]
    workspace_limit_bytes: int | None
    deterministic: bool
    problems: Sequence[ImportedProblem]

    @property
    def job_id(self) -> str:
        """Of the content, so that the same results are one job however often they are sent."""
        return self.digest[:32]


@dataclass(frozen=True)
class Imported:
    """`new`: nothing of it was known. `finish`: the target of each finish item that was added."""

    job_id: str
    new: bool
    finish: list[str]


def import_results(session: Session, new: Import) -> Imported:
    """Write all of it, with finish items for its problems. An import that is there already is left as it is."""
    if session.scalar(select(JobRow.id).where(JobRow.id == new.job_id)) is not None:
        return Imported(new.job_id, new=False, finish=[])
    now = clock_of(session).now()
    session.execute(
        insert(JobRow).values(
            id=new.job_id,
            state="running",
            cached=False,
            priority=PRIORITIES["normal"],
            workspace_limit_bytes=new.workspace_limit_bytes,
            deterministic=new.deterministic,
            created_at=now,
            started_at=now,
        )
    )
    rows = [_problem_row(new, position, problem, now) for position, problem in enumerate(new.problems)]
    session.execute(insert(core(JobProblemRow)), rows)
    ids = dict(
        session.execute(
            select(JobProblemRow.position, JobProblemRow.id).where(JobProblemRow.job_id == new.job_id)
        ).all()
    )
    for position, problem in enumerate(new.problems):
        _insert_candidates(session, ids[position], problem, now)
        _insert_findings(session, new, problem, now)
    codes = {one.code_digest for problem in new.problems for one in problem.candidates if one.code_digest is not None}
    withdraw_code(session, wrong_codes(session, codes))
    add_items(
        session,
        [
            NewItem(FINISH, str(ids[position]), problem.target, (new.job_id,), FINISH_SECONDS)
            for position, problem in enumerate(new.problems)
        ],
    )
    return Imported(new.job_id, new=True, finish=[problem.target for problem in new.problems])


def _problem_row(new: Import, position: int, problem: ImportedProblem, now: float) -> dict[str, Any]:
    seconds = {
        stage: _sum([getattr(one, stage) for one in problem.candidates]).model_dump() for stage in ("verify", "measure")
    }
    return {
        "job_id": new.job_id,
        "position": position,
        "name": problem.name,
        "operator": problem.operator,
        "problem": problem.problem,
        "target": problem.target,
        "device_class": new.device_class,
        "key": problem.key,
        "search": problem.search,
        "state": "running",
        "cached": False,
        "planned": True,
        "space_size": problem.space_size,
        "candidate_count": len(problem.candidates),
        "rejections": {},
        "seconds": seconds,
        "comparison": problem.comparison,
        "started_at": now,
    }


def _insert_candidates(session: Session, problem_id: int, problem: ImportedProblem, now: float) -> None:
    builds: dict[str, dict[str, Any]] = {}
    candidates = []
    for one in problem.candidates:
        build = _build_id(one, problem.target)
        compiled = one.verdict not in COMPILE_FAILURES
        if one.toolchain is not None and (one.code_digest is not None or not compiled):
            builds[build] = {
                "id": build,
                "kernel": one.kernel,
                "slice": one.slice,
                "toolchain": one.toolchain,
                "target": problem.target,
                "state": "ok" if compiled else one.verdict,
                "code_digest": one.code_digest if compiled else None,
                "resources": one.resources,
                "log": None if compiled else one.message,
                "created_at": now,
            }
        candidates.append(
            {
                "job_problem_id": problem_id,
                "candidate": one.candidate,
                "schedule": one.schedule,
                "kernel": one.kernel,
                "build": build,
                "verdict": one.verdict,
                "message": one.message,
                "predicted_us": one.prediction["us"] if one.prediction else None,
                "prediction": one.prediction,
                "measured_us": one.measurement["median_us"] if one.measurement else None,
                "measurement": one.measurement,
            }
        )
    insert_new(session, BuildRow, list(builds.values()))
    insert_new(session, CandidateRow, candidates)


def _insert_findings(session: Session, new: Import, problem: ImportedProblem, now: float) -> None:
    """What is remembered beyond the job: what the code was proved to be, and how long it took."""
    verdicts: dict[str, dict[str, Any]] = {}
    measurements = []
    for one in problem.candidates:
        if one.code_digest is None or one.verdict in ("skipped", *COMPILE_FAILURES):
            continue
        known = verdicts.get(one.code_digest)
        if known is None or known["verdict"] == "ok":  # code that was found wrong once is wrong
            verdicts[one.code_digest] = {
                "subject": one.code_digest,
                "venue": GPU,
                "plan_version": new.plan_version,
                "verdict": one.verdict,
                "message": one.message,
                "details": {**one.details, "imported": dict(new.provenance)},
                "wall_seconds": one.verify.wall,
                "cpu_seconds": one.verify.cpu,
                "created_at": now,
            }
        if one.measurement is not None:
            measurements.append(
                {
                    "code_digest": one.code_digest,
                    "candidate": one.candidate,
                    "device_class": new.device_class,
                    "driver": new.driver,
                    "plan_version": new.plan_version,
                    "median_us": one.measurement["median_us"],
                    "measurement": one.measurement,
                    "created_at": now,
                }
            )
    insert_new(session, VerdictRow, list(verdicts.values()))
    for row in verdicts.values():
        if row["verdict"] != "ok":
            session.execute(
                update(core(VerdictRow))
                .where(
                    VerdictRow.subject == row["subject"],
                    VerdictRow.venue == GPU,
                    VerdictRow.plan_version == new.plan_version,
                    VerdictRow.verdict == "ok",
                )
                .values(row)
            )
    insert_new(session, MeasurementRow, measurements)


def _build_id(one: ImportedCandidate, target: str) -> str:
    """Of a build that was made elsewhere: never that of one that is made here, whose library is known."""
    return digest(
        "imported_build",
        BUILD_SCHEMA,
        kernel=one.kernel,
        slice=one.slice,
        toolchain=one.toolchain or "",
        target=target,
        code_digest=one.code_digest or "",
    )


def _sum(seconds: Sequence[StageSeconds]) -> StageSeconds:
    return StageSeconds(wall=sum(one.wall for one in seconds), cpu=sum(one.cpu for one in seconds))


def refuse_candidate(session: Session, problem_id: int, candidate: str, message: str) -> None:
    """A candidate that was right elsewhere and cannot be published here."""
    session.execute(
        update(core(CandidateRow))
        .where(core(CandidateRow).c.job_problem_id == problem_id, core(CandidateRow).c.candidate == candidate)
        .values(verdict="skipped", message=message)
    )
