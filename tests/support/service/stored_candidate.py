"""A candidate's rows as a job leaves them, from what `GET /v1/candidates/{id}` is to answer."""

from __future__ import annotations

import uuid

from codegen.identity import build_id
from codegen.operators import operator
from cukiln.types import CandidateFacts
from storage.database.session import Database
from storage.database.tables import BuildRow, CandidateRow, JobProblemRow, JobRow, ToolchainRow, VerdictRow


def store_candidate(database: Database, facts: CandidateFacts, *, key: str = "5" * 64) -> str:
    """The id of the job that has it."""
    job = uuid.uuid4().hex
    parsed = operator(facts.operator).parse(facts.problem)
    toolchain = "7" * 64
    build = build_id(facts.kernel, facts.slice or "", toolchain, facts.target)
    with database.write() as session:
        session.add(JobRow(id=job, state="done", created_at=1.0))
        session.flush()
        asked = JobProblemRow(
            job_id=job,
            position=0,
            name=facts.name,
            operator=facts.operator,
            problem=parsed.canonical(),
            target=facts.target,
            device_class=facts.device_class,
            key=key,
            search={},
            state="done",
        )
        session.add(asked)
        session.flush()
        session.add(
            CandidateRow(
                job_problem_id=asked.id,
                candidate=facts.candidate,
                schedule=facts.schedule,
                kernel=facts.kernel,
                build=build,
                verdict=facts.verdict,
                message=facts.message,
                predicted_us=facts.predicted_us,
                measured_us=facts.measured_us,
                measurement=facts.measurement.model_dump(mode="json") if facts.measurement else None,
            )
        )
        if session.get(BuildRow, build) is None:
            session.add(
                BuildRow(
                    id=build,
                    kernel=facts.kernel,
                    slice=facts.slice,
                    toolchain=toolchain,
                    target=facts.target,
                    state="ok",
                    code_digest=facts.code_digest,
                    created_at=1.0,
                )
            )
            session.add(ToolchainRow(digest=toolchain, description=facts.toolchain or {}, targets=[], seen_at=1.0))
            if facts.details is not None:
                session.add(
                    VerdictRow(
                        subject=facts.slice,
                        venue="cpu",
                        plan_version="x",
                        verdict=facts.verdict or "ok",
                        details={k: v for k, v in facts.details.items() if k not in ("venue", "plan_version")},
                        wall_seconds=0.1,
                        cpu_seconds=0.1,
                        created_at=1.0,
                    )
                )
    return job
