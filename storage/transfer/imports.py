"""Results that were measured elsewhere become a job: its problems, candidates and measurements, ready to finish.

Their verdicts lie in builds of their own, since none was compiled here, and their winners are parts of records
(`storage.entities.record_parts`), so that an import can be withdrawn as a whole. It begins when all is written, a part
at a time; one that is interrupted continues when it is sent again, or is withdrawn (`storage.transfer.withdrawals`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import exists, insert, select, update

from codegen.canonical import digest
from codegen.identity import PlanVersions
from cukiln.types import Imported, StageSeconds
from storage.database.session import Database, Session, clock_of
from storage.database.sql import change, chunks, core, insert_new
from storage.database.tables import (
    COMPILE_FAILURES,
    BuildRow,
    CandidateRow,
    ImportedFindingRow,
    ImportRow,
    JobProblemRow,
    JobRow,
)
from storage.entities.jobs import PRIORITIES
from storage.entities.record_parts import keys_with, rejoin
from storage.entities.task_kinds import FINISH
from storage.errors import ImportWithdrawn
from storage.queue.new_tasks import NewTask, add_tasks
from storage.transfer.withdrawals import clear_withdrawn
from storage.transitions.apply_verdicts import FINISH_SECONDS, CandidateVerdict, write_candidate_verdicts
from storage.transitions.measure import CONCLUSIVE, FAILURES

BUILD_SCHEMA = 2
CANDIDATES_AT_ONCE = 250
"""With their builds and verdicts, of one transaction."""


@dataclass(frozen=True)
class ImportedCandidate:
    """`code_digest` and `resources` where its kernel compiled, `toolchain` where a compile was tried. `measurement`:
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
    """`digest`: of all that was sent; `uuid`: of the GPU."""

    digest: str
    device_class: str
    uuid: str
    driver: str
    plans: PlanVersions
    measured_at: float
    workspace_limit_bytes: int | None
    deterministic: bool
    problems: Sequence[ImportedProblem]

    @property
    def job_id(self) -> str:
        """Of the content, so that the same results are one job however often they are sent."""
        return self.digest[:32]


@dataclass(frozen=True)
class Importer:
    """The key that sends results, its id (None: CUKILN_API_KEY or loopback), and whether they stand beside our own."""

    name: str
    key: str | None = None
    overwrites: bool = False


def import_results(
    database: Database, new: Import, sender: Importer, admit: Callable[[Session], None]
) -> list[str] | None:
    """Write all of it; the targets of its finish tasks. None: it is there already; one that was interrupted continues.
    `admit` refuses a new one by what it raises. Raises `ImportWithdrawn`."""
    clear_withdrawn(database)
    with database.write() as session:
        state = session.scalar(select(JobRow.state).where(JobRow.id == new.job_id))
        if state is None:
            admit(session)
            _insert_job(session, new)
            _insert_import(session, new, sender)
        elif _is_withdrawn(session, new):
            raise ImportWithdrawn(new.job_id)
        elif state != "queued":
            return None
        else:  # it has as long as a new one, before it is forgotten
            begun_again = update(JobRow).where(JobRow.id == new.job_id).values(created_at=clock_of(session).now())
            session.execute(begun_again)
        ids = dict(
            session.execute(
                select(JobProblemRow.position, JobProblemRow.id).where(JobProblemRow.job_id == new.job_id)
            ).all()
        )
    for position, problem in enumerate(new.problems):
        for some in chunks(problem.candidates, CANDIDATES_AT_ONCE):
            database.pause()
            with database.write() as session:
                _require_standing(session, new, ids[position])
                _insert_candidates(session, new, ids[position], problem, some)
                _insert_findings(session, new, some)
    database.pause()
    with database.write() as session:
        _require_standing(session, new, ids[0])
        return _begin(session, new, ids)


def imported_by(session: Session, job_id: str) -> Imported | None:
    """The import that the job is, if it is one."""
    row = session.get(ImportRow, job_id)
    return Imported(**vars(row), device=row.device_class, imported_at=row.created_at) if row else None


def imported_classes(session: Session) -> set[str]:
    """The device classes of all imports that were not withdrawn."""
    return set(session.scalars(select(ImportRow.device_class).where(ImportRow.withdrawn_at.is_(None)).distinct()))


def _insert_import(session: Session, new: Import, sender: Importer) -> None:
    """Anew, where it was withdrawn before."""
    row = ImportRow(
        id=new.job_id,
        by=sender.name,
        key=sender.key,
        overwrites=sender.overwrites,
        device_class=new.device_class,
        uuid=new.uuid,
        driver=new.driver,
        measured_at=new.measured_at,
        created_at=clock_of(session).now(),
        withdrawn_at=None,
    )
    session.merge(row)


def _is_withdrawn(session: Session, new: Import) -> bool:
    return session.scalar(select(ImportRow.withdrawn_at).where(ImportRow.id == new.job_id)) is not None


def _require_standing(session: Session, new: Import, problem_id: int) -> None:
    """Also where it was withdrawn, cleared and sent again since, which made other problems."""
    is_there = exists().where(JobProblemRow.id == problem_id, JobProblemRow.job_id == new.job_id)
    if _is_withdrawn(session, new) or not session.scalar(select(is_there)):
        raise ImportWithdrawn(new.job_id)


def _insert_job(session: Session, new: Import) -> None:
    """Queued, and nothing of it waits to be planned: so it is until all of it is written."""
    now = clock_of(session).now()
    session.execute(
        insert(JobRow).values(
            id=new.job_id,
            state="queued",
            cached=False,
            priority=PRIORITIES["normal"],
            workspace_limit_bytes=new.workspace_limit_bytes,
            deterministic=new.deterministic,
            created_at=now,
        )
    )
    rows = [_problem_row(new, position, problem) for position, problem in enumerate(new.problems)]
    session.execute(insert(core(JobProblemRow)), rows)


def _begin(session: Session, new: Import, ids: Mapping[int, int]) -> list[str] | None:
    now = clock_of(session).now()
    job, problem = core(JobRow), core(JobProblemRow)
    queued = (job.c.id == new.job_id) & (job.c.state == "queued")
    begun = update(job).where(queued).values(state="running", started_at=now).returning(job.c.id)
    if session.scalar(begun) is None:  # the same was sent twice at once, or it was cancelled meanwhile
        return None
    its = problem.c.job_id == new.job_id
    change(session, problem, its, state="running", planned=True, started_at=now)
    add_tasks(
        session,
        [
            NewTask(FINISH, str(ids[position]), problem.target, (new.job_id,), FINISH_SECONDS)
            for position, problem in enumerate(new.problems)
        ],
    )
    return [problem.target for problem in new.problems]


def _problem_row(new: Import, position: int, problem: ImportedProblem) -> dict[str, Any]:
    seconds = {
        stage: sum((getattr(candidate, stage) for candidate in problem.candidates), StageSeconds()).model_dump()
        for stage in ("verify", "measure")
    }
    return {
        **{name: value for name, value in vars(problem).items() if name != "candidates"},
        "job_id": new.job_id,
        "position": position,
        "device_class": new.device_class,
        "state": "queued",
        "cached": False,
        "candidate_count": len(problem.candidates),
        "rejections": {},
        "seconds": seconds,
    }


def _insert_candidates(
    session: Session, new: Import, problem_id: int, problem: ImportedProblem, imported: Sequence[ImportedCandidate]
) -> None:
    builds: dict[str, dict[str, Any]] = {}
    rows, verdicts = [], []
    for candidate in imported:
        build = _build_id(new, candidate, problem.target)
        compiled = candidate.verdict not in COMPILE_FAILURES
        is_conclusive = candidate.verdict in CONCLUSIVE
        verification = _verification(session, new.plans[problem.operator], candidate) if is_conclusive else None
        if build in builds:  # of two candidates of one kernel a run may have verified one alone
            builds[build]["imported"] = verification or builds[build]["imported"]
        elif candidate.toolchain is not None and (candidate.code_digest is not None or not compiled):
            builds[build] = {
                "id": build,
                "kernel": candidate.kernel,
                "slice": candidate.slice,
                "toolchain": candidate.toolchain,
                "target": problem.target,
                "state": "ok" if compiled else candidate.verdict,
                "code_digest": candidate.code_digest if compiled else None,
                "resources": candidate.resources,
                "log": None if compiled else candidate.message,
                "imported": verification,
                "created_at": clock_of(session).now(),
            }
        rows.append(
            {
                "job_problem_id": problem_id,
                "candidate": candidate.candidate,
                "schedule": candidate.schedule,
                "kernel": candidate.kernel,
                "build": build,
                "predicted_us": candidate.prediction["us"] if candidate.prediction else None,
                "prediction": candidate.prediction,
            }
        )
        verdicts.append(
            CandidateVerdict(
                problem_id, candidate.candidate, candidate.verdict, candidate.message, candidate.measurement
            )
        )
    insert_new(session, BuildRow, list(builds.values()))
    insert_new(session, CandidateRow, rows)
    write_candidate_verdicts(session, verdicts)


def _insert_findings(session: Session, new: Import, imported: Sequence[ImportedCandidate]) -> None:
    """Code that is wrong: other imports' kernels that have it answer no more, unless a GPU here verified it."""
    wrong = {row.code_digest for row in imported if row.verdict in FAILURES and row.code_digest is not None}
    rows = [{"import_id": new.job_id, "code_digest": code} for code in sorted(wrong)]
    insert_new(session, ImportedFindingRow, rows)
    rejoin(session, keys_with(session, wrong))


def _verification(session: Session, plan_version: str, candidate: ImportedCandidate) -> dict[str, Any]:
    """A `storage.entities.verdicts.Verdict` without its subject and its venue."""
    return {
        "plan_version": plan_version,
        "verdict": candidate.verdict,
        "message": candidate.message,
        "details": candidate.details,
        "wall_seconds": candidate.verify.wall,
        "cpu_seconds": candidate.verify.cpu,
        "created_at": clock_of(session).now(),
    }


def _build_id(new: Import, candidate: ImportedCandidate, target: str) -> str:
    """Of a build that was made elsewhere: its import's alone, and never that of one that is made here."""
    return digest(
        "imported_build",
        BUILD_SCHEMA,
        of=new.job_id,
        kernel=candidate.kernel,
        slice=candidate.slice,
        toolchain=candidate.toolchain or "",
        target=target,
        code_digest=candidate.code_digest or "",
    )


def refuse_candidate(session: Session, problem_id: int, candidate: str, message: str, verdict: str = "skipped") -> None:
    """A candidate that was found right, elsewhere or by its source alone, and cannot be published here."""
    this = (CandidateRow.job_problem_id == problem_id) & (CandidateRow.candidate == candidate)
    change(session, CandidateRow, this, verdict=verdict, message=message)
