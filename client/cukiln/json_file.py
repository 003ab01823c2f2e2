"""JSON files that a user hands over: whatever is wrong with one is an error that names it."""

import json
from pathlib import Path
from typing import Any

from cukiln.errors import UsageError


def read_json_object(path: Path, what: str, remedy: str) -> dict[str, Any]:
    """The object in a file. `what`: such as "lock file"; `remedy`: what to do where it cannot be used. Raises
    `UsageError`."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path} ({error.strerror}); {remedy}") from error
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:  # damaged, cut short, no UTF-8, nested without an end
        raise UsageError(f"{path} is not a {what}, or damaged ({error}); {remedy}") from error
    if not isinstance(read, dict):
        raise UsageError(f"{path} is not a {what}: it holds no JSON object; {remedy}")
    return read
