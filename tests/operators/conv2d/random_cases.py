"""Convolutions, forward or of a gradient, random over the whole domain, each with one accepted schedule.

What a case is about (dtype, layout, target, kind, split) goes round in steps that share no factor, so that a hundred
random cases have all of it; the extents and the rest are chance.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from codegen.epilogue import MAX_NODES
from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.operators.convolution.direct import WINDOWS
from codegen.operators.convolution.problem import Convolution
from codegen.search.rules import Accepted
from codegen.search.schedule import Schedule, Value
from codegen.search.search import Search
from codegen.search.space import SearchSpace
from codegen.targets import target

# (dtype, allow_tf32)
INPUTS = (("float16", False), ("bfloat16", False), ("float32", True), ("float32", False))
LAYOUTS = ("nhwc", "nchw")
TARGETS = ("sm_80", "sm_90a", "sm_75")
# Of the filters and the groups; "few": channels that `direct` computes. Every other depthwise one is of neighbouring
# pixels that share what they load, with each window in turn.
KINDS = ("dense", "pointwise", "grouped", "depthwise", "few", "multiplied", "dense")
SPLITS = ("none", "level 2", "workspace", "stream", "atomic")
DIVIDED = SPLITS[2:]
NODES = (0, 1, 2, 3, MAX_NODES)
GRAINS = (8, 1, 4, 2, 8)  # that channels and filters are multiples of
EVERY_NODE: list[dict[str, Any]] = [
    {"op": "bias"}, {"op": "residual"}, {"op": "mask"}, {"op": "scale", "value": 0.5}, {"op": "relu"},
    {"op": "leaky_relu", "slope": 0.25}, {"op": "clip", "lo": -8.0, "hi": 50.0}, {"op": "gelu"}, {"op": "silu"},
    {"op": "tanh"}, {"op": "sigmoid"}, {"op": "cast", "dtype": "float16"}, {"op": "cast", "dtype": "bfloat16"},
    {"op": "masked_activation", "where_set": {"op": "square"}},
    {"op": "masked_activation", "mask": "bytes", "where_set": {"op": "gelu"}, "where_clear": {"op": "relu"}},
]  # fmt: skip
# Gradients have no masked activations; that of an image neither a bias nor activations.
NODES_OF: dict[str, list[dict[str, Any]]] = {
    "conv2d": EVERY_NODE,
    "conv2d_wgrad": [node for node in EVERY_NODE if node["op"] != "masked_activation"],
    "conv2d_dgrad": [node for node in EVERY_NODE if node["op"] in ("residual", "mask", "scale", "clip", "cast")],
}
MOST_PRODUCTS = 1_500_000
ATTEMPTS = 1500


def random_cases(count: int, seed: int, name: str = "conv2d") -> list[tuple[str, Candidate]]:
    """Targets and candidates. `name`: the operator's."""
    rng = random.Random(seed)
    start = rng.randrange(10_000)
    return [_case(name, start + number, random.Random(rng.getrandbits(64))) for number in range(count)]


def _case(name: str, number: int, rng: random.Random) -> tuple[str, Candidate]:
    while True:
        problem = random_problem(name, number, rng)
        arch = TARGETS[number // 4 % 3]
        if arch == "sm_75" and problem.dtype == "bfloat16":
            arch = "sm_86"
        candidate = _candidate(problem, arch, SPLITS[number // 2 % 5], rng)
        if candidate is not None:
            return arch, candidate


def random_problem(name: str, number: int, rng: random.Random) -> Convolution:
    dtype, tf32 = INPUTS[number % 4]
    kind, grain = KINDS[number % 7], GRAINS[number // 3 % 5]
    while True:
        fields: dict[str, Any] = {"n": rng.choice((1, 1, 2, 3)), "layout": LAYOUTS[number // 2 % 2]}
        fields |= _channels(kind, grain, rng)
        fields |= {"r": 1, "s": 1} if kind == "pointwise" else {"r": rng.randint(1, 5), "s": rng.randint(1, 5)}
        fields |= {"h": rng.randint(1, 24), "w": rng.randint(1, 24), "dtype": dtype, "allow_tf32": tf32}
        if kind != "pointwise":
            for field, most in (("stride", 3), ("dilation", 3), ("padding", 4)):
                often = 0.85 if field == "stride" and name == "conv2d_dgrad" else 0.6
                fields[field] = [
                    rng.randint(field != "padding", most) if rng.random() < often else field != "padding" for _ in "hw"
                ]
                fields[field] = [int(field) for field in fields[field]]
            if rng.random() < 0.4:
                fields["padding"][rng.randrange(2)] = [rng.randint(0, 4), rng.randint(0, 4)]
        fields["out_dtype"] = rng.choice(("float32", "float16", "bfloat16", dtype))
        fields["epilogue"] = rng.choices(NODES_OF[name], k=NODES[number // 7 % 5])
        if name == "conv2d_dgrad" and SPLITS[number // 2 % 5] in DIVIDED and number // 10 % 2 == 0:
            fields["stride"] = [1, 1]  # or its sums are not divided
        if kind == "depthwise" and number // 7 % 2 == 0:
            fields |= {"layout": "nhwc", "s": WINDOWS[number // 14 % 3]}
            fields |= {name: [fields[name][0], 1] for name in ("stride", "dilation")}
        if any(_window(fields, axis) > _padded(fields, axis) for axis in (0, 1)):
            continue
        problem = operator(name).parse({"operator": name, **fields})
        assert isinstance(problem, Convolution)
        if problem.n * problem.p * problem.q * problem.k * problem.taps <= MOST_PRODUCTS:
            return problem


def _window(fields: Mapping[str, Any], axis: int) -> int:
    taps: int = fields["rs"[axis]]
    return int(fields.get("dilation", (1, 1))[axis]) * (taps - 1) + 1


def _padded(fields: Mapping[str, Any], axis: int) -> int:
    padding = fields.get("padding", (0, 0))[axis]
    return int(fields["hw"[axis]]) + (2 * padding if isinstance(padding, int) else sum(padding))


def _channels(kind: str, grain: int, rng: random.Random) -> dict[str, int]:
    """c, k and groups."""

    def extent(most: int) -> int:
        return max(grain, rng.randint(1, most) // grain * grain)

    if kind in ("depthwise", "multiplied"):
        c = max(2, extent(40))
        return {"c": c, "k": c * (rng.randint(2, 4) if kind == "multiplied" else 1), "groups": c}
    groups = rng.randint(2, 4) if kind == "grouped" else 1
    return {
        "c": groups * (rng.randint(1, 6) if kind == "few" else extent(64)),
        "k": groups * extent(64),
        "groups": groups,
    }


def _candidate(problem: Convolution, arch: str, split: str, rng: random.Random) -> Candidate | None:
    """A random accepted schedule of level 2, divided in this way where sums can be divided."""
    op, where = operator(problem.operator), target(arch)
    space = op.space(problem, where, Search(level=2))
    # The sums of a strided gradient differ in length: nothing divides them.
    divisible = problem.operator != "conv2d_dgrad" or max(problem.stride) == 1
    parts = [part for part in space.parts if part.tunables.get("epilogue") in (None, ("fused",)) and part.size > 1]
    if split in DIVIDED and divisible:
        parts = [part for part in parts if "split" in part.tunables] or parts
    part: SearchSpace = rng.choice(parts)
    lists: dict[str, Sequence[Value]] = dict(part.tunables)
    if "epilogue" in lists and problem.epilogue and (split == "none" or "split" not in lists):
        lists["epilogue"] = ("fused", "separate")
    if "split" in lists and split != "level 2" and divisible:
        split = "workspace" if split == "stream" and "stream_blocks" not in lists else split
        lists |= {"split": [split], "split_k": (2, 3, 5) if split in ("workspace", "atomic") else [1]}
        if "stream_blocks" in lists:
            lists["stream_blocks"] = (2, 3, 5, 7) if split == "stream" else [0]
    sliced = problem.operator == "conv2d" and 1 not in lists.get("split_k", (1,))
    if sliced and problem.sum_length <= min(map(int, lists["tile_k"])):
        return None  # a single step, whatever the rest
    if "window" in lists:
        lists["window"] = lists["window"][-1:]
    if "copy" in lists:
        lists |= {
            "tile_m": (16, 32, 64),
            "tile_n": (16, 32, 64),
            "stages": (1, 2, 3),
            "copy": ("cp_async", "registers"),
        }
    tried = (Schedule.of({name: rng.choice(values) for name, values in lists.items()}) for _ in range(ATTEMPTS))
    accepted = (schedule for schedule in tried if isinstance(op.rules(problem, schedule, where), Accepted))
    return next((op.candidate(problem, schedule) for schedule in islice(accepted, 1)), None)
