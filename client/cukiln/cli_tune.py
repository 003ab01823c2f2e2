"""`cukiln tune`: submit a request, watch it, show the winners."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from cukiln.cli_progress import duration, show_progress
from cukiln.cli_table import print_job, summary
from cukiln.client import Client
from cukiln.errors import ServiceError
from cukiln.types import Job

EXIT_CODES = {"done": 0, "failed": 1, "cancelled": 1, "partial": 3}


@dataclass(frozen=True)
class Consoles:
    """`out` is standard output: the answer. `progress` is standard error: what is only of interest while it runs."""

    out: Console
    progress: Console


def tune(
    client: Client, request: Mapping[str, Any], consoles: Consoles, *, as_json: bool, again: bool, cancel: bool
) -> int:
    """Run the request to its end and print the outcome; returns the exit code.

    `again`: send it a second time and say how that was answered. `cancel`: an interrupt cancels the job too.
    """
    job, seconds = _run(client, request, consoles.progress, cancel)
    repeated = _repeat(client, request) if again else None
    if as_json:
        answer = job_json(job)
        if repeated is not None:
            answer["again"] = {"cached": repeated[0].cached, "milliseconds": round(repeated[1] * 1000, 3)}
        # One line, so that the last line is the object.
        consoles.out.file.write(json.dumps(answer) + "\n")
        return EXIT_CODES[job.state]
    print_job(consoles.out, job)
    _say(consoles.out, "")
    _say(consoles.out, summary(job, seconds))
    if repeated is not None:
        _say(consoles.out, _repeated_sentence(*repeated))
    return EXIT_CODES[job.state]


def job_json(job: Job) -> dict[str, Any]:
    """The object that `--json` prints; a problem has `error` only where it failed."""
    problems = []
    for problem in job.problems:
        fields = ("name", "key", "winner", "verdicts", "rejected", "seconds")
        entry = problem.model_dump(mode="json", include=set(fields))
        entry = {name: entry[name] for name in fields}
        if problem.error is not None:
            entry["error"] = problem.error
        problems.append(entry)
    return {"job": job.job, "state": job.state, "cached": job.cached, "problems": problems}


def _run(client: Client, request: Mapping[str, Any], console: Console, cancel: bool) -> tuple[Job, float]:
    """The finished job and the seconds that its answer took."""
    start = time.perf_counter()
    job = client.submit(request)
    if job.state in EXIT_CODES:
        return job, time.perf_counter() - start
    count = len(job.problems)
    _say(console, f"Job {job.job}: {count} problem{'s' if count != 1 else ''} at {client.url}")
    with _cancelling(client, job, console, cancel), show_progress(console) as update:
        job = client.wait(job, progress=update)
    return job, time.perf_counter() - start


@contextmanager
def _cancelling(client: Client, job: Job, console: Console, cancel: bool) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        if not cancel:
            _say(console, f"Interrupted. Job {job.job} goes on in the service at {client.url}.")
            raise
        try:
            client.cancel(job.job)
        except ServiceError as error:
            _say(console, f"Interrupted. Job {job.job} could not be cancelled: {error}")
        else:
            _say(console, f"Interrupted. Job {job.job} is cancelled; what was finished is kept.")
        raise


def _repeat(client: Client, request: Mapping[str, Any]) -> tuple[Job, float]:
    start = time.perf_counter()
    job = client.submit(request)
    seconds = time.perf_counter() - start
    if job.state not in EXIT_CODES:  # not answered from the cache: it is not to be left running
        job = client.cancel(job.job)
    return job, seconds


def _repeated_sentence(job: Job, seconds: float) -> str:
    if job.cached:
        return f"The same request again was answered from the cache in {duration(seconds)}."
    return "The same request again was not answered from the cache: some of its problems have no winner."


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
