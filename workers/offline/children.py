"""Where a run without a service starts its children, and what their own kernels compile to: by the same variables as a
service, which each part of a run inherits."""

import os
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from workers.processes.processes import ProcessError, Processes

PID_NAMESPACES, CUPY_CACHE = "CUKILN_PID_NAMESPACES", "CUPY_CACHE_DIR"


def own_processes(*, namespaces: bool = True) -> Processes:
    """`namespaces`: false leaves PID namespaces out, as the variable does. Raises ProcessError where that is no
    choice."""
    return Processes(namespaces=namespaces and allows_namespaces())


def allows_namespaces() -> bool:
    """By the variable. Raises ProcessError where it is no choice."""
    # Not by the settings, whose package is not on every machine with a GPU.
    text = os.environ.get(PID_NAMESPACES) or "true"
    try:
        return TypeAdapter(bool).validate_python(text.strip())
    except ValidationError as error:
        raise ProcessError(f"{PID_NAMESPACES} is {text!r}; it must be true or false") from error


def compiled_folder(out: Path) -> Path:
    """What CuPy compiles to: one folder for all parts of a run, else one in `out`."""
    return Path(os.environ.get(CUPY_CACHE) or out / "cache").absolute()
