"""What this machine has to fence children in with, and seams for processes that have less of it."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from workers.processes.fence.means import Means
from workers.processes.processes import Processes


@cache
def machine() -> Means:
    """Tried once."""
    with closing(Processes()) as processes:
        return processes.means


NAMESPACES = bool(machine().namespaces)


def processes_with(root: Path, secrets: tuple[Path, ...] = (), *, own_python: bool = True, **less: Any) -> Processes:
    """As on a machine whose means are ours but for `less`. `own_python`: a program may run the tests' Python; where
    that is closed to others, none has a user of its own without namespaces."""
    fenced: type[Processes] = type("Fenced", (Processes,), {"means": replace(machine(), **less)})
    return fenced(root=root, secrets=secrets, reads=(Path(sys.base_prefix),) if own_python else ())
