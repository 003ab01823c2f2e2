"""Libraries in a temporary folder of this process, where the cache cannot have them; removed when it ends."""

import atexit
import os
import shutil
import tempfile
import threading
from pathlib import Path

from cukiln.errors import UsageError
from cukiln.forks import renew_after_fork
from cukiln.local_cache import verify


class PrivateCopies:
    """`put` is that of a cache. Threads may share it; a child of a fork has a folder of its own."""

    def __init__(self) -> None:
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None

    def put(self, digest: str, data: bytes) -> Path:
        """Write the library and return its path. Raises `DigestMismatch` and `UsageError`."""
        verify(data, digest, f"blob {digest[:12]}…")
        try:
            with self._lock:
                if self._folder is None:
                    self._folder = Path(tempfile.mkdtemp(prefix="cukiln-"))
                    atexit.register(_remove, self._folder, os.getpid())
                path = self._folder / f"{digest}.so"
                if not path.exists():  # it may be loaded from there
                    path.write_bytes(data)
                return path
        except OSError as error:
            raise UsageError(
                f"the library {digest[:12]}… can be written neither to the cache nor to a temporary folder "
                f"({error.strerror}); name a folder with cache_dir=… or CUKILN_CACHE, or with TMPDIR"
            ) from error


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a child that ends leaves its parent's
        shutil.rmtree(folder, ignore_errors=True)


COPIES = PrivateCopies()
