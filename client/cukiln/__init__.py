"""cukiln: schedules in, compiled, verified and ranked CUDA kernels out.

    import cukiln

    with cukiln.Client() as client:
        job = client.tune(
            [{"operator": "matmul", "m": 1024, "n": 768, "k": 768, "layout": "nt", "dtype": "float16"}],
            target="sm_90a",
            search={"level": 1},
        )
        record = client.kernel(job.problems[0].key)
        kernel = cukiln.load(record, client=client)

Importing this package loads nothing else: each name below is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cukiln.errors import (
    BadRequest,
    CukilnError,
    DeviceError,
    DigestMismatch,
    LibraryError,
    NotAuthorised,
    NotFound,
    NotLoadable,
    ProblemError,
    ServerFailed,
    ServerMissing,
    ServiceBusy,
    ServiceError,
    ServiceFailed,
    ServiceUnreachable,
    UnexpectedAnswer,
    UsageError,
    WaitTimeout,
)

if TYPE_CHECKING:
    from cukiln.client import Client
    from cukiln.events import Event
    from cukiln.load_kernel import Kernel, choose, load
    from cukiln.types import Job, LookupResult, Progress, WinnerRecord
    from cukiln.workspace_pool import release_workspaces

    __version__: str

_LAZY = {
    "Client": "cukiln.client",
    "Event": "cukiln.events",
    "Kernel": "cukiln.load_kernel",
    "choose": "cukiln.load_kernel",
    "load": "cukiln.load_kernel",
    "Job": "cukiln.types",
    "LookupResult": "cukiln.types",
    "Progress": "cukiln.types",
    "WinnerRecord": "cukiln.types",
    "release_workspaces": "cukiln.workspace_pool",
}

__all__ = [
    "BadRequest",
    "Client",
    "CukilnError",
    "DeviceError",
    "DigestMismatch",
    "Event",
    "Job",
    "Kernel",
    "LibraryError",
    "LookupResult",
    "NotAuthorised",
    "NotFound",
    "NotLoadable",
    "ProblemError",
    "Progress",
    "ServerFailed",
    "ServerMissing",
    "ServiceBusy",
    "ServiceError",
    "ServiceFailed",
    "ServiceUnreachable",
    "UnexpectedAnswer",
    "UsageError",
    "WaitTimeout",
    "WinnerRecord",
    "__version__",
    "choose",
    "load",
    "release_workspaces",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
    else:
        raise AttributeError(f"module 'cukiln' has no attribute {name!r}")
    globals()[name] = value
    return value


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("cukiln")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "0+checkout"


def __dir__() -> list[str]:
    return sorted(__all__)
