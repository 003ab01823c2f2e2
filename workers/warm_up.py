"""Have SQLAlchemy compile the statements of a job's whole way before the first fork.

Compiling a statement takes the engine about a millisecond, running it again a tenth of that; a job's way has some
fifty. Every horse starts with what its worker had compiled, so the worker goes the way once, with a job of its own,
in a transaction that is rolled back: 72 ms of CPU the first time, 31 ms from then on.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

from codegen.compile_model import CompiledFile
from cukiln.types import StageSeconds
from storage import items, jobs
from storage.builds import known_builds
from storage.candidates import candidates_of_problem
from storage.compile_models import idle_workers, load_model
from storage.database import Database, Session
from storage.errors import StorageError
from storage.groups import BuildOutcome, load_group, record_compiled, start_group
from storage.join_groups import groups_to_join
from storage.libraries import end_library, start_library
from storage.measurements import (
    Measured,
    best_measured,
    candidates_to_measure,
    record_compared,
    record_measured,
)
from storage.plans import NewBuild, NewCandidate, NewGroup, PlannedProblem, record_plan
from storage.problems import finish_problem, load_problem, problems_to_plan
from storage.report_job import job_progress
from storage.verdicts import NewVerdict, best_proofs, builds_to_verify, record_verified

log = logging.getLogger("cukiln.worker")

_VERSION = "warm-up"
_VERSIONS: dict[str, Any] = {"plan_version": _VERSION, "gpu_plan_version": _VERSION, "drivers": {}}


class _RollBack(Exception):
    pass


class _NotOurs(Exception):
    """A claim took a real item that goes before: it is rolled back with the rest, what follows stays cold."""


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
    target, build = f"none_{name[:8]}", name * 2
    # Proved on the CPU, and measured on a GPU that nobody has.
    classes = (f"predicted:{target}", name)
    problems = [jobs.NewProblem(name, "matmul", {}, target, device_class, build, {}) for device_class in classes]
    job = jobs.create_job(session, jobs.NewJob(problems, priority="high")).id
    claim = _claim(session, "plan", None, job)
    planned = problems_to_plan(session, claim)
    jobs.job_state(session, job)
    known_builds(session, [build])
    load_model(session, name * 2)
    idle_workers(session, claim, target, 1)
    candidate = NewCandidate(name * 2, {}, name * 2, build)
    record_plan(
        session,
        claim,
        [PlannedProblem(problem.id, [candidate], 1, {}, 0.0, 0.0) for problem in planned],
        {build: NewBuild(build, name * 2, name * 2, {})},
        [NewGroup((build,), target, name * 2, 1.0)],
        **_VERSIONS,
    )
    job_progress(session, job)
    claim = _claim(session, "compile", target, job)
    items.renew(session, claim, 1.0)
    start_group(session, claim)
    groups_to_join(session, claim)
    load_group(session, claim.ref)
    record_compiled(
        session,
        claim,
        [BuildOutcome(build, "ok", code_digest=name * 2, resources={}, library=name * 2)],
        source=None,
        log=None,
        library=None,
        cubin=None,
        phases=[],
        codegen=StageSeconds(),
        compile=StageSeconds(),
        files=[CompiledFile({name: 1.0}, 1.0, 1)] * 2,  # the first of a family, and one more
        **_VERSIONS,
    )
    claim = _claim(session, "verify", target, job)
    builds_to_verify(session, claim.ref, _VERSION)
    verdict = NewVerdict(name * 2, "ok", None, {}, 0.0, 0.0)
    record_verified(session, claim, [verdict], plan_version=_VERSION, verify=StageSeconds())
    _measure(session, name, job)
    claim = _claim(session, "finish", target, job)
    start_library(session, name * 2, claim)
    end_library(session, name * 2, claim)
    load_problem(session, int(claim.ref))
    candidates_of_problem(session, int(claim.ref))
    best_proofs(session, [(name * 2, name * 2)])
    finish_problem(session, claim, winner=candidate.candidate, error=None)


def _measure(session: Session, device_class: str, job: str) -> None:
    claim = _claim(session, "measure", device_class, job)
    waiting = candidates_to_measure(session, claim.ref, device_class, _VERSION)
    best_measured(session, [one.problem_id for one in waiting])
    found = [
        Measured(
            problem_id=one.problem_id,
            candidate=one.candidate,
            code_digest=one.code_digest,
            verdict="ok",
            message=None,
            details={},
            measurement={"median_us": 1.0},
            verify=StageSeconds(),
            measure=StageSeconds(),
        )
        for one in waiting
    ]
    record_measured(session, claim, found, driver=_VERSION, plan_version=_VERSION)
    claim = _claim(session, "compare", device_class, job)
    record_compared(session, claim, None, measure=StageSeconds())


def _claim(session: Session, kind: str, target: str | None, job: str) -> items.Claim:
    claim = items.claim(session, [kind], None if target is None else [target], "warm-up", 1.0)
    if claim is None or claim.job_id != job:
        raise _NotOurs(f"a {kind} item waits already")
    return claim
