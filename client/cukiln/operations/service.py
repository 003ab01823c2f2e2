"""What a service has beside jobs and winners: targets, operators, candidates of any job, results from elsewhere."""

from collections.abc import Mapping
from typing import Any

from cukiln.errors import NotFound
from cukiln.http.transport import Call
from cukiln.job_request import encode
from cukiln.operations.answers import json_object, parse
from cukiln.operations.steps import Listing, Operation, job_path, part
from cukiln.types import (
    CandidateFacts,
    Forgotten,
    ImportPage,
    ImportReport,
    Job,
    OperatorReport,
    Operators,
    Targets,
)


class ServiceOperations:
    def _forget(self, what: str) -> Operation[Forgotten]:
        """Forget the winner record, else the build, whose key or id begins so: the next job tries it again. Raises
        `NotFound`, and `BadRequest` where several begin so, or a job that has not ended needs the build."""
        name = part(what, "what to forget")
        try:
            response = yield Call("DELETE", f"/v1/kernels/{name}", repeatable=False)
        except NotFound:
            response = yield Call("DELETE", f"/v1/builds/{name}", repeatable=False)
        return parse(response, Forgotten)

    def _bundle(self, job_id: str) -> Operation[dict[str, Any]]:
        """The input to measure the job without a service (see `cukiln export-bundle`). Raises `NotFound`."""
        return json_object((yield Call("GET", f"{job_path(job_id)}/bundle")))

    def _send_results(self, results: Mapping[str, Any]) -> Operation[Job]:
        """Import what such a machine measured; returns the job that publishes it. Idempotent. Raises `BadRequest`."""
        return parse((yield Call("POST", "/v1/results", encode(results))), Job)

    def _imports(self) -> Listing[ImportPage, ImportReport]:
        """Yield imports, the newest first, withdrawn ones included."""
        return Listing("/v1/imports", ImportPage, lambda page: page.imports, {})

    def _withdraw_import(self, import_id: str) -> Operation[ImportReport]:
        """Take an import back: records are what they would be without it. Idempotent. Raises
        `NotFound`, and `NotAuthorised` where the key neither sent it nor is an admin's."""
        return parse((yield Call("DELETE", f"/v1/imports/{part(import_id, 'the import')}")), ImportReport)

    def _candidate(self, candidate: str, *, job: str | None = None) -> Operation[CandidateFacts]:
        """All that is known of a candidate, by its id or the first 8 or more digits of it; as one job has it, where
        given, else the latest facts. Raises `NotFound`, and `BadRequest` where several begin so."""
        query = f"?job={part(job, 'the job')}" if job is not None else ""
        return parse((yield Call("GET", f"/v1/candidates/{part(candidate, 'the candidate')}{query}")), CandidateFacts)

    def _targets(self) -> Operation[Targets]:
        """The architectures, compilers and GPUs that the service has now."""
        return parse((yield Call("GET", "/v1/targets")), Targets)

    def _operators(self) -> Operation[list[OperatorReport]]:
        """The operators of the service: the JSON Schema of their problems and searches, their tunables."""
        return parse((yield Call("GET", "/v1/operators")), Operators).operators
