"""What is sent: a job request or a lookup, as bytes."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cukiln.errors import UsageError

EXPECTED_PROBLEM = 'expected an object such as {"operator": "matmul", "m": 512, "n": 512, "k": 512}'


def encode(body: Mapping[str, Any]) -> bytes:
    """JSON bytes with sorted keys; raises `UsageError` for values without a JSON form (NaN, sets, arrays, …)."""
    try:
        return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"the request cannot be written as JSON: {error}; use numbers, strings, lists and dicts"
        ) from error


def check_problems(problems: Iterable[Any], prepared: type | None = None) -> list[Any]:
    """The problems of a call, objects each, or `prepared`. Raises `UsageError`."""
    if type(problems) is not list:  # a comparison of types, which nearly all calls end with, takes little time
        if isinstance(problems, Mapping | str) or not isinstance(problems, Iterable):
            raise UsageError("problems is one problem, or none; expected a list of them: [problem]")
        problems = list(problems)
    for problem in problems:
        if type(problem) is not prepared and type(problem) is not dict and not isinstance(problem, Mapping):
            place = next(place for place, other in enumerate(problems) if other is problem)
            raise UsageError(f"problems[{place}] is {problem!r:.100}; {EXPECTED_PROBLEM}")
    return problems


def read_request(path: str, target: str | None = None) -> dict[str, Any]:
    """A job request from a file, or standard input for `-`; only its outer form is checked. `target`: for all its
    problems, whatever it says. Raises `UsageError`."""
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
    if not request["problems"]:
        raise UsageError(f"{name} has no problem: its list of problems is empty")
    return request if target is None else _for(target, request)


def _for(target: str, request: dict[str, Any]) -> dict[str, Any]:
    problems = [
        {name: value for name, value in problem.items() if name != "target"} if isinstance(problem, dict) else problem
        for problem in request["problems"]
    ]
    return {**request, "target": target, "problems": problems}
