"""What was brought back from elsewhere and no service takes: what it holds, why, and what becomes of it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cukiln.counted import counted

REPORT_FILE = "report.json"  # of what was brought back
_CONFIRMED = (
    "it decides which winners are `verified: cpu` for everyone, so a person takes it over into the checkout that all "
    "processes run: `python -m tests.gpu.confirm_primitives --take {path}`, then commit codegen/device/confirmed.json"
)
_CEILINGS = "a service keeps none; `make bench-kernels` shows the results beside them (`--results {folder}`)"
_STATE = "what a later run continues from (`measure_there.py --continue-from {folder}`); the results are in it, too"
_ENDED_WELL = "exit status 0"


def not_imported(folder: Path) -> list[str]:
    """A line for each such file of the folder, and for each part of the run that did not end well."""
    lines = []
    for name, (described, why) in _FILES.items():
        path = folder / name
        if path.is_file():
            words = why.format(path=path, folder=folder)
            lines.append(f"{name} is not imported{_described(path, described)}: {words}")
    return lines + _parts(folder / REPORT_FILE)


def _described(path: Path, described: Callable[[Mapping[str, Any]], str] | None) -> str:
    if described is None:
        return ""
    try:
        return f" ({described(json.loads(path.read_bytes()))})"
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        return f" (and cannot be read: {type(error).__name__}: {error})"


def _confirmed(content: Mapping[str, Any]) -> str:
    failed = content.get("failed", {})
    differ = f", {len(failed)} that differ: {', '.join(sorted(failed))}" if failed else ""
    return f"{counted(len(content['primitives']), 'primitive')} confirmed by {content.get('device', '?')}{differ}"


def _parts(report: Path) -> list[str]:
    if not report.is_file():
        return []
    try:
        parts: Mapping[str, str] = json.loads(report.read_bytes()).get("parts", {})
        return [f"{name}: {words}" for name, words in parts.items() if not words.startswith(_ENDED_WELL)]
    except (ValueError, TypeError, AttributeError) as error:
        return [f"{report.name} cannot be read: {error}"]


_FILES: dict[str, tuple[Callable[[Mapping[str, Any]], str] | None, str]] = {
    "confirmed.json": (_confirmed, _CONFIRMED),
    "ceilings.json": (lambda of: f"of {of.get('device', 'a card')}, {of['uuid']}, driver {of['driver']}", _CEILINGS),
    "state.zip": (None, _STATE),
}
