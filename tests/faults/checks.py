"""What must hold of a service's data once all its jobs have ended, whatever happened to it.

`python -m tests.faults.checks` prints what does not, as JSON: of the service that the environment names.
"""

from __future__ import annotations

import json
import sys
import time

from sqlalchemy import select

from storage.blobs.blob_store import BlobStore
from storage.config.settings import Settings, load_settings
from storage.database.session import Database
from storage.database.tables import (
    LIVE,
    BuildRow,
    GroupRow,
    JobProblemRow,
    JobRow,
    PendingBuildRow,
    TaskRow,
    VerdictRow,
)
from storage.maintenance.damage import check_blobs

SETTLED_SECONDS = 60.0


def once_settled(settings: Settings) -> list[str]:
    """What is in the database that must not be, and stays there: a worker that was paused has its lease to lose."""
    deadline = time.monotonic() + SETTLED_SECONDS
    while (faults := in_database(settings)) and time.monotonic() < deadline:
        time.sleep(1.0)
    return faults


def in_database(settings: Settings) -> list[str]:
    """Rows that must not be once all jobs have ended."""
    database = Database(settings.database_url)
    try:
        with database.read() as session:
            queries = {
                "a task has not ended": select(TaskRow.kind).where(TaskRow.state.in_(("waiting", "leased"))),
                "a job has not ended": select(JobRow.state).where(JobRow.state.in_(LIVE)),
                "a problem has not ended": select(JobProblemRow.name).where(JobProblemRow.state.in_(LIVE)),
                "a demand is left": select(PendingBuildRow.build),
                "a group compiles": select(GroupRow.id).where(GroupRow.state == "compiling"),
                "a build did not compile": select(BuildRow.log).where(BuildRow.state != "ok"),
                "a kernel is not right": select(VerdictRow.message).where(VerdictRow.verdict != "ok"),
            }
            return [f"{what}: {row}" for what, query in queries.items() for row in session.scalars(query)]
    finally:
        database.dispose()


def damaged(settings: Settings) -> list[str]:
    """Blobs whose bytes do not have their digest."""
    database = Database(settings.database_url)
    try:
        store = BlobStore(database, settings.blobs_url)
        return [f"blob {blob.digest}: {damage.why}" for blob, damage in check_blobs(database, store) if damage]
    finally:
        database.dispose()


def main() -> None:
    of_service = load_settings()
    sys.stdout.write(json.dumps(once_settled(of_service) + damaged(of_service)))


if __name__ == "__main__":
    main()
