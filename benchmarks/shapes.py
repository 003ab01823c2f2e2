"""The public shapes that benchmarks use (`shapes.json`): layers of published networks, and square matrices."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def shape_sets() -> dict[str, list[dict[str, Any]]]:
    """Problems with their names by set, such as `llama3_8b`."""
    found: dict[str, list[dict[str, Any]]] = json.loads(
        (Path(__file__).parent / "shapes.json").read_text(encoding="utf-8")
    )
    return found


def public_shape(name: str) -> dict[str, Any]:
    """The problem of that name, without it; raises KeyError."""
    problems = {problem["name"]: problem for problems in shape_sets().values() for problem in problems}
    return {field: value for field, value in problems[name].items() if field != "name"}


def shapes_of(operator: str) -> list[dict[str, Any]]:
    """All problems of an operator, with their names."""
    return [problem for problems in shape_sets().values() for problem in problems if problem["operator"] == operator]
