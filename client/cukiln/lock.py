"""Lock files: the winner records that a model needs, pinned by their SHA-256, with all that is needed to call them.

`cukiln lock FILE` writes one, `cukiln fetch --lock` brings its libraries into the local cache, and
`cukiln.load(problem, locked=True)` loads from it without a service, and nothing else.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cukiln.errors import NotLocked, UsageError
from cukiln.job_request import encode
from cukiln.json_file import read_json_object
from cukiln.local_cache import verify, write_atomically
from cukiln.operations.record_memory import record_bytes, record_of
from cukiln.settings import own_path
from cukiln.types import FrontEntry, WinnerRecord

LOCK_FILE = "cukiln.lock"  # in the current folder, unless CUKILN_LOCK names another
VERSION = 2


@dataclass(frozen=True)
class LockedProblem:
    """A pinned record. `problem`: as it was asked, without its name; `sha256`: of the record."""

    name: str
    problem: Mapping[str, Any]
    sha256: str
    record: WinnerRecord


@dataclass(frozen=True)
class Lock:
    """The content of a lock file."""

    path: Path
    problems: tuple[LockedProblem, ...]

    @classmethod
    def read(cls, path: Path | str | None = None) -> "Lock":
        """The file at `path`, else at `CUKILN_LOCK`, else `cukiln.lock` in the current folder. Raises `UsageError`
        where there is none, `DigestMismatch` for a record that was changed."""
        file = Path(path) if path else own_path(os.environ.get("CUKILN_LOCK") or LOCK_FILE)
        read = read_json_object(file, "lock file", "`cukiln lock` writes one")
        if read.get("version") != VERSION:
            raise UsageError(
                f"{file} is a lock file of version {read.get('version')!r}, and this release reads {VERSION}; write it "
                "again with `cukiln lock`"
            )
        try:
            return cls(file, tuple(_problem(entry, file) for entry in read["records"]))
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise UsageError(f"{file} is not a whole lock file; write it again with `cukiln lock`") from error

    def write(self) -> None:
        entries = [
            {
                "name": problem.name,
                "problem": dict(problem.problem),
                "target": problem.record.target,
                "key": problem.record.key,
                "revision": problem.record.revision,
                "sha256": problem.sha256,
                "record": json.loads(record_bytes(problem.record)),
            }
            for problem in self.problems
        ]
        text = json.dumps({"version": VERSION, "records": entries}, indent=1, sort_keys=True) + "\n"
        try:
            write_atomically(self.path, text.encode())
        except OSError as error:
            raise UsageError(f"cannot write the lock file {self.path}: {error.strerror}") from error

    def record(self, problem: Mapping[str, Any], target: str | None = None) -> WinnerRecord:
        """The pinned record of the problem, as it was asked or as the service writes it. Raises `NotLocked`, and
        `UsageError` where it is pinned for several targets and none is given."""
        name, target = problem.get("name"), target or problem.get("target")
        asked = encode(_bare(problem))
        alike = [
            pinned
            for pinned in self.problems
            if asked in (encode(pinned.problem), encode(_bare(pinned.record.problem)))
        ]
        of_target = {pinned.sha256: pinned.record for pinned in alike if target in (None, pinned.record.target)}
        if len(of_target) == 1:
            return next(iter(of_target.values()))
        targets = ", ".join(sorted({pinned.record.target for pinned in alike}))
        if of_target:
            raise UsageError(f"{self.path} pins this problem for {targets}: name one with target=…")
        why = f"pins it for {targets}, not for {target}" if alike else "does not pin it"
        raise NotLocked(
            f"the problem{f' {name}' if name else ''} is not locked: {self.path} {why}; `cukiln lock` adds it"
        )

    def check_record(self, record: WinnerRecord) -> None:
        """Raises `NotLocked` unless the record is pinned as it is."""
        if hashlib.sha256(record_bytes(record)).hexdigest() not in {problem.sha256 for problem in self.problems}:
            raise NotLocked(
                f"record {record.key[:12]}…, revision {record.revision}, is not what {self.path} pins: load the "
                "problem itself, or write the lock again with `cukiln lock`"
            )

    def check_library(self, digest: str) -> None:
        """Raises `NotLocked` unless it is the library of a pinned record."""
        if digest not in {entry.so_sha256 for entry in self.entries()}:
            raise NotLocked(f"library {digest[:12]}… is not what {self.path} pins")

    def entries(self) -> list[FrontEntry]:
        """The kernels of all records."""
        return [entry for problem in self.problems for entry in problem.record.front]


def make_lock(path: Path, asked: Sequence[Mapping[str, Any]], records: Iterable[WinnerRecord]) -> Lock:
    """Of problems with their records. Raises `UsageError` for kernels that were tuned for another problem: they are
    what a lookup answers until the problem's own winner is there."""
    pinned = [
        LockedProblem(
            name=str(problem.get("name") or f"problem{number}"),
            problem=_bare(problem),
            sha256=hashlib.sha256(record_bytes(record)).hexdigest(),
            record=record,
        )
        for number, (problem, record) in enumerate(zip(asked, records, strict=True))
    ]
    if names := [problem.name for problem in pinned if problem.record.tuned_for is not None]:
        raise UsageError(
            f"the kernels of {', '.join(names)} were tuned for another problem: tune these (`cukiln tune`), then lock "
            "their own winners"
        )
    return Lock(path, tuple(pinned))


def _bare(problem: Mapping[str, Any]) -> dict[str, Any]:
    """What says what is computed: without the name, the target, and how it is searched."""
    return {name: value for name, value in problem.items() if name not in ("name", "target", "search", "device_class")}


def _problem(entry: Mapping[str, Any], file: Path) -> LockedProblem:
    name, problem, sha256 = entry["name"], entry["problem"], entry["sha256"]
    if not (isinstance(name, str) and isinstance(problem, dict) and isinstance(sha256, str)):
        raise TypeError("a record's name, problem or digest is of a wrong type")
    data = encode(entry["record"])
    verify(data, sha256, f"the record of {name} in {file}")
    return LockedProblem(name, problem, sha256, record_of(entry["record"]))
