"""How far watched jobs are: read once for all watchers of a job that ask at the same time, in one thread."""

import logging
from collections.abc import Sequence

from storage.database.database_errors import DATABASE_ERRORS
from storage.database.session import Database
from storage.reports.progress import JobProgress, job_progress

log = logging.getLogger("cukiln.service")


def read_progress(database: Database, live_seconds: float, jobs: Sequence[str]) -> list[JobProgress | None]:
    """Of each; None where there is no such job or the database does not answer."""
    by_job = {job: _read(database, live_seconds, job) for job in dict.fromkeys(jobs)}
    return [by_job[job] for job in jobs]


def _read(database: Database, live_seconds: float, job: str) -> JobProgress | None:
    try:
        with database.read() as session:
            return job_progress(session, job, live_seconds)
    except DATABASE_ERRORS as error:
        log.warning("job %s cannot be read for its watchers: %s", job, error)
        return None
