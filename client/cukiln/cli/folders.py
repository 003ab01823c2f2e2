"""`cukiln fetch`, `export-bundle`, `import-results`: winners for `cukiln.load`, jobs measured elsewhere."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cukiln.client import Client
from cukiln.counted import counted
from cukiln.errors import UsageError, WaitTimeout
from cukiln.load_kernel import RECORD_FILE
from cukiln.local_cache import write_atomically
from cukiln.lock import Lock, make_lock
from cukiln.types import Job, LookedUp, OnMiss, WinnerRecord


def fetch_record(client: Client, record: WinnerRecord, folder: Path) -> Path:
    """Write every file of the record as `<sha256>.so`, `.cubin` and so on, and last the record; returns its path.

    A folder that is read meanwhile, or left by an interrupted call, holds a record only together with its blobs: the
    files are named after their content, and the record is replaced when all of them are there.
    """
    for entry in record.front:
        for kind, digest in entry.files.items():
            path = folder / f"{digest}.{kind}"
            write_atomically(path, client.blob(digest, kind))
    path = folder / RECORD_FILE
    write_atomically(path, (record.model_dump_json(indent=2) + "\n").encode())
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
    """Bring the libraries of the lock into the local cache; returns their number."""
    libraries = {entry.so_sha256 for entry in lock.entries()}
    for digest in sorted(libraries):
        client.blob(digest)
    return len(libraries)


def folder_name(result: LookedUp) -> str:
    """A problem's name where it is a plain file name, else the start of its key."""
    name = result.name or ""
    plain = name and len(name) <= 100 and all(c.isalnum() or c in "._- " for c in name) and not name.startswith(".")
    return name if plain else result.key[:16]


BUNDLE_FILE, LIBRARIES, RESULTS_FILE, JOB_FILE = "bundle.json", "lib", "results.json", "job.json"
PACKED_RESULTS = "results-*.json.gz"
MOST_BYTES = 8 * 2**20  # of one request: half of what a service takes by default


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


def compile_bundle(
    client: Client, request: Mapping[str, Any], folder: Path, *, seconds: float | None = None, progress: Any = None
) -> tuple[Path, dict[str, Any]]:
    """Have the request compiled and proved, or continue that, then export it: what is there after `seconds`. The job's
    id stands in the folder. Raises `UsageError` where that is another request's."""
    path, digest = folder / JOB_FILE, hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
    if path.is_file():
        stored = json.loads(path.read_bytes())
        if stored["request"] != digest:
            raise UsageError(f"{folder} holds the bundle of another request: name another folder with --out")
        job = client.job(stored["job"])
    else:
        job = client.submit(request)
        write_atomically(path, json.dumps({"request": digest, "job": job.job}).encode())
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
    """Of a folder, those that were brought back from elsewhere, else the one that a run writes."""
    if not where.is_dir():
        return [where]
    return sorted(where.glob(PACKED_RESULTS)) or [where / RESULTS_FILE]


def read_results(path: Path) -> dict[str, Any]:
    """Raises `UsageError`."""
    try:
        data = path.read_bytes()
        results = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{path} is damaged ({error}): bring it back again") from error
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


def _is_begun(problem: Mapping[str, Any]) -> bool:
    return any(candidate.get("verdict") != "skipped" for candidate in problem.get("candidates", ()))


def _candidates(bundle: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for problem in bundle["problems"]:
        yield from problem["candidates"]
