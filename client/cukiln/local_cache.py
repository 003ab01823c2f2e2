"""The local read-through cache: libraries and records by their SHA-256, and what the service answered to which request.

    blobs/<sha256>.<kind>      a file with this content: `so`, `cubin`, …; `record` is a winner record as JSON
    answers/<sha256>.json      the answer to the request with this digest: which record, which revision, since when

Any number of processes share the folder: a file is written beside its place and renamed, and what is read is compared
with its digest, so that a torn or damaged file is a file that is absent. What stands there is believed and loaded, so a
folder that another user may write is not used.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from stat import S_IMODE, S_ISREG, S_IWGRP, S_IWOTH
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from cukiln.errors import DigestMismatch, UsageError

LOG = logging.getLogger("cukiln")
DEFAULT_BYTES = 4 * 2**30  # a full search of a model leaves some hundred libraries of about a megabyte
LARGEST_BLOB = 2**28  # bytes; a larger file is none of the cache's
RECORD = "record"
# A file in use is newer than this, so no other process removes it between the check and the load.
_KEPT_SECONDS = 600.0
_TOUCHED_SECONDS = 300.0  # a use is noted as often as this
_CLOCKS_DIFFER = 60.0  # seconds, of machines that share a folder
_PRUNE_EVERY = 64  # files written by this process
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ROOMS = "blobs", "answers"
_SAID: set[str] = set()  # of folders that are not used, in this process


def check_digest(digest: str) -> str:
    """Return `digest`; raises `UsageError` unless it is 64 lower-case hexadecimal digits (it becomes a file name)."""
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise UsageError(f"{digest!r} is not a SHA-256 digest: 64 hexadecimal digits (0-9, a-f) are expected")
    return digest


def verify(data: bytes, digest: str, what: str) -> bytes:
    """Return `data`; raises `DigestMismatch` unless its SHA-256 is `digest`. `what` names it in the message."""
    actual = hashlib.sha256(data).hexdigest()
    if actual != digest:
        raise DigestMismatch(
            f"{what} does not have the promised content: its SHA-256 is {actual}, {digest} was promised. "
            "It was not used; fetch it again, and if that does not help, distrust where it comes from",
            expected=digest,
            found=actual,
        )
    return data


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file that is complete or absent for other processes; `durable`: also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:16]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class CachedAnswer:
    """What the service answered to a request. `record`: the SHA-256 of the winner record; `at`: Unix seconds."""

    url: str
    key: str
    revision: int
    record: Annotated[str, Field(pattern=f"^{_DIGEST.pattern}$")]
    at: float
    etag: str | None = None

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")


_ANSWER = TypeAdapter(CachedAnswer)


@dataclass(frozen=True)
class Usage:
    """Files and bytes of the cache, or of what was removed from it."""

    records: int = 0
    libraries: int = 0
    other: int = 0  # answers, cubins, sources
    bytes: int = 0

    def plus(self, path: Path, size: int) -> "Usage":
        kind = path.suffix
        return Usage(
            self.records + (kind == f".{RECORD}"),
            self.libraries + (kind == ".so"),
            self.other + (kind not in (f".{RECORD}", ".so")),
            self.bytes + size,
        )


class LocalCache:
    """The cache in `folder`, of at most about `most_bytes`: what was not used for the longest time goes first."""

    def __init__(self, folder: Path, most_bytes: int = DEFAULT_BYTES) -> None:
        self.folder = folder
        self._place = str(folder)  # joining strings takes a tenth of the time of joining paths
        self.most_bytes = most_bytes
        self._written = 0
        self._refusal: str | None = None
        self._is_checked = False

    @property
    def refusal(self) -> str | None:
        """Why the folder is not used, which is said once; None where it is this user's own, or not made yet."""
        if not self._is_checked:
            folders = [self.folder, *(self.folder / room for room in _ROOMS)]
            stats = [(folder, _stat(folder)) for folder in folders]
            whys = [why for folder, stat in stats if stat is not None and (why := _why_not_own(folder, stat))]
            self._refusal = whys[0] if whys else None
            self._is_checked = bool(whys) or all(stat is not None for _, stat in stats)
            if whys:
                _say_once(whys[0])
        return self._refusal

    def path(self, digest: str, kind: str = "so") -> Path:
        return self.folder / "blobs" / f"{check_digest(digest)}.{kind}"

    def get(self, digest: str, kind: str = "so") -> bytes | None:
        """The blob, or None. A file with other content is removed."""
        data = None if self.refusal else _read(f"{self._place}/blobs/{check_digest(digest)}.{kind}")
        if data is not None and hashlib.sha256(data).hexdigest() != digest:
            with contextlib.suppress(OSError):  # in a folder that is read alone it stays, and is absent all the same
                self.path(digest, kind).unlink(missing_ok=True)
            return None
        return data

    def put(self, digest: str, data: bytes, kind: str = "so") -> Path:
        """Keep `data`, and return its path. Raises `DigestMismatch` and keeps nothing when it is not `digest`, and
        `UsageError` where the folder cannot be written."""
        path = self.path(digest, kind)
        verify(data, digest, f"blob {digest[:12]}…")
        if self.refusal:
            raise UsageError(self.refusal)
        if self.get(digest, kind) is None:
            try:
                self._make_folder()
                _replace(path, data)
            except OSError as error:
                raise UsageError(
                    f"the cache {self.folder} cannot be written ({error.strerror}); name another folder with "
                    "cache_dir=… or CUKILN_CACHE"
                ) from error
            self._note_write()
        return path

    def keep(self, digest: str, data: bytes, kind: str = "so") -> Path | None:
        """As `put`, but None where the folder cannot be written or is not used, which is said once."""
        try:
            return self.put(digest, data, kind)
        except UsageError as error:
            _say_once(str(error))
            return None

    def answer(self, request: str) -> CachedAnswer | None:
        """What is kept of the answer to the request with this digest."""
        data = None if self.refusal else _read(f"{self._place}/answers/{check_digest(request)}.json")
        if data is None:
            return None
        try:
            return _ANSWER.validate_json(data)
        except ValidationError:  # torn by a power cut, or of another release
            return None

    def keep_answer(self, request: str, answer: CachedAnswer, record: bytes | None = None) -> None:
        """Keep the answer, and the bytes of its record where they are new. A cache that cannot be written keeps
        nothing: the answer is there all the same."""
        if self.refusal:
            return
        try:
            self._make_folder()
            if record is not None and not _is_of_size(path := self.path(answer.record, RECORD), len(record)):
                _replace(path, record)
            _replace(self._answer_path(request), json.dumps(asdict(answer)).encode())
        except OSError:
            return
        self._note_write()

    def drop_answer(self, request: str) -> None:
        if self.refusal:
            return
        try:
            self._answer_path(request).unlink(missing_ok=True)
        except OSError:
            return

    def _make_folder(self) -> None:
        """Where it is not there: for this user alone, whatever the umask."""
        if not self._is_checked:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _answer_path(self, request: str) -> Path:
        return self.folder / "answers" / f"{check_digest(request)}.json"

    def answers(self) -> list[CachedAnswer]:
        """All answers that are kept."""
        of_answers = [path for path, _ in self._files() if path.parent.name == "answers"]
        return [answer for path in of_answers if (answer := self.answer(path.stem)) is not None]

    def usage(self) -> Usage:
        usage = Usage()
        for path, stat in self._files():
            usage = usage.plus(path, stat.st_size)
        return usage

    def prune(self, most_bytes: int | None = None, *, unused_seconds: float = _KEPT_SECONDS) -> Usage:
        """Remove what was not used for the longest time, until at most `most_bytes` (default: the cache's own limit)
        are left; nothing that was used within `unused_seconds`. Returns what was removed."""
        limit = self.most_bytes if most_bytes is None else most_bytes
        files = sorted((_unused_seconds(stat), path, stat) for path, stat in self._files())
        left = sum(stat.st_size for _, _, stat in files)
        removed = Usage()
        for age, path, stat in reversed(files):
            if left <= limit or age < unused_seconds:
                break
            try:
                path.unlink()
            except OSError:  # another process was faster
                continue
            left -= stat.st_size
            removed = removed.plus(path, stat.st_size)
        return removed

    def verify(self) -> list[Path]:
        """Read every blob and remove those that do not have the content of their name; returns these."""
        damaged = []
        for path, _ in self._files():
            if path.parent.name == "blobs" and _is_damaged(path):
                damaged.append(path)
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        return damaged

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for room in () if self.refusal else _ROOMS:
            try:
                entries = list(os.scandir(self.folder / room))
            except OSError:
                continue
            for entry in entries:
                try:
                    if _DIGEST.fullmatch(entry.name.partition(".")[0]):
                        yield Path(entry.path), entry.stat(follow_symlinks=False)
                    elif _unused_seconds(entry.stat()) > _KEPT_SECONDS:
                        Path(entry.path).unlink(missing_ok=True)  # left by a process that was killed
                except OSError:
                    continue

    def _note_write(self) -> None:
        """Prune with the first file that a process writes and then now and again: listing the folder takes time."""
        if self._written % _PRUNE_EVERY == 0:
            self.prune()
        self._written += 1


def _unused_seconds(stat: os.stat_result) -> float:
    """Of a file of the future, without an end: its clock stood ahead, and nothing says when it was used."""
    age = time.time() - stat.st_mtime
    return age if age > -_CLOCKS_DIFFER else inf


def _say_once(warning: str) -> None:
    if warning not in _SAID:
        _SAID.add(warning)
        LOG.warning("%s", warning)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _why_not_own(folder: Path, found: os.stat_result) -> str | None:
    """Why others may have written there what would be run here; what root has written may run anyway."""
    mode = S_IMODE(found.st_mode)
    if found.st_uid not in (os.geteuid(), 0):
        why = f"it is of user {found.st_uid}, this process is of user {os.geteuid()}"
    elif mode & (S_IWGRP | S_IWOTH):
        why = f"others may write it (mode {mode:04o}); empty it and `chmod go-w` it"
    else:
        return None
    return f"the cache {folder} is not used: {why}; or name another folder with cache_dir=… or CUKILN_CACHE"


def _is_damaged(path: Path) -> bool:
    """A file that another process removes meanwhile, or removes and writes again, is not damaged."""
    for _ in range(2):
        data = _read(path)
        if data is not None:
            return hashlib.sha256(data).hexdigest() != path.stem
        if not os.path.lexists(path):
            return False
    return True


def _is_of_size(path: Path, size: int) -> bool:
    """Whether a file with so many bytes is there; one with other content is removed when it is read."""
    stat = _stat(path)
    return stat is not None and S_ISREG(stat.st_mode) and stat.st_size == size


def _replace(path: Path, data: bytes) -> None:
    """Write the file in the place of whatever is there."""
    try:
        write_atomically(path, data, durable=False)
    except IsADirectoryError:
        shutil.rmtree(path)
        write_atomically(path, data, durable=False)


def _read(path: str | Path) -> bytes | None:
    """The file's content; None where there is none that the cache may have. Its time says when it was last used."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # no pipe is waited for
    except OSError:
        return None
    try:
        status = os.fstat(file)
        if not S_ISREG(status.st_mode) or status.st_size > LARGEST_BLOB:
            return None
        data = os.read(file, status.st_size)
    except OSError:
        return None
    finally:
        os.close(file)
    if _unused_seconds(status) > _TOUCHED_SECONDS:
        with contextlib.suppress(OSError):  # of another user
            os.utime(path)
    return data
