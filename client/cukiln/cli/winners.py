"""`cukiln lookup`, `fetch` and `lock`: known winners, shown, as folders for `cukiln.load`, pinned."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from cukiln.cli.console import AsJson, OfTarget, RequestFile, Url, given, given_path, is_id, make_console, write_output
from cukiln.cli.exit_codes import PARTIAL
from cukiln.cli.server import find_client
from cukiln.cli.table import print_lookups
from cukiln.client import Client
from cukiln.counted import counted
from cukiln.errors import UsageError
from cukiln.job_request import read_request
from cukiln.kernels.load_kernel import RECORD_FILE
from cukiln.lock import LOCK_FILE, Lock, make_lock
from cukiln.printable import printable
from cukiln.types import LookedUp, OnMiss, WinnerRecord

winners_app = typer.Typer()


@winners_app.command()
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


@winners_app.command()
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
        if is_id(what, "key", 64, "64 hexadecimal digits"):
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


@winners_app.command()
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


def fetch_record(client: Client, record: WinnerRecord, folder: Path) -> Path:
    """Write every file of the record as `<sha256>.so`, `.cubin` and so on, and last the record; returns its path.

    A folder that is read meanwhile, or left by an interrupted call, holds a record only together with its blobs: the
    files are named after their content, and the record is replaced when all of them are there.
    """
    for entry in record.front:
        for kind, digest in entry.files.items():
            path = folder / f"{digest}.{kind}"
            write_output(path, client.blob(digest, kind))
    path = folder / RECORD_FILE
    write_output(path, (record.model_dump_json(indent=2) + "\n").encode())
    return path


def lookup_request(client: Client, request: Mapping[str, Any], on_miss: OnMiss = "none") -> list[LookedUp]:
    """Look up the problems of a job request; where it names targets, each problem is looked up for its own."""
    return client.lookup(
        request["problems"],
        target=request.get("target"),
        device_class=request.get("device_class"),
        workspace_limit_bytes=request.get("workspace_limit_bytes"),
        deterministic=request.get("deterministic", False),
        on_miss=on_miss,
        search=request.get("search"),
        priority=request.get("priority"),
        refresh=True,
    )


def lock_request(client: Client, request: Mapping[str, Any], path: Path) -> tuple[Lock, list[str]]:
    """The lock of a request's winners, and the names of problems that have none; then nothing is written."""
    results = lookup_request(client, request)
    missing = [result.name or result.key for result in results if result.record is None]
    records = [result.record for result in results if result.record is not None]
    if missing:
        return Lock(path, ()), missing
    lock = make_lock(path, request["problems"], records)
    lock.write()
    return lock, missing


def fetch_locked(client: Client, lock: Lock) -> int:
    """Bring the libraries of the lock into the local cache; returns their number. Raises `UsageError` where it cannot
    be written."""
    libraries = {entry.so_sha256 for entry in lock.entries()}
    for digest in sorted(libraries):
        client.cache.put(digest, client.blob(digest))
    return len(libraries)


def folder_name(result: LookedUp) -> str:
    """A problem's name where it is a plain file name, else the start of its key."""
    name = result.name or ""
    plain = name and len(name) <= 100 and all(c.isalnum() or c in "._- " for c in name) and not name.startswith(".")
    return name if plain else result.key[:16]
