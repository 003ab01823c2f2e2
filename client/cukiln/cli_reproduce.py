"""`cukiln reproduce`: a candidate's facts from the service, written as a folder that builds and checks it alone."""

from __future__ import annotations

import re
from pathlib import Path

from cukiln.cli_server import server_module
from cukiln.client import Client
from cukiln.errors import NotFound, UsageError

REMOVED = (
    "Jobs that ended long ago are removed with their candidates, a winner's too: to have one again, send its problem "
    "with a wider search, or after `cukiln forget` of the winner"
)


def job_id(job: str | None) -> str | None:
    """The job as it is named, where that can be one. Raises `UsageError`."""
    if job is None or re.fullmatch(r"[0-9a-f]{32}", job):
        return job
    raise UsageError(
        f"there is no job {job!r}: a job's id is 32 lower-case hexadecimal digits, as `cukiln tune` prints it"
    )


def reproduce_candidate(client: Client, candidate: str, job: str | None, out: Path | None) -> int:
    """Returns the exit code. Raises `NotFound`, `BadRequest`, `ServerMissing`."""
    module = server_module("workers.reproduce.write_folder")
    try:
        facts = client.candidate(candidate, job=job)
    except NotFound as error:
        error.args = (f"{error}. {REMOVED}",)
        raise
    code: int = module.reproduce(facts, out or Path(f"candidate-{facts.candidate[:16]}"))
    return code
