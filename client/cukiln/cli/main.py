"""The command line: its commands, but for those of `cli/server.py` and `cli/stored_data.py`.

Exit codes: 0 done; 1 failed; 2 the command or its file is wrong; 3 some problems have no winner; 78 a worker
cannot start with its settings; 130 interrupted.
"""

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from cukiln import __version__
from cukiln.cli.cache import cache_app
from cukiln.cli.candidates import accuracy_rows, fastest_first, print_accuracy, print_candidates
from cukiln.cli.console import AsJson, JobId, OfTarget, ProblemName, RequestFile, Url, given, given_path, make_console
from cukiln.cli.doctor import doctor_report
from cukiln.cli.folders import (
    compile_bundle,
    described,
    export_bundle,
    fetch_locked,
    fetch_record,
    folder_name,
    import_results,
    lock_request,
    lookup_request,
    winner_library,
)
from cukiln.cli.jobs import jobs_app
from cukiln.cli.profile import estimated, print_left_out, print_profile
from cukiln.cli.server import (
    PRIVATE,
    find_client,
    find_service,
    open_client,
    own_client,
    packing,
    quickstart_file,
    run_proof,
    server_app,
)
from cukiln.cli.server import server_module as server
from cukiln.cli.stored_data import keep_app
from cukiln.cli.table import print_job, print_lookups
from cukiln.cli.tune import EXIT_CODES, Tuning, job_json, show_progress
from cukiln.counted import counted
from cukiln.errors import BadRequest, CukilnError, NotFound, ServiceUnreachable, UsageError
from cukiln.job_request import read_request
from cukiln.local_cache import write_atomically
from cukiln.lock import LOCK_FILE, Lock
from cukiln.printable import printable
from cukiln.settings import BY_DEFAULT, ClientSettings
from cukiln.types import Filters, OnMiss, Opened

FAILED, WRONG_USE, PARTIAL = 1, 2, 3
REMOVED = (
    "Jobs that ended long ago are removed with their candidates, a winner's too: to have one again, send its problem "
    "with a wider search, or after `cukiln forget` of the winner"
)
JOB_ID = r"[0-9a-f]{8,32}"  # whole, or as many of its first digits as name it
LOSSES = 8  # services of other commands that may end during one `tune`

app = typer.Typer(
    name="cukiln",
    help="Compile, verify and rank CUDA kernels in batches, and look the winners up.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed, 2 wrong use, 3 some problems have no winner, 78 a worker cannot start, "
    "130 interrupted.",
)
app.add_typer(server_app)
app.add_typer(jobs_app)
app.add_typer(keep_app)
app.add_typer(cache_app, name="cache")


def main() -> None:
    """Entry point: expected errors become one line, never a traceback. Typer exits with 130 after Ctrl-C."""
    try:
        app()
    except (UsageError, BadRequest) as error:
        sys.exit(_complain(error, WRONG_USE))
    except CukilnError as error:
        sys.exit(_complain(error, FAILED))


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"cukiln {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


@app.command()
def tune(
    file: RequestFile,
    target: OfTarget = None,
    url: Url = None,
    as_json: AsJson = False,
    again: Annotated[bool, typer.Option("--again", help="Then send it again, and report the cache's time.")] = False,
    cancel_on_interrupt: Annotated[
        bool, typer.Option("--cancel-on-interrupt", help="Ctrl-C cancels the job in a service that keeps running.")
    ] = False,
) -> None:
    """Find the best kernel for each problem in FILE.

    `--url private`: by a service of the data folder (CUKILN_DATA, default .cukiln), which runs for this command where
    none does; its results stay there.
    """
    tuning = Tuning(read_request(file, target), as_json=as_json, again=again)
    raise typer.Exit(_follow(tuning, url, cancel_on_interrupt))


@app.command()
def watch(
    job: JobId,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Follow JOB to its end and show its winners, as `cukiln tune` does. Ctrl-C leaves it running."""
    raise typer.Exit(_follow(Tuning({}, watched=job, as_json=as_json), url))


@app.command()
def retry(
    job: JobId,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Try again what failed, was cancelled or lost candidates of JOB, as a new job, and follow that as `tune` does.

    Candidates that reached a limit of time or memory are tried again too; incorrect kernels are not (see
    `cukiln forget`).
    """
    raise typer.Exit(_follow(Tuning({}, retried=job, as_json=as_json), url))


@app.command()
def quickstart() -> None:
    """Tune examples/quickstart.json (products and attention of BERT-base and Llama) twice: what `make run` does.

    On a GPU of another architecture than the file's, for that architecture.
    """
    url = PRIVATE if ClientSettings.from_environment().url_from == BY_DEFAULT else None
    raise typer.Exit(_follow(Tuning(read_request(str(quickstart_file())), again=True, on_any_gpu=True), url))


def _follow(tuning: Tuning, url: str | None = None, cancel: bool = False) -> int:
    """The exit code of a job that may outlive the services that it was sent to."""
    for losses in range(LOSSES + 1):
        with find_service(url, tuning.progress) as service, open_client(service) as client:
            try:
                return tuning.run(client, cancel=cancel or service.embedded)
            except ServiceUnreachable:
                # The data folder holds all that a service of our own needs to continue the job.
                if not service.borrowed or losses == LOSSES:
                    tuning.unreachable()
                    raise
                tuning.lost(service.url)
    raise AssertionError("the last loss is raised")


@app.command()
def lookup(
    file: RequestFile,
    target: OfTarget = None,
    on_miss: Annotated[
        OnMiss,
        typer.Option(
            help="Of problems without a winner: nothing; tune them, by the file's search; or do, and show the kernels "
            "of a neighbour that are right for them."
        ),
    ] = "none",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show the known winner of each problem in FILE. Nothing is compiled, unless --on-miss says so. Exit code 3 when
    some have none."""
    request = read_request(file, target)
    console = make_console()
    with find_client(url) as client:
        results = lookup_request(client, request, on_miss)
    misses = sum(not result.is_winner for result in results)
    if as_json:
        entries = [result.model_dump(mode="json") for result in results]
        typer.echo(json.dumps({"hits": len(results) - misses, "misses": misses, "results": entries}))
    else:
        print_lookups(console, results)
    raise typer.Exit(PARTIAL if misses else 0)


@app.command("candidates")
def list_candidates(
    job: JobId,
    problem: ProblemName = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show what was tried for JOB, the fastest first: verdicts, errors, times, resources, schedules."""
    console = make_console()
    with find_client(url) as client:
        candidates = fastest_first(list(client.candidates(job, problem=problem)))
    if as_json:
        dumped = [candidate.model_dump(mode="json") for candidate in candidates]
        typer.echo(json.dumps({"job": job, "candidates": dumped}))
    elif candidates:
        print_candidates(console, candidates)
    else:
        typer.echo("No candidates: the job is not planned yet, or its problems were answered from the cache.")


@app.command()
def profile(
    what: Annotated[
        str,
        typer.Argument(
            metavar="JOB|FILE",
            parser=given,
            help="A job's id, or its first 8 or more digits; or a job request in JSON.",
        ),
    ],
    filters: Annotated[
        Filters, typer.Option(help="Of two-party evaluation: whether the filters are shared, too.")
    ] = "secret",
    opened: Annotated[
        Opened, typer.Option(help="What it opens: the matrices that are multiplied, or the raw inputs.")
    ] = "multiplied",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run does, by operator, kernel and primitive: of JOB's winners, or of FILE's problems, predicted.

    Of FILE nothing is compiled or run: each problem has the schedule of its search that is predicted fastest.
    """
    console = make_console()
    of_job = re.fullmatch(JOB_ID, what) is not None and not Path(what).exists()
    if of_job:
        with find_client(url) as client:
            pages = list(client.profile_pages(what, filters=filters, opened=opened))
    else:
        pages = [estimated(read_request(what), filters, opened)]
    operators = [row for page in pages for row in page.operators]
    left_out = [problem for page in pages for problem in page.left_out]
    if as_json:
        rows, others = ([row.model_dump(mode="json") for row in rows] for rows in (operators, left_out))
        typer.echo(json.dumps({"filters": filters, "opened": opened, "operators": rows, "left_out": others}))
    elif operators:
        print_profile(console, operators, filters, opened)
    else:
        typer.echo("No winners: the job is not done yet, or no candidate was correct.")
    if not as_json:
        print_left_out(console, left_out)
    if left_out and not of_job:
        raise typer.Exit(EXIT_CODES["partial"])


@app.command()
def accuracy(
    job: JobId,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show the errors of JOB's winners against float64, and those of the vendor's library."""
    console = make_console()
    with find_client(url) as client:
        won = [problem for problem in client.job(job).problems if problem.winner is not None]
        rows = [row for problem in won for row in accuracy_rows(problem.name, client.kernel(problem.key))]
    if as_json:
        typer.echo(json.dumps({"job": job, "accuracy": rows}))
    elif rows:
        print_accuracy(console, rows)
    else:
        typer.echo("No winners: the job is not done yet, or no candidate was correct.")


@app.command()
def fetch(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY|FILE",
            parser=given,
            help="A problem's key, or its first 8 or more digits; or a job request in JSON. With --lock: the lock "
            f"file, default {LOCK_FILE}.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", parser=given_path, help="The folder; each problem gets one of its own in it."),
    ] = None,
    locked: Annotated[
        bool, typer.Option("--lock", help="Bring the libraries of a lock file into the local cache.")
    ] = False,
    target: OfTarget = None,
    url: Url = None,
) -> None:
    """Download winner records with their libraries (.so), cubins, CUDA sources, PTX and SASS.

    `cukiln.load("OUT/NAME")` loads such a folder. Exit code 3 when some problems have no winner.
    """
    if locked:
        lock = Lock.read(what)
        with find_client(url) as client:
            libraries = fetch_locked(client, lock)
            if out is not None:
                for problem in lock.problems:
                    typer.echo(fetch_record(client, problem.record, out / problem.record.key[:16]))
        typer.echo(f"{lock.path}: {counted(libraries, 'library')} in {client.cache.folder}")
        return
    if what is None or out is None:
        raise UsageError("KEY|FILE and --out are needed, or --lock")
    misses = 0
    with find_client(url) as client:
        if re.fullmatch(r"[0-9a-f]{8,64}", what) and not Path(what).exists():
            typer.echo(fetch_record(client, record := client.kernel(what), out / record.key[:16]))
        else:
            for result in lookup_request(client, read_request(what, target)):
                if result.record is None:
                    misses += 1
                    name = printable(result.name or result.key)
                    typer.echo(f"{name}: no winner yet; `cukiln tune` finds one", err=True)
                else:
                    typer.echo(fetch_record(client, result.record, out / folder_name(result)))
    raise typer.Exit(PARTIAL if misses else 0)


@app.command()
def lock(
    file: RequestFile,
    out: Annotated[
        Path | None, typer.Option("--out", parser=given_path, help=f"The lock file. Default: {LOCK_FILE}.")
    ] = None,
    target: OfTarget = None,
    url: Url = None,
) -> None:
    """Pin the winners of FILE's problems, by the digests of their records, in a lock file.

    `cukiln fetch --lock` brings their libraries, `cukiln.load(problem, locked=True)` loads them and no others. Exit
    code 3, and nothing is written, when some have no winner.
    """
    request = read_request(file, target)
    with find_client(url) as client:
        written, missing = lock_request(client, request, out or Path(LOCK_FILE))
    for name in missing:
        typer.echo(f"{printable(name)}: no winner yet; `cukiln tune` finds one", err=True)
    if missing:
        raise typer.Exit(PARTIAL)
    typer.echo(f"{written.path}: {counted(len(written.problems), 'record')}")


@app.command("export-bundle")
def export_job(
    what: Annotated[
        str, typer.Argument(metavar="JOB|FILE", parser=given, help="A job's id; with --compile-only a request in JSON.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", parser=given_path, help="The folder. Default: JOB-bundle, FILE-bundle.")
    ] = None,
    compile_only: Annotated[
        bool,
        typer.Option("--compile-only", help="Compile and prove FILE first, by a service for this, which needs no GPU."),
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
                write_atomically(folder / name, winner_library(client, beside))
    typer.echo(printable(f"{path}: {described(bundle)}"))
    if pack:
        typer.echo(printable(pack.pack(folder)))


@app.command("import-results")
def import_measured(
    results: Annotated[
        Path,
        typer.Argument(metavar="FOLDER|FILE", parser=given_path, help="What was brought back, or a results.json."),
    ],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Send what was measured elsewhere to the service, which builds and publishes winners. Sent again, it changes
    nothing; of a run that is not finished, what is there.

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
    raise typer.Exit(max(EXIT_CODES[job.state] for job in jobs))


@app.command()
def prove(
    file: RequestFile,
    problem: ProblemName = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Candidates of each problem. Default: the first one.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of inputs and of seeded orders.")] = 1,
    case: Annotated[int | None, typer.Option(min=0, help="Run this case of the verification plan only.")] = None,
    order: Annotated[
        str | None, typer.Option(help="Run warps in this order only: ascending, descending or seeded.")
    ] = None,
    watch: Annotated[
        bool | None,
        typer.Option(help="Check for races and count bank conflicts in every run, or in none. Default: in some."),
    ] = None,
    sanitize: Annotated[bool, typer.Option("--sanitize", help="Build with g++'s sanitizers.")] = False,
    as_json: AsJson = False,
) -> None:
    """Verify FILE's first candidates on the CPU, without a service, and print the report.

    Output of kernels (printf) is shown. Exit code 1 when a kernel is incorrect. See docs/writing-a-kernel.md.
    """
    part = {"case": case, "order": order, "watch": watch}
    options = {"problem": problem, "limit": limit, "seed": seed, "sanitize": sanitize, "as_json": as_json}
    raise typer.Exit(run_proof(read_request(file), part, options))


@app.command()
def reproduce(
    candidate: Annotated[
        str, typer.Argument(metavar="CANDIDATE", parser=given, help="Its id, or the first 8 or more digits.")
    ],
    job: Annotated[str | None, typer.Option(help="As this job has it. Default: the latest facts.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(parser=given_path, help="The folder to write. Default: candidate-<id> in the current one."),
    ] = None,
    url: Url = None,
) -> None:
    """Write one candidate as a folder that builds it and compares code and verdict with its record.

    `python FOLDER/run.py` does so without cukiln; see docs/reproducing.md.
    """
    if job is not None and not re.fullmatch(JOB_ID, job):
        raise UsageError(
            f"there is no job {job!r}: a job's id is 32 lower-case hexadecimal digits, as `cukiln tune` prints it, or "
            "the first 8 or more of them"
        )
    with find_client(url) as client:
        job = client.job(job).job if job is not None else None
        write_folder = server("workers.reproduce.write_folder")
        try:
            facts = client.candidate(candidate, job=job)
        except NotFound as error:
            error.args = (f"{error}. {REMOVED}",)
            raise
        raise typer.Exit(write_folder.reproduce(facts, out or Path(f"candidate-{facts.candidate[:16]}")))


@app.command()
def doctor(
    as_json: AsJson = False,
) -> None:
    """List what cukiln needs on this machine, what is found, and what to do about the rest."""
    report = doctor_report()
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        report.print_to(make_console())
    raise typer.Exit(0 if report.healthy else FAILED)


def _complain(error: CukilnError, code: int) -> int:
    sys.stderr.write(printable(f"cukiln: {error}\n", lines=True))
    detail = getattr(error, "detail", None)
    for entry in (detail.errors or []) if detail is not None else []:
        line = f"  {entry.get('field', 'request')}: {entry.get('detail', entry)}\n"
        sys.stderr.write(printable(line, lines=True))
    return code


__all__ = ["app", "main"]
