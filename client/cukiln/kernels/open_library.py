"""Opens a kernel library: the cache's file, or where no cache can have it a copy whose file is gone once it is open."""

import tempfile
from pathlib import Path
from typing import Any

from cukiln.errors import NotLoadable, UsageError
from cukiln.local_cache import LocalCache

_OPENED: dict[str, tuple[Any, Path]] = {}  # copies by digest: a file that is written again is mapped once more


def open_library(cache: LocalCache, digest: str, data: bytes) -> tuple[Any, Path]:
    """The module of tvm-ffi, and the file that it was opened from. `data` is what has the digest. Raises `NotLoadable`
    and `UsageError`."""
    if (path := cache.keep(digest, data)) is not None:
        return _open(path), path
    if digest not in _OPENED:
        _OPENED[digest] = _open_copy(digest, data)
    return _OPENED[digest]


def _open_copy(digest: str, data: bytes) -> tuple[Any, Path]:
    try:
        # Linux keeps a file that is open, whatever becomes of its name; a network's file system may keep the folder.
        with tempfile.TemporaryDirectory(prefix="cukiln-", ignore_cleanup_errors=True) as folder:
            path = Path(folder, f"{digest}.so")
            path.write_bytes(data)
            return _open(path), path
    except OSError as error:
        raise UsageError(
            f"the library {digest[:12]}… can be written neither to the cache nor to a temporary folder "
            f"({error.strerror}); name a folder with cache_dir=… or CUKILN_CACHE, or with TMPDIR"
        ) from error


def _open(path: Path) -> Any:
    import tvm_ffi

    try:
        module = tvm_ffi.load_module(path)
        module.get_function("run")
        return module
    except (RuntimeError, AttributeError) as error:
        raise NotLoadable(
            f"{path.name} is not a kernel library that this process can load: {first_line(error)}; "
            "it must be built for this machine's processor and export `run`"
        ) from error


def first_line(error: BaseException) -> str:
    """Of what tvm-ffi says: its traceback is of its own insides."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".;") if text else type(error).__name__
