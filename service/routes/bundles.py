"""GET /v1/jobs/{id}/bundle: what a machine without a service needs to measure a job."""

import json
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from codegen.operators import operator
from codegen.plan.generator import generator
from codegen.search.schedule import Schedule
from codegen.text.render_group import slice_digest
from service.context import ServiceDep
from service.openapi import problems
from service.routes.jobs import KnownJob
from storage.database.tables import COMPILE_FAILURES
from storage.entities.jobs import job_state
from storage.reports.candidates import Exported, ExportedCandidate, exported_problems, toolchain_descriptions

BUNDLE_SCHEMA = 1
OTHER_RELEASE = "another release of cukiln compiled it: tune again, then export that job"

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.get(
    "/{job}/bundle",
    operation_id="get_job_bundle",
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
        digests = {candidate.toolchain for _, its in exported for candidate in its if candidate.toolchain}
        toolchains = toolchain_descriptions(session, digests)
    assert status is not None, "KnownJob"
    kernels: dict[str, Any] = {}
    entries = [
        {
            **{
                name: problem._mapping[name]
                for name in ("name", "operator", "problem", "target", "search", "space_size")
            },
            "generator": generator(problem.operator),
            "workspace_limit_bytes": status.workspace_limit_bytes,
            "deterministic": status.deterministic,
            "candidates": _bundled(problem.operator, problem.problem, its, kernels),
        }
        for problem, its in exported
    ]
    bundle = {
        "schema": BUNDLE_SCHEMA,
        "job": job,
        "toolchains": {digest: toolchains.get(digest, {}) for digest in sorted(digests)},
        "kernels": kernels,
        "problems": entries,
    }
    return Response(json.dumps(bundle).encode(), media_type="application/json")


def _distinct(exported: list[Exported]) -> list[Exported]:
    """Each problem once, though the job may have it on several device classes; none that the cache answered."""
    problems_of_job: dict[tuple[str, str], Exported] = {}
    for problem, its in exported:
        if its:
            problems_of_job.setdefault((problem.name, problem.target), (problem, its))
    return list(problems_of_job.values())


def _bundled(
    name: str, problem: dict[str, Any], candidates: list[ExportedCandidate], kernels: dict[str, Any]
) -> list[dict[str, Any]]:
    """The candidates of an operator's problem; their kernels are added to `kernels` by id."""
    kind = operator(name)
    parsed = kind.parse(problem)
    slices: dict[str, str] = {}
    entries = []
    for exported in candidates:
        candidate = kind.candidate(parsed, Schedule.of(exported.schedule))
        kernel = candidate.kernel
        kernels[kernel.id] = kernel.to_json()
        if kernel.id not in slices:
            slices[kernel.id] = slice_digest(kernel)
        why = None if kernel.id == exported.kernel and slices[kernel.id] == exported.slice else OTHER_RELEASE
        entries.append(_candidate(exported, kernel.id, why))
    return entries


def _candidate(exported: ExportedCandidate, kernel: str, why: str | None) -> dict[str, Any]:
    """With its library where there is one that may be measured, else with the reason why not."""
    entry: dict[str, Any] = {
        **{name: exported._mapping[name] for name in ("candidate", "schedule", "build", "toolchain", "prediction")},
        "kernel": kernel,
        **dict.fromkeys(("verdict", "message", "library", "code_digest", "resources")),
    }
    if why is None and exported.state in COMPILE_FAILURES:
        return {**entry, "verdict": exported.state, "message": exported.message}
    why = why or _why_not(exported)
    if why is not None:
        return {**entry, "message": why}
    code = {"library": exported.library, "code_digest": exported.code_digest, "resources": exported.resources}
    return {**entry, **code}


def _why_not(exported: ExportedCandidate) -> str | None:
    if exported.state != "ok" or exported.library is None:
        return "its kernel is not compiled, or its library is not known any more: tune again, then export that job"
    if exported.verdict in ("incorrect", "runtime_error", "run_timeout"):
        return f"its verdict was {exported.verdict} before: {exported.message}"
    return None
