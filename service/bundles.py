"""GET /v1/jobs/{id}/bundle: what a machine without a service needs to measure a job."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from codegen.generator import generator
from codegen.operators import operator
from codegen.render_group import slice_digest
from codegen.schedule import Schedule
from service.context import ServiceDep
from service.jobs import KnownJob
from service.openapi import problems
from storage.exports import ExportedCandidate, ExportedProblem, exported_problems, toolchain_descriptions
from storage.jobs import job_state
from storage.judge import COMPILE_FAILURES

BUNDLE_SCHEMA = 1
OTHER_RELEASE = "another release of cukiln compiled it: tune again, then export that job"

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.get(
    "/{job}/bundle",
    responses={
        **problems("job-not-found", "database-unavailable"),
        200: {"content": {"application/json": {}}, "description": "The content of a bundle.json"},
    },
    response_class=Response,
)
def get_bundle(job: KnownJob, service: ServiceDep) -> Response:
    """What measures a job elsewhere: its candidates, each with the blob of the library that holds its kernel.
    `cukiln export-bundle` writes it into a folder, with the libraries."""
    with service.database.read() as session:
        status = job_state(session, job)
        exported = _distinct(exported_problems(session, job))
        digests = {one.toolchain for problem in exported for one in problem.candidates if one.toolchain}
        toolchains = toolchain_descriptions(session, digests)
    assert status is not None, "KnownJob"
    kernels: dict[str, Any] = {}
    entries = [
        {
            "name": problem.name,
            "operator": problem.operator,
            "problem": problem.problem,
            "target": problem.target,
            "search": problem.search,
            "generator": generator(problem.operator),
            "workspace_limit_bytes": status.workspace_limit_bytes,
            "deterministic": status.deterministic,
            "space_size": problem.space_size,
            "candidates": _bundled(problem, kernels),
        }
        for problem in exported
    ]
    bundle = {
        "schema": BUNDLE_SCHEMA,
        "job": job,
        "toolchains": {digest: toolchains.get(digest, {}) for digest in sorted(digests)},
        "kernels": kernels,
        "problems": entries,
    }
    return Response(json.dumps(bundle).encode(), media_type="application/json")


def _distinct(exported: list[ExportedProblem]) -> list[ExportedProblem]:
    """Each problem once, though the job may have it on several device classes; none that the cache answered."""
    found: dict[tuple[str, str], ExportedProblem] = {}
    for problem in exported:
        if problem.candidates:
            found.setdefault((problem.name, problem.target), problem)
    return list(found.values())


def _bundled(problem: ExportedProblem, kernels: dict[str, Any]) -> list[dict[str, Any]]:
    """The candidates; their kernels are added to `kernels` by id."""
    kind = operator(problem.operator)
    parsed = kind.parse(problem.problem)
    slices: dict[str, str] = {}
    entries = []
    for one in problem.candidates:
        candidate = kind.candidate(parsed, Schedule.of(one.schedule))
        kernel = candidate.kernel
        kernels[kernel.id] = kernel.to_json()
        if kernel.id not in slices:
            slices[kernel.id] = slice_digest(kernel)
        why = None if kernel.id == one.kernel and slices[kernel.id] == one.slice else OTHER_RELEASE
        entries.append(_candidate(one, kernel.id, why))
    return entries


def _candidate(one: ExportedCandidate, kernel: str, why: str | None) -> dict[str, Any]:
    """With its library where there is one that may be measured, else with the reason why not."""
    entry: dict[str, Any] = {
        "candidate": one.candidate,
        "schedule": one.schedule,
        "kernel": kernel,
        "build": one.build,
        "toolchain": one.toolchain,
        "verdict": None,
        "message": None,
        "library": None,
        "code_digest": None,
        "resources": None,
        "prediction": one.prediction,
    }
    if why is None and one.state in COMPILE_FAILURES:
        return {**entry, "verdict": one.state, "message": one.message}
    why = why or _why_not(one)
    if why is not None:
        return {**entry, "message": why}
    code = {"library": one.library, "code_digest": one.code_digest, "resources": one.resources}
    return {**entry, **code}


def _why_not(one: ExportedCandidate) -> str | None:
    if one.state != "ok" or one.library is None:
        return "its kernel is not compiled, or its library is not known any more: tune again, then export that job"
    if one.verdict in ("incorrect", "runtime_error", "run_timeout"):
        return f"it was found {one.verdict} before: {one.message}"
    return None
