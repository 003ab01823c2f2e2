"""The one interface to the object store: durable puts, reads, deletes, listings by path.

obstore does the work. Its local store neither syncs what it writes nor removes what a crash leaves behind (it stages
as `name#1` beside the target, then renames), so `LocalObjects` syncs file and folder itself.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import LocalStore, ObjectStore, from_url

from storage.errors import BlobsAway, SettingsError

RETRIES: Any = {"max_retries": 5, "retry_timeout": timedelta(seconds=20)}
"""Of a request to a remote store. obstore's own take up to three minutes."""
NO_BUCKET, REFUSED = "there is no such bucket", "its credentials are refused"
REASONS = {
    "NoSuchBucket": NO_BUCKET,  # S3
    "ContainerNotFound": NO_BUCKET,  # Azure
    "bucket does not exist": NO_BUCKET,  # Google Cloud Storage
    "403 Forbidden": REFUSED,
    "401 Unauthorized": REFUSED,
}
"""By phrases of obstore's error, which is of one kind for all of them."""
LONGEST_REASON = 600
_OF_A_CALL = re.compile(r"Error performing .*? - |\S*(?:://|sha256/)\S*")


@dataclass(frozen=True)
class StoredObject:
    path: str
    size: int
    modified_at: float

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rsplit("/", 1)[-1]


def open_objects(url: str, prefix: str) -> "RemoteObjects":
    """The store behind a `file://`, `s3://`, `gs://`, `az://` or `memory://` URL, prepared for paths `prefix/xx/…`.
    Raises SettingsError."""
    parts = urlsplit(url)
    try:
        if parts.scheme == "file":
            return LocalObjects(Path(unquote(parts.path)), prefix)
        return RemoteObjects(from_url(url, retry_config=RETRIES), url)
    except (OSError, BaseError) as error:
        raise _unusable(url, _reason(error)) from error


def _unusable(url: str, why: str) -> SettingsError:
    return SettingsError(
        f"the blob store {url} cannot be used ({why}): name one that can be written in CUKILN_BLOBS_URL "
        "(unset: blobs in CUKILN_DATA)"
    )


@contextmanager
def answered(place: object, *, may_be_missing: bool = False) -> Iterator[None]:
    """Raises BlobsAway where the store did not do what it was asked, whatever its kind, in words without addresses,
    digests and durations: the same for each call that fails so. With `may_be_missing` a missing object ends the block,
    which a missing bucket does not."""
    try:
        yield
    except (BaseError, PermissionError, FileNotFoundError) as error:  # a full or read-only disk has no kind of its own
        why = _reason(error)
        if may_be_missing and isinstance(error, NotFoundError | FileNotFoundError) and why != NO_BUCKET:
            return
        raise BlobsAway(errno.EIO, _OF_A_CALL.sub("", why), str(place)) from error


def _reason(error: Exception) -> str:
    """One line."""
    text = str(error)
    reason = getattr(error, "strerror", None) or text.partition("\n")[0][:LONGEST_REASON]
    return next((why for phrase, why in REASONS.items() if phrase in text), reason)


class RemoteObjects:
    """A store whose `put` is durable and atomic by contract, as S3's is. Paths are relative, with `/` between parts.
    All but `require` raise BlobsAway."""

    def __init__(self, store: ObjectStore, url: str = "memory:///") -> None:
        self._store, self._url = store, url

    def require(self) -> None:
        """Raises SettingsError where nothing can be listed: no bucket of the name, wrong credentials, no answer."""
        try:
            next(iter(obstore.list(self._store, chunk_size=1)), None)
        except BaseError as error:
            raise _unusable(self._url, _reason(error)) from error

    def put(self, path: str, data: bytes) -> None:
        """Durable and complete under `path` when it returns; before that, `path` holds nothing or all of it."""
        with answered(path):
            obstore.put(self._store, path, data)

    def get(self, path: str) -> bytes | None:
        with answered(path, may_be_missing=True):
            return bytes(obstore.get(self._store, path).bytes())
        return None

    def delete(self, path: str) -> None:
        """Gone afterwards, whether it was there or not."""
        with answered(path, may_be_missing=True):
            obstore.delete(self._store, path)

    def delete_older(self, path: str, before: float) -> bool:
        """Whether it was put before that time, and is deleted. In a folder what is put at the same time stays."""
        with answered(path, may_be_missing=True):
            if obstore.head(self._store, path)["last_modified"].timestamp() < before:
                self.delete(path)
                return True
        return False

    def move(self, path: str, to: str) -> None:
        """Durable under the new path. Where there is nothing, nothing is there afterwards."""
        with answered(path, may_be_missing=True):
            obstore.rename(self._store, path, to)

    def list(self) -> Iterator[StoredObject]:
        """Everything, also what a crash has left half-written."""
        with answered(self._url):
            for page in obstore.list(self._store):
                for entry in page:
                    yield StoredObject(entry["path"], entry["size"], entry["last_modified"].timestamp())

    def local_path(self, path: str) -> Path | None:
        """The file of a path where the store is a folder of this machine."""
        return None


class LocalObjects(RemoteObjects):
    """A folder, made and synced when it is opened; a sub-folder is when the first path in it is put, so that later puts
    sync one file and one folder. A folder around it that is missing is never made: a data folder that was moved away
    may come back."""

    def __init__(self, root: Path, prefix: str) -> None:
        self.root = root
        self._synced = set[Path]()
        for folder in (root, root / prefix):
            folder.mkdir(exist_ok=True)
        for folder in (root, root.parent):
            sync(folder)
        super().__init__(LocalStore(root), root.absolute().as_uri())

    def require(self) -> None:
        """It was made, or was there."""

    def put(self, path: str, data: bytes) -> None:
        file = self.root / path
        with answered(file):
            self._make(file.parent)
            if file.is_dir():  # the only thing that a rename does not replace
                file.rename(f"{file}#folder")
            super().put(path, data)
            sync(file)
            sync(file.parent)

    def get(self, path: str) -> bytes | None:
        """None also where something stands that is no file: reading a pipe would not end."""
        with answered(self.root / path):
            return super().get(path) if (self.root / path).is_file() else None

    def list(self) -> Iterator[StoredObject]:
        # Not through obstore: its listing hides the staged files of a crash, which are what a sweep is for.
        for folder, _, names in os.walk(self.root):
            for name in names:
                file = Path(folder) / name
                with suppress(FileNotFoundError):  # staged files come and go
                    status = file.lstat()
                    yield StoredObject(str(file.relative_to(self.root)), status.st_size, status.st_mtime)

    def delete(self, path: str) -> None:
        # Staged names hold a `#`, which obstore would escape.
        with answered(self.root / path):
            (self.root / path).unlink(missing_ok=True)

    def delete_older(self, path: str, before: float) -> bool:
        # Renamed before its age is read: a put between the look and the deletion would be deleted.
        file, aside = self.root / path, self.root / f"{path}#old"
        try:
            file.rename(aside)
        except FileNotFoundError:
            return False
        old = aside.stat().st_mtime < before
        if not old:
            with suppress(FileExistsError):
                os.link(aside, file)
        aside.unlink()
        return old

    def move(self, path: str, to: str) -> None:
        target = self.root / to
        self._make(target.parent)
        with answered(target, may_be_missing=True):
            (self.root / path).rename(target)
            sync(target.parent)
            sync((self.root / path).parent)

    def local_path(self, path: str) -> Path | None:
        return self.root / path

    def _make(self, folder: Path) -> None:
        """Durable when it returns, also where another process has just made it. Raises BlobsAway where the folder
        around it is gone, or something else stands in its place."""
        if folder in self._synced and folder.is_dir():
            return
        if not folder.parent.is_dir():  # obstore would make it
            raise BlobsAway(errno.ESTALE, "the folder of the blobs is gone", str(folder.parent))
        try:
            folder.mkdir(exist_ok=True)
        except FileExistsError as error:
            raise BlobsAway(errno.EIO, "what stands here is no folder: move it away", str(folder)) from error
        sync(folder.parent)
        self._synced.add(folder)


def sync(path: Path) -> None:
    """Make a file's bytes, or a folder's entries, survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
