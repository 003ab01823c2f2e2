"""`cukiln export-bundle` and `import-results`: jobs that are measured on a machine without a service or a network."""

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from cukiln.cli.console import AsJson, OfTarget, Url, given, given_path, make_console, write_output
from cukiln.cli.exit_codes import OF_STATE
from cukiln.cli.server import find_client, own_client, server_module
from cukiln.cli.table import print_job
from cukiln.cli.tune import job_json, show_progress
from cukiln.cli.winners import lookup_request
from cukiln.client import Client
from cukiln.counted import counted
from cukiln.errors import UnexpectedAnswer, UsageError, WaitTimeout
from cukiln.job_request import read_request
from cukiln.json_file import read_json_object
from cukiln.printable import printable
from cukiln.types import Job

BUNDLE_FILE, LIBRARIES, RESULTS_FILE, JOB_FILE = "bundle.json", "lib", "results.json", "job.json"
PACKED_RESULTS = "results-*.json.gz"
MOST_BYTES = 8 * 2**20  # of one request: half of what a service takes by default
MOST_RESULTS = 2**30  # bytes of a results file, behind gzip
SCHEMA = 1  # of results
REPORT_FILE = "report.json"  # of what was brought back

elsewhere_app = typer.Typer()


@elsewhere_app.command("export-bundle")
def export_job(
    what: Annotated[
        str, typer.Argument(metavar="JOB|FILE", parser=given, help="A job's id; with --compile-only a request in JSON.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", parser=given_path, help="The folder. Default: JOB-bundle, FILE-bundle.")
    ] = None,
    compile_only: Annotated[
        bool,
        typer.Option("--compile-only", help="Compile and verify FILE first, by a service for this, without a GPU."),
    ] = False,
    target: OfTarget = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=1, help="Of compiling; then what is there. Default: all of it.")
    ] = None,
    part_bytes: Annotated[
        str | None,
        typer.Option("--part-bytes", help="Pack all that another machine needs in parts of this size, such as 16M."),
    ] = None,
    wheels: Annotated[
        Path | None, typer.Option("--wheels", help="Of `make offline-wheels`. Default: build/offline-wheels.")
    ] = None,
    url: Url = None,
) -> None:
    """Write what a machine that has a GPU and no service needs to measure JOB, or FILE: docs/measuring-elsewhere.md.

    With --compile-only OUT keeps that service's data: the same command continues. --part-bytes packs OUT/carried.
    """
    if not compile_only and (part_bytes or seconds):
        raise UsageError("--part-bytes and --seconds go with --compile-only")
    folder = (out or Path(f"{Path(what).stem}-bundle")).absolute()
    pack = packing(wheels, part_bytes) if part_bytes else None
    if not compile_only:
        with find_client(url) as client:
            path, bundle = export_bundle(client, what, folder)
    else:
        request = read_request(what, target)
        with own_client(folder / "service") as client, show_progress(make_console(stderr=True)) as progress:
            path, bundle = compile_bundle(client, request, folder, seconds=seconds, progress=progress)
            if pack:
                name, beside = pack.beside(bundle["problems"][0]["target"])
                write_output(folder / name, winner_library(client, beside))
    typer.echo(printable(f"{path}: {described(bundle)}"))
    if pack:
        typer.echo(printable(pack.pack(folder)))


@elsewhere_app.command("import-results")
def import_measured(
    results: Annotated[
        Path,
        typer.Argument(metavar="FOLDER|FILE", parser=given_path, help="What was brought back, or a results.json."),
    ],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Send what was measured elsewhere to the service, which builds and publishes winners. Sent again, it changes
    nothing; of a run that is not finished, what is there. Says what of the folder no service takes, and why.

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
    for line in not_imported(results) if results.is_dir() else []:
        typer.echo(printable(line), err=as_json)
    raise typer.Exit(max(OF_STATE[job.state] for job in jobs))


def export_bundle(client: Client, job_id: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The job's libraries, then `bundle.json`: its path and content. Raises `UsageError` where there is no library."""
    bundle = client.bundle(job_id)
    try:
        libraries = sorted({candidate["library"] for candidate in _candidates(bundle) if candidate["library"]})
    except (KeyError, TypeError, AttributeError) as error:
        raise UnexpectedAnswer(
            f"{client.url} did not answer with a bundle of job {job_id}; check that client and service are of the same "
            "release"
        ) from error
    if not libraries:
        raise UsageError(
            f"job {job_id} has no library to measure: it is not compiled yet, or all of it was answered from the "
            "cache; export the job that compiled it"
        )
    for digest in libraries:
        write_output(folder / LIBRARIES / f"{digest}.so", client.blob(digest, "so"))
    path = folder / BUNDLE_FILE
    write_output(path, (json.dumps(bundle, indent=1) + "\n").encode())
    return path, bundle


def compile_bundle(
    client: Client, request: Mapping[str, Any], folder: Path, *, seconds: float | None = None, progress: Any = None
) -> tuple[Path, dict[str, Any]]:
    """Have the request compiled and verified, or continue that, then export it: what is there after `seconds`. The
    job's id stands in the folder. Raises `UsageError` where that is another request's."""
    path, digest = folder / JOB_FILE, hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
    if path.is_file():
        stored = read_json_object(path, "file of a bundle's job", f"remove it: {folder} then begins anew")
        if not isinstance(stored.get("job"), str):
            raise UsageError(f"{path} names no job: remove it, and {folder} begins anew")
        if stored.get("request") != digest:
            raise UsageError(f"{folder} holds the bundle of another request: name another folder with --out")
        job = client.job(stored["job"])
    else:
        job = client.submit(request)
        write_output(path, json.dumps({"request": digest, "job": job.job}).encode())
    with suppress(WaitTimeout):
        client.wait(job, progress=progress, timeout=seconds)
    return export_bundle(client, job.job, folder)


def winner_library(client: Client, request: Mapping[str, Any]) -> bytes:
    """Of the fastest kernel of the request's one problem."""
    client.wait(client.submit(request))
    (result,) = lookup_request(client, request)
    if result.record is None:
        raise UsageError(f"{result.name}: no winner")
    return client.blob(result.record.front[0].so_sha256)


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
    """Send a results file, or those of a folder; large ones in several parts, each of which becomes a job. What no
    problem has been measured of is left out."""
    files = [read_results(path) for path in result_files(where)]
    begun = [{**results, "problems": [each for each in results["problems"] if _is_begun(each)]} for results in files]
    parts = [part for results in begun for part in parts_of(results, MOST_BYTES) if part["problems"]]
    if not parts:
        raise UsageError(f"{where}: nothing is measured yet")
    return [client.send_results(part) for part in parts]


def result_files(where: Path) -> list[Path]:
    """Of a folder, those that were brought back from elsewhere, else the one that a run writes. Raises `UsageError`."""
    if not where.is_dir():
        return [where]
    packed = sorted(where.glob(PACKED_RESULTS))
    if not packed and (where / REPORT_FILE).is_file():
        raise UsageError(f"{where}: nothing is measured yet; {REPORT_FILE} and logs.txt in it say why")
    return packed or [where / RESULTS_FILE]


def read_results(path: Path) -> dict[str, Any]:
    """Raises `UsageError`."""
    try:
        with path.open("rb") as file:
            data = (gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file).read(MOST_RESULTS + 1)
        if len(data) > MOST_RESULTS:
            raise UsageError(f"{path} holds more than {counted(MOST_RESULTS, 'byte')}: no run writes such a file")
        results = json.loads(data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{path} is damaged ({error}): bring it back again") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(results, dict) or not isinstance(results.get("problems"), list):
        raise UsageError(
            f"{path} is not what `python -m workers.offline.measure_bundle` writes: it has no list of problems"
        )
    if results.get("schema") != SCHEMA:
        raise UsageError(
            f"{path} is of schema {results.get('schema')!r}, and this release reads {SCHEMA}: import it with the "
            "release that measured it"
        )
    for place, problem in enumerate(results["problems"]):
        candidates = problem.get("candidates") if isinstance(problem, dict) else None
        if not isinstance(candidates, list) or not all(isinstance(candidate, dict) for candidate in candidates):
            raise UsageError(f"{path} is damaged: problems[{place}] has no list of candidates; bring it back again")
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


def _is_begun(problem: Mapping[str, Any]) -> bool:
    return any(candidate.get("verdict") != "skipped" for candidate in problem["candidates"])


def _candidates(bundle: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for problem in bundle["problems"]:
        yield from problem["candidates"]


# ---- what another machine needs, in parts


@dataclass(frozen=True)
class Packing:
    """How a bundle is packed for another machine."""

    wheels: Path
    part_bytes: int

    def beside(self, target: str) -> tuple[str, dict[str, Any]]:
        """A file of the bundle's folder, and the request whose winner's library it is."""
        carry = server_module("workers.offline.carry")
        return carry.WORKSPACES_LIBRARY, carry.workspaces_request(target)

    def pack(self, bundle: Path) -> str:
        """A sentence about what is packed. Raises `UsageError`."""
        carry = server_module("workers.offline.carry")
        try:
            carried = carry.pack(bundle, bundle / "carried", wheels=self.wheels, part_bytes=self.part_bytes)
        except carry.NotCarried as error:
            raise UsageError(str(error)) from error
        files, wheels = counted(len(carried.files), "file"), counted(carried.wheels, "wheel")
        there = f"python3 {carry.SCRIPT} --budget 500"
        return f"{carried.folder}: {files}, {carried.bytes / 1e6:.1f} MB, {wheels}; there: {there}"


def packing(wheels: Path | None, part_bytes: str) -> Packing:
    """Looked at before anything is compiled. Raises `UsageError`."""
    carry = server_module("workers.offline.carry")
    chosen = Packing(wheels or carry.DEFAULT_WHEELS, size_of(part_bytes))
    try:
        carry.wheels_in(chosen.wheels)
    except carry.NotCarried as error:
        raise UsageError(str(error)) from error
    return chosen


def size_of(text: str) -> int:
    """Bytes of a size such as `16M`. Raises `UsageError`."""
    match = re.fullmatch(r"([1-9][0-9]{0,11})([KMG]?)", text)
    if match is None:
        raise UsageError(f"{text!r} is no size: give bytes, or a number with K, M or G, such as 16M")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


# ---- what was brought back and no service takes

_CONFIRMED = (
    "it decides which winners are `verified: cpu` for all jobs, so a person takes it over into the checkout that all "
    "processes run: `python -m tests.gpu.confirm_primitives --take {path}`, then commit codegen/device/confirmed.json"
)
_CEILINGS = "a service keeps none; `make bench-kernels` shows the results beside them (`--results {folder}`)"
_STATE = "what a later run continues from (`measure_there.py --continue-from {folder}`); the results are in it, too"
_ENDED_WELL = "exit status 0"


def not_imported(folder: Path) -> list[str]:
    """A line for each such file of the folder, and for each part of the run that did not end well."""
    lines = []
    for name, (described, why) in _FILES.items():
        path = folder / name
        if path.is_file():
            text = why.format(path=path, folder=folder)
            lines.append(f"{name} is not imported{_content(path, described)}: {text}")
    return lines + _parts(folder / REPORT_FILE)


def _content(path: Path, described: Callable[[Mapping[str, Any]], str] | None) -> str:
    if described is None:
        return ""
    try:
        return f" ({described(json.loads(path.read_bytes()))})"
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        return f" (and cannot be read: {type(error).__name__}: {error})"


def _confirmed(content: Mapping[str, Any]) -> str:
    failed = content.get("failed", {})
    differ = f", {len(failed)} that differ: {', '.join(sorted(failed))}" if failed else ""
    return f"{counted(len(content['primitives']), 'primitive')} confirmed by {content.get('device', '?')}{differ}"


def _parts(report: Path) -> list[str]:
    if not report.is_file():
        return []
    try:
        parts: Mapping[str, str] = json.loads(report.read_bytes()).get("parts", {})
        return [f"{name}: {text}" for name, text in parts.items() if not text.startswith(_ENDED_WELL)]
    except (ValueError, TypeError, AttributeError) as error:
        return [f"{report.name} cannot be read: {error}"]


_FILES: dict[str, tuple[Callable[[Mapping[str, Any]], str] | None, str]] = {
    "confirmed.json": (_confirmed, _CONFIRMED),
    "ceilings.json": (lambda of: f"of {of.get('device', 'a card')}, {of['uuid']}, driver {of['driver']}", _CEILINGS),
    "state.zip": (None, _STATE),
}
