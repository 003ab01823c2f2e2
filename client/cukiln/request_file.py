"""The file that the problems of a model are written to while it runs, as a request for `cukiln tune`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cukiln.errors import UsageError


def writable(file: Path) -> Path:
    """Its whole path, which a change of the working folder leaves. Raises `UsageError` where it cannot be written: a
    model may run for hours before."""
    path = Path.cwd() / file
    try:
        path.open("a").close()
    except OSError as error:
        raise _refused(path, error) from error
    return path


def write_problems(path: Path, request: Mapping[str, Any]) -> None:
    """Raises `UsageError`."""
    try:
        path.write_text(json.dumps(request, indent=1) + "\n")
    except OSError as error:
        raise _refused(path, error) from error


def _refused(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"the problems cannot be written to {path} ({error.strerror}); name a file in a folder that is there"
    )
