"""Misses of a lookup → a job, where the caller asks for that. What comes of it never costs the lookup its hits."""

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cukiln.types import Job
from service.context import Service
from service.http.errors import Refused
from service.http.handle_errors import refused_by
from service.requests.models import LOOKUP_FIELDS
from service.requests.resolve import Known, Wanted
from service.routes.accept_job import Submission, TriedMeanwhile, Untried, accept_jobs, raised
from storage.database.database_errors import DATABASE_ERRORS, Failure, failure_of
from storage.entities.jobs import Trying, tried_keys

FAILED_SECONDS = 86_400.0
"""A search that has failed is not repeated for so long."""
ATTEMPTS = 3
"""At a job of what is not tried: another process may be faster."""
_ONE_AT_A_TIME = threading.Lock()
"""From the look for what is tried already to the job: the processes of a training look the same problems up at once.
Requests of this process wait here, those of others are seen when the job is written (`Untried`)."""


@dataclass(frozen=True)
class Queued:
    """`trying`: by key of the record. `refused`: why no job was made of the others."""

    trying: Mapping[str, Trying] = field(default_factory=dict)
    refused: str | None = None


def tune_misses(service: Service, known: Known, body: Mapping[str, Any], misses: dict[int, Wanted]) -> Queued:
    """`body`: of the lookup. `misses`: by place in it."""
    places = {
        wanted.key: place
        for place, wanted in reversed(misses.items())
        if wanted.asked.device_class in ("", *known.device_classes(wanted.asked.target))  # no other can be measured on
    }
    trying: dict[str, Trying] = {}
    try:
        with _ONE_AT_A_TIME:
            for _ in range(ATTEMPTS):
                untried = Untried(
                    {key: misses[place].asked.search.canonical() for key, place in places.items()},
                    service.database.clock.now() - FAILED_SECONDS,
                )
                with service.database.read() as session:
                    trying = tried_keys(session, untried.searches, untried.since)
                new = {key: place for key, place in places.items() if key not in trying}
                if not new:
                    return Queued(trying)
                outcome = _submit(service, body, {place: misses[place] for place in sorted(new.values())}, untried)
                if not isinstance(outcome, TriedMeanwhile):
                    job = raised(outcome)
                    return Queued({**trying, **{key: Trying(job.job, "queued") for key in new}})
        return Queued(trying, f"Other processes queued some of these problems {ATTEMPTS} times over: look up again.")
    except Refused as refused:
        return Queued(trying, str(refused))
    except DATABASE_ERRORS as error:
        return Queued(trying, str(refused_by(failure_of(error) or Failure.UNAVAILABLE)))


def _submit(service: Service, body: Mapping[str, Any], new: Mapping[int, Wanted], untried: Untried) -> Job | Exception:
    searches = {wanted.key: untried.searches[wanted.key] for wanted in new.values()}
    submission = Submission(_job_body(body, new), untried=replace(untried, searches=searches))
    return accept_jobs(service, [submission])[0]


def _job_body(body: Mapping[str, Any], misses: Mapping[int, Wanted]) -> bytes:
    """In a lookup several problems may have one name, in a job none."""
    names = _unique(wanted.asked.name for wanted in misses.values())
    problems = [{**body["problems"][place], "name": name} for place, name in zip(misses, names, strict=True)]
    own = {name: part for name, part in body.items() if name not in LOOKUP_FIELDS}
    return json.dumps({**own, "problems": problems}).encode()


def _unique(names: Iterable[str]) -> list[str]:
    given: dict[str, None] = {}
    for name in names:
        number, own = 1, name
        while own in given:
            number += 1
            own = f"{name[:240]} ({number})"
        given[own] = None
    return list(given)
