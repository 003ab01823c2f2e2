"""Have SQLAlchemy compile the statements of a job's whole way before the first fork.

Compiling a statement takes the engine about a millisecond, running it again a tenth of that; a job's way has some
fifty. Every worker child starts with what its worker had compiled, so the worker goes the way once, with a job of its
own, in a transaction that is rolled back: 72 ms of CPU the first time, 31 ms from then on.
"""

from __future__ import annotations

import logging
import uuid

from cukiln.types import StageSeconds
from storage.database.session import Database, Session
from storage.entities import jobs
from storage.entities.candidates import candidates_of_problem
from storage.entities.groups import NewBuild, load_group
from storage.entities.heartbeats import drivers_of
from storage.entities.jobs import candidates_of_job, load_problem, problems_to_plan
from storage.entities.libraries import end_library, start_library
from storage.entities.stage_times import add_seconds
from storage.entities.verdicts import NewVerdict, best_proofs
from storage.errors import StorageError
from storage.queue import tasks
from storage.queue.turns import spend
from storage.reports.progress import job_progress
from storage.transitions import accept, take_work
from storage.transitions.compile import (
    BuildOutcome,
    GroupFiles,
    apply_group_verdicts,
    complete_group,
    record_builds,
    what_follows,
)
from storage.transitions.finish import finish_problem
from storage.transitions.measure import (
    Measured,
    apply_measured_verdicts,
    best_measured,
    candidates_to_measure,
    complete_measured,
    record_compared,
    record_measured,
)
from storage.transitions.plan import NewCandidate, PlannedProblem, end_plan, record_candidates
from storage.transitions.take_work import FileLimits
from storage.transitions.verify import Versions, builds_to_verify, complete_verified, record_verdicts, verify_shares
from workers import wake_ups

log = logging.getLogger("cukiln.worker")

_NAME = "warm-up"
_PLANS = {"matmul": _NAME}


class _RollBack(Exception):
    pass


class _NotOurs(Exception):
    """A lease took a real task that goes before: it is rolled back with the rest, what follows stays cold."""


def warm_up(database: Database) -> None:
    """Go the way of a job and undo it. Leaves no connection open: a child must not inherit one."""
    try:
        with database.write() as session:
            _go_the_way(session, uuid.uuid4().hex)
            raise _RollBack
    except _RollBack:
        log.debug("statements are compiled")
    except (_NotOurs, StorageError) as error:
        log.info("statements are compiled in part: %s", error)
    finally:
        database.dispose()


def _go_the_way(session: Session, name: str) -> None:
    target, build, whole = f"none_{name[:8]}", name * 2, StageSeconds()
    versions = Versions(_PLANS, _PLANS, {})
    # Verified on the CPU, and measured on a GPU that is not there.
    classes = (f"predicted:{target}", name)
    problems = [accept.NewProblem(name, "matmul", {}, target, device_class, build, {}) for device_class in classes]
    job = accept.create_job(session, accept.NewJob(problems, priority="high")).id
    lease = _lease(session, "plan", None, job)
    planned = problems_to_plan(session, lease)
    jobs.job_state(session, job)
    candidates_of_job(session, job)
    drivers_of(session, 1.0)
    spend(session, job, 0.0)
    candidate = NewCandidate(name * 2, {}, name * 2, build)
    builds = {build: NewBuild(build, name * 2, name * 2, {}, target, "t")}
    record_candidates(session, lease, [(problem.id, candidate) for problem in planned], builds, versions)
    for problem in planned:
        end_plan(session, lease, PlannedProblem(problem.id, 1, 1, {}, whole))
    tasks.complete(session, lease)
    take_work.waiting_counts(session)
    job_progress(session, job)
    lease = _lease(session, "compile", target, job)
    tasks.renew(session, lease, 1.0)
    load_group(session, lease.ref)
    made = BuildOutcome(build, "ok", code_digest=name * 2, resources={}, library=name * 2)
    record_builds(session, lease, [made])
    apply_group_verdicts(session, lease, versions)
    group = GroupFiles()
    complete_group(session, lease, group, what_follows(session, lease, group)[0])
    lease = _lease(session, "verify", target, job)
    asked = builds_to_verify(session, lease.ref, _PLANS)
    verdict = NewVerdict(name * 2, "matmul", "ok", None, {}, 0.0, 0.0)
    record_verdicts(session, lease, [verdict], _PLANS)
    apply_group_verdicts(session, lease, versions)
    add_seconds(session, verify_shares(session, lease, asked, whole))
    complete_verified(session, lease, asked, plans=_PLANS, verify=whole)
    _measure(session, name, job)
    lease = _lease(session, "finish", target, job)
    start_library(session, name * 2, lease)
    end_library(session, name * 2, lease)
    load_problem(session, int(lease.ref))
    candidates_of_problem(session, int(lease.ref))
    best_proofs(session, [(name * 2, name * 2)])
    finish_problem(session, lease, winner=candidate.candidate, error=None)


def _measure(session: Session, device_class: str, job: str) -> None:
    lease = _lease(session, "measure", device_class, job)
    waiting = candidates_to_measure(session, lease.ref, device_class, _PLANS)
    best_measured(session, [candidate.problem_id for candidate in waiting])
    measured = [
        Measured(
            problem_id=candidate.problem_id,
            operator=candidate.operator,
            candidate=candidate.candidate,
            code_digest=candidate.code_digest,
            verdict="ok",
            message=None,
            details={},
            measurement={"median_us": 1.0},
            verify=StageSeconds(),
            measure=StageSeconds(),
        )
        for candidate in waiting
    ]
    record_measured(session, lease, measured, driver=_NAME, plans=_PLANS)
    apply_measured_verdicts(session, measured, device_class, _PLANS)
    complete_measured(session, lease, measured, plans=_PLANS)
    lease = _lease(session, "compare", device_class, job)
    record_compared(session, lease, None, measure=StageSeconds())


def _lease(session: Session, kind: str, target: str | None, job: str) -> tasks.Lease:
    """As a worker does that has several kinds of work: it is another statement for one."""
    kinds = next(kinds for kinds in wake_ups.TASKS_OF.values() if kind in kinds)
    files = FileLimits(toolchain="t") if kind in wake_ups.TASKS_OF[wake_ups.COMPILE] else None
    lease = take_work.take(session, kinds, None if target is None else [target], "warm-up", 1.0, files)
    if lease is None or lease.kind != kind or lease.jobs != (job,):
        raise _NotOurs(f"{kind} work waits already")
    return lease
