"""What the checks of primitives came to, kept while they run: a run that was cut off is continued behind them.

Needs Python and NumPy alone, as all that confirms primitives.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from codegen.primitives import primitive_digest
from tests.gpu import primitive_checks, primitive_inputs
from tests.gpu.primitive_checks import Check
from tests.gpu.run_primitives import KERNELS

_FOUND = "values", "worst", "failure"  # of an outcome
_LARGEST = 2**63


@dataclass(frozen=True)
class Outcome:
    """Of one check: `failure` says what is wrong, "" where nothing is; `is_verdict`: that it is so of the primitives,
    and not of this machine; `ends`: that no other can be run behind it."""

    check: Check
    values: int
    worst: float
    failure: str
    is_verdict: bool = True
    ends: bool = False


class CheckJournal:
    """In the file `path`; None keeps nothing. What counts is of the same GPU, driver and compiler, as `of` has them,
    and of the same text of the check."""

    def __init__(self, path: Path | None, of: Mapping[str, str]) -> None:
        self._path, self._of = path, dict(of)
        lines = path.read_bytes().splitlines() if path is not None and path.is_file() else []
        self._lines = {key: line for line in map(_line, lines) if isinstance(key := line.get("key"), str)}

    def ordered(self, checks: Sequence[Check]) -> list[Check]:
        """Last come those with which a run has ended before: they would keep it from the others again."""
        return sorted(checks, key=lambda check: bool(self._lines.get(self._key(check), {}).get("begun")))

    def outcome_of(self, check: Check) -> Outcome | None:
        """What an earlier run found."""
        line = self._lines.get(self._key(check), {})
        values, worst, failure = (line.get(name) for name in _FOUND)
        if type(values) is not int or not isinstance(worst, int | float) or not isinstance(failure, str):
            return None
        # A damaged line may hold numbers that nothing can be reckoned with.
        if not 0 <= values < _LARGEST or not 0 <= worst < _LARGEST:
            return None
        return Outcome(check, values, worst, failure)

    def add(self, check: Check, run: Callable[[], Outcome]) -> Outcome:
        """What it comes to now."""
        self._append({"key": self._key(check), "check": check.name, "begun": True})
        outcome = run()
        verdict = {name: getattr(outcome, name) for name in _FOUND} if outcome.is_verdict else {"begun": outcome.ends}
        self._append({"key": self._key(check), "check": check.name, **verdict})
        return outcome

    def _key(self, check: Check) -> str:
        parts = [self._of, check.name, _texts(), [primitive_digest(name) for name in check.primitives]]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        with self._path.open("ab") as file:
            file.write(b"\n" + json.dumps(line).encode() + b"\n")  # behind a line that was cut short
            file.flush()
            os.fsync(file.fileno())


@cache
def _texts() -> str:
    files = (KERNELS, *(Path(module.__file__ or "") for module in (primitive_checks, primitive_inputs)))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _line(data: bytes) -> dict[str, Any]:
    """Empty for one that a kill cut short."""
    try:
        line = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) else {}
