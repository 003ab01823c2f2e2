"""What is sent: a job request or a lookup, as bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cukiln.errors import UsageError

Problem = Mapping[str, Any]


def job_request(
    problems: Iterable[Problem],
    *,
    target: str | None = None,
    search: Mapping[str, Any] | None = None,
    priority: str | None = None,
    budget: float | None = None,
    workspace_limit_bytes: int | None = None,
    deterministic: bool = False,
    device_class: str | None = None,
) -> dict[str, Any]:
    """The body of `POST /v1/jobs`; `budget` is in seconds. What is None is left to the service's defaults."""
    options: dict[str, Any] = {
        "target": target,
        "search": dict(search) if search is not None else None,
        "priority": priority,
        "budget": {"seconds": budget} if budget is not None else None,
        "workspace_limit_bytes": workspace_limit_bytes,
        "deterministic": deterministic or None,
        "device_class": device_class,
    }
    request = {name: value for name, value in options.items() if value is not None}
    request["problems"] = [dict(problem) for problem in problems]
    return request


def encode(body: Mapping[str, Any]) -> bytes:
    """JSON bytes with sorted keys; raises `UsageError` for what JSON cannot say (NaN, sets, arrays, …)."""
    try:
        return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"the request cannot be written as JSON: {error}; use numbers, strings, lists and dicts"
        ) from error


def read_request(path: str) -> dict[str, Any]:
    """Read a job request from a file, or from standard input for `-`. Only its outer form is checked here: what a
    problem may hold, the service says. Raises `UsageError`."""
    import sys

    name = "standard input" if path == "-" else path
    try:
        text = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        request = json.loads(text.decode())
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{name} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from error
    except (RecursionError, ValueError) as error:
        raise UsageError(f"{name} cannot be read as JSON: {error}") from error
    if not isinstance(request, dict) or not isinstance(request.get("problems"), list):
        raise UsageError(
            f'{name} is not a job request: expected a JSON object such as {{"target": "sm_90a", "problems": [{{…}}]}}; '
            "examples/quickstart.json is one"
        )
    return request
