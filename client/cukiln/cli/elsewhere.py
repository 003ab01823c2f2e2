"""`cukiln export-bundle` and `import-results`: jobs that are measured on a machine without a service."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from cukiln.cli.console import AsJson, JobId, Url, given_path, make_console
from cukiln.cli.exit_codes import OF_STATE
from cukiln.cli.server import find_client
from cukiln.cli.table import print_job
from cukiln.cli.tune import job_json
from cukiln.client import Client
from cukiln.counted import counted
from cukiln.errors import UsageError
from cukiln.local_cache import write_atomically
from cukiln.printable import printable
from cukiln.types import Job

BUNDLE_FILE, LIBRARIES, RESULTS_FILE = "bundle.json", "lib", "results.json"
MOST_BYTES = 8 * 2**20  # of one request: half of what a service takes by default

elsewhere_app = typer.Typer()


@elsewhere_app.command("export-bundle")
def export_job(
    job: JobId,
    out: Annotated[
        Path | None, typer.Option("--out", parser=given_path, help="The folder. Default: JOB-bundle.")
    ] = None,
    url: Url = None,
) -> None:
    """Write what a machine that has a GPU and no service needs to measure JOB: docs/measuring-elsewhere.md."""
    with find_client(url) as client:
        path, bundle = export_bundle(client, job, out or Path(f"{job}-bundle"))
    typer.echo(printable(f"{path}: {described(bundle)}"))


@elsewhere_app.command("import-results")
def import_measured(
    results: Annotated[
        Path,
        typer.Argument(metavar="FOLDER|FILE", parser=given_path, help="A results.json, or the folder that has it."),
    ],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Send the results of `python -m workers.offline.measure_bundle` to the service, which builds and publishes
    winners.

    Exit code 3 when some problems have no winner.
    """
    console = make_console()
    with find_client(url) as client:
        jobs = [client.wait(job) for job in import_results(client, results)]
    for job in jobs:
        if as_json:
            typer.echo(json.dumps(job_json(job)))
        else:
            print_job(console, job)
    raise typer.Exit(max(OF_STATE[job.state] for job in jobs))


def export_bundle(client: Client, job_id: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The job's libraries, then `bundle.json`: its path and content. Raises `UsageError` where there is no library."""
    bundle = client.bundle(job_id)
    libraries = sorted({candidate["library"] for candidate in _candidates(bundle) if candidate["library"]})
    if not libraries:
        raise UsageError(
            f"job {job_id} has no library to measure: it is not compiled yet, or all of it was answered from the "
            "cache; export the job that compiled it"
        )
    for digest in libraries:
        write_atomically(folder / LIBRARIES / f"{digest}.so", client.blob(digest, "so"))
    path = folder / BUNDLE_FILE
    write_atomically(path, (json.dumps(bundle, indent=1) + "\n").encode())
    return path, bundle


def described(bundle: Mapping[str, Any]) -> str:
    """A summary of a bundle."""
    candidates = list(_candidates(bundle))
    compiled = sum(candidate["library"] is not None for candidate in candidates)
    failed = sum(candidate["verdict"] is not None for candidate in candidates)
    text = f"{counted(len(bundle['problems']), 'problem')}, {counted(compiled, 'candidate')} to measure"
    if failed:
        text += f", {failed} that do not compile"
    if left := len(candidates) - compiled - failed:
        example = next(
            candidate["message"]
            for candidate in candidates
            if candidate["library"] is None and candidate["verdict"] is None
        )
        text += f"; {left} are left out, for example: {example}"
    return text


def import_results(client: Client, where: Path) -> list[Job]:
    """Send a results.json, or that of a folder; large ones in several parts, each of which becomes a job."""
    return [client.send_results(part) for part in parts_of(read_results(where), MOST_BYTES)]


def read_results(where: Path) -> dict[str, Any]:
    """Raises `UsageError`."""
    path = where / RESULTS_FILE if where.is_dir() else where
    try:
        results = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(results, dict) or not isinstance(results.get("problems"), list):
        raise UsageError(
            f"{path} is not what `python -m workers.offline.measure_bundle` writes: it has no list of problems"
        )
    return results


def parts_of(results: Mapping[str, Any], most_bytes: int) -> Iterator[dict[str, Any]]:
    """The results with as many problems in each part as fit into so many bytes, one at least."""
    part: list[Any] = []
    size = 0
    for problem in results["problems"]:
        bytes_of_it = len(json.dumps(problem))
        if part and size + bytes_of_it > most_bytes:
            yield {**results, "problems": part}
            part, size = [], 0
        part.append(problem)
        size += bytes_of_it
    yield {**results, "problems": part}


def _candidates(bundle: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for problem in bundle["problems"]:
        yield from problem["candidates"]
