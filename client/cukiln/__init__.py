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

from cukiln import errors
from cukiln.errors import *  # noqa: F403

if TYPE_CHECKING:
    from cukiln.client import AsyncClient, Client
    from cukiln.events import Event
    from cukiln.http.transport import AsyncTransport, Transport
    from cukiln.kernels.load_kernel import Kernel, choose, load
    from cukiln.kernels.workspace_pool import release_workspaces
    from cukiln.lock import Lock
    from cukiln.operations.steps import Prepared
    from cukiln.types import Job, LookedUp, Progress, WinnerRecord
    from cukiln.types.problems import Problem

    __version__: str

__all__ = ["AsyncClient", "AsyncTransport", "Client", "Event", "Job", "Kernel", "Lock", "LookedUp", "Prepared"]
__all__ += ["Problem", "Progress", "Transport", "WinnerRecord", "__version__", "choose", "load", "release_workspaces"]
__all__ += errors.__all__

_MODULES = {
    "cukiln.client": ["AsyncClient", "Client"],
    "cukiln.events": ["Event"],
    "cukiln.kernels.load_kernel": ["Kernel", "choose", "load"],
    "cukiln.lock": ["Lock"],
    "cukiln.operations.steps": ["Prepared"],
    "cukiln.http.transport": ["AsyncTransport", "Transport"],
    "cukiln.types": ["Job", "LookedUp", "Progress", "WinnerRecord"],
    "cukiln.types.problems": ["Problem"],
    "cukiln.kernels.workspace_pool": ["release_workspaces"],
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names}


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
