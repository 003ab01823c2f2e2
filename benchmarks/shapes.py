"""The public shapes that benchmarks use (`shapes.json`): layers of published networks, square matrices, reductions,
rows and masked activations; and gradients of the convolutions among them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

# By operator: how its gradient of a convolution is named after it, and what differs. Gradients of filters are in fp32.
GRADIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "conv2d_dgrad": ("dgrad", {}),
    "conv2d_wgrad": ("wgrad", {"out_dtype": "float32"}),
}


@cache
def shape_sets() -> dict[str, list[dict[str, Any]]]:
    """Problems with their names by set, such as `llama3_8b`."""
    sets: dict[str, list[dict[str, Any]]] = json.loads((Path(__file__).parent / "shapes.json").read_bytes())
    return sets


def public_shape(name: str) -> dict[str, Any]:
    """The problem of that name, without it; raises KeyError."""
    problems = {problem["name"]: problem for problem in every_shape()}
    return {field: value for field, value in problems[name].items() if field != "name"}


def shapes_of(operator: str) -> list[dict[str, Any]]:
    """All problems of an operator, with their names."""
    return [problem for problem in every_shape() if problem["operator"] == operator]


@cache
def every_shape() -> list[dict[str, Any]]:
    """All problems with their names: those of `shapes.json`, then the gradients."""
    stored = [problem for problems in shape_sets().values() for problem in problems]
    derived = [
        {**problem, "operator": operator, "name": f"{problem['name']}/{suffix}", **changes}
        for operator, (suffix, changes) in GRADIENTS.items()
        for problem in stored
        if problem["operator"] == "conv2d"
    ]
    return stored + derived
