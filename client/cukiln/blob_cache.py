"""Downloaded blobs, kept in a folder under their SHA-256."""

import hashlib
import os
import re
import tempfile
from pathlib import Path

from cukiln.errors import DigestMismatch, UsageError

_DIGEST = re.compile(r"[0-9a-f]{64}")


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


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that is complete or absent for other processes, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:16]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class BlobCache:
    """A folder of blobs, each under `<its SHA-256>.<kind>`. Several processes may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "blobs"

    def path(self, digest: str, kind: str = "so") -> Path:
        return self.folder / f"{check_digest(digest)}.{kind}"

    def get(self, digest: str, kind: str = "so") -> bytes | None:
        """The blob, or None. A file with other content is removed."""
        path = self.path(digest, kind)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(data).hexdigest() != digest:
            path.unlink(missing_ok=True)
            return None
        return data

    def put(self, digest: str, data: bytes, kind: str = "so") -> Path:
        """Keep `data`, and return its path. Raises `DigestMismatch` and keeps nothing when it is not `digest`."""
        path = self.path(digest, kind)
        verify(data, digest, f"blob {digest[:12]}…")
        if self.get(digest, kind) is None:
            write_atomically(path, data)
        return path
