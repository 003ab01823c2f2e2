"""The public shapes that benchmarks use (`shapes.json`): layers of published networks, square matrices, reductions,
rows, masked activations and attention; and gradients of the convolutions among them.

`served_attention` has the attention of language models as servers call it. `source` is a file of one of SOURCES, or the
address of one that is in a pull request to it; it gives heads, their sizes, types and pages, and leaves sequences open.
The totals of ragged batches and of decoding are those of recorded calls of Llama-3.1-8B (`flashinfer_trace/workloads`
at the same commit: 36 prompts with 12,845 tokens, 64 sequences with 58,966 keys), evenly divided among sequences; all
others are ours. A definition whose sequences are equally long (`equal_lengths`), or whose pages follow one another
(`contiguous`), is dense.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

# By suffix of the name: the operator of a gradient of a convolution, and what differs. Those of filters are in fp32, as
# optimisers keep them, and in the tensors' own type, which is what cuDNN has kernels for.
GRADIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dgrad": ("conv2d_dgrad", {}),
    "wgrad": ("conv2d_wgrad", {"out_dtype": "float32"}),
    "wgrad_fp16": ("conv2d_wgrad", {"out_dtype": "float16"}),
}

SOURCES = {
    "flashinfer": "https://github.com/flashinfer-ai/flashinfer-bench/tree/ecafa9c2c62007667838226068b21ca9ff1c9183"
    " (Apache-2.0)",
    "vllm": "https://docs.vllm.ai/en/latest/api/vllm/config/cache.html (pages of 16 keys by default)",
}


@cache
def stored_sets() -> dict[str, list[dict[str, Any]]]:
    """All entries of `shapes.json` as they stand there, by set."""
    sets: dict[str, list[dict[str, Any]]] = json.loads((Path(__file__).parent / "shapes.json").read_bytes())
    return sets


@cache
def shape_sets() -> dict[str, list[dict[str, Any]]]:
    """Problems that operators compute, with their names, by set, such as `llama3_8b`."""
    return {
        name: [{field: value for field, value in entry.items() if field != "source"} for entry in entries]
        for name, entries in stored_sets().items()
    }


def begins(name: str, only: Sequence[str]) -> bool:
    """Whether the name begins as one of `only` does; every name where that is empty."""
    return not only or name.startswith(tuple(only))


def public_shape(name: str) -> dict[str, Any]:
    """The problem of that name, without it; raises KeyError."""
    problems = {problem["name"]: problem for problem in every_shape()}
    return {field: value for field, value in problems[name].items() if field != "name"}


def shapes_of(operator: str) -> list[dict[str, Any]]:
    """All problems of an operator, with their names."""
    return [problem for problem in every_shape() if problem["operator"] == operator]


@cache
def every_shape() -> list[dict[str, Any]]:
    """All problems with their names: those of `shape_sets`, then the gradients."""
    stored = [problem for problems in shape_sets().values() for problem in problems]
    derived = [
        {**problem, "operator": operator, "name": f"{problem['name']}/{suffix}", **changes}
        for suffix, (operator, changes) in GRADIENTS.items()
        for problem in stored
        if problem["operator"] == "conv2d"
    ]
    return stored + derived
