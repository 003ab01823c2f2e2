"""Random convolutions over rings of integers, with random schedules."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count
from typing import Any

from codegen.fixed_point import bits_of, largest_error
from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.operators.convolution.problem import Convolution
from codegen.search.rules import Accepted
from codegen.search.search import Search
from codegen.search.space import completed
from codegen.targets import target
from tests.operators.conv2d.convolutions import LAYOUTS
from tests.operators.conv2d.kernels import ALIGNS, convolution
from tests.operators.conv2d.random_cases import TARGETS, random_problem
from tests.operators.conv2d.ring_schedules import RINGS, SPLIT_AHEAD

SQUARED = {"op": "masked_activation", "mask": "bytes", "where_set": {"op": "square"}, "where_clear": {"op": "relu"}}
PACKED = {"op": "masked_activation", "where_set": {"op": "relu"}}
NODES: dict[str, list[dict[str, Any]]] = {
    "conv2d": [{"op": "bias"}, {"op": "residual"}, {"op": "relu"}, {"op": "mask"}, PACKED, SQUARED],
    "conv2d_dgrad": [{"op": "residual"}, {"op": "mask"}],
    "conv2d_wgrad": [{"op": "bias"}, {"op": "residual"}, {"op": "relu"}, {"op": "mask"}],
}
WINOGRAD = ("winograd_imad", "winograd_limbs", "winograd_fused")

F = {"int32": (0, 1, 9, 18, 31), "int64": (0, 1, 18, 40, 63)}
PLACES = ("once", "once", "tile", "once", "product")
MOST_PRODUCTS = 250_000


def random_cases(number: int, seed: int, name: str) -> list[tuple[str, Candidate]]:
    rng = random.Random(seed)
    start = rng.randrange(10_000)
    return [_case(name, start + each, random.Random(rng.getrandbits(64))) for each in range(number)]


def _case(name: str, number: int, rng: random.Random) -> tuple[str, Candidate]:
    if number % 4 == 3 and name != "conv2d_wgrad":
        return _winograd_case(name, number, rng)
    op, dtype, arch = operator(name), list(RINGS)[number % 2], TARGETS[number // 2 % 3]
    algorithm = "imad" if arch == "sm_75" or number % 5 < 2 else "limbs"
    place = PLACES[number // 2 % 5]
    place = "tile" if (place, algorithm) == ("product", "limbs") else place
    for attempt in count():
        place = "once" if attempt == 4 else place  # sums of a few products are a single tile
        p = _random_problem(name, number, dtype, place, rng)
        lists = dict(op.space(p, target(arch), Search(tunables={"algorithm": [algorithm]})).parts[0].tunables)
        wide = op.space(p, target(arch), Search(level=2)).parts[algorithm == "limbs"].tunables
        lists |= {key: wide[key] for key in wide if key not in ("split", "split_k")}
        split = rng.choice(("none", "workspace"))
        lists |= {"truncate": (place,), "split": (split,), "split_k": (2, 3) if split == "workspace" else (1,)}
        if algorithm == "limbs":
            lists |= {"tile_m": (16, 32, 64), "tile_n": (16, 32, 64)}
            if rng.random() < 0.3:
                lists |= {"copy": ("registers",), "stages": (1, 2)}
        for _ in range(300):
            chosen = {key: rng.choice(values) for key, values in lists.items()}
            schedule = completed(chosen, [t for t in op.tunables if t.name in lists])
            if isinstance(op.rules(p, schedule, target(arch)), Accepted):
                return arch, op.candidate(p, schedule)
    raise AssertionError("no schedule")


def _winograd_case(name: str, number: int, rng: random.Random) -> tuple[str, Candidate]:
    op, dtype, arch = operator(name), list(RINGS)[number // 4 % 2], TARGETS[number // 8 % 3]
    way = WINOGRAD[number // 24 % 3]
    way = "winograd_imad" if (way, arch) == ("winograd_limbs", "sm_75") else way
    while True:
        sides = range(5) if name == "conv2d" else range(3)  # a gradient of wider ones has negative padding
        (top, bottom), (left, right) = ((rng.choice(sides), rng.choice(sides)) for _ in "hw")
        h, w = (rng.randint(max(1, 3 - around), 9) for around in (top + bottom, left + right))
        fields: dict[str, Any] = {
            "n": rng.randint(1, 2), "h": h, "w": w, "c": rng.randint(1, 40),
            "k": rng.randint(1, 40), "padding": [[top, bottom], [left, right]],
            "layout": rng.choice(LAYOUTS), "dtype": dtype, "fraction_bits": F[dtype][number // 3 % 5],
            "rounding": rng.choice(("floor", "nearest")), "epilogue": rng.sample(NODES[name], k=rng.choice((0, 1, 2))),
        }  # fmt: skip
        p = convolution(name, **fields)
        parts = op.space(p, target(arch), Search(level=2)).parts
        lists = next(dict(part.tunables) for part in parts if part.tunables.get("algorithm") == (way,))
        if way == "winograd_limbs":
            lists["limb_split"] = (("fused", "ahead")[number // 8 % 2],)
        for _ in range(300):
            chosen = {key: rng.choice(values) for key, values in lists.items()}
            schedule = completed(chosen, [t for t in op.tunables if t.name in lists])
            if isinstance(op.rules(p, schedule, target(arch)), Accepted):
                return arch, op.candidate(p, schedule)


def _random_problem(name: str, number: int, dtype: str, place: str, rng: random.Random) -> Convolution:
    """A random convolution on floats, over the ring."""
    while True:
        p = random_problem(name, number, rng)
        if p.n * max(p.h * p.w * p.c * p.k, p.p * p.q * p.k * p.taps) <= MOST_PRODUCTS:
            break
    nodes = rng.sample(NODES[name], k=min(rng.choice((0, 0, 1, 2, 3)), len(NODES[name])))
    bits = F[dtype][number // 7 % 5]
    fields: dict[str, Any] = {
        **p.canonical(), "dtype": dtype, "acc_dtype": dtype, "out_dtype": dtype, "allow_tf32": False,
        "fraction_bits": bits, "rounding": rng.choice(("floor", "nearest")), "epilogue": nodes,
    }  # fmt: skip
    if place != "once":
        policy = {"policy": "tolerance", "ulp": 2**31 - 1}
        fields |= {"fraction_bits": min(bits or 4, bits_of(dtype) - 2), "truncation": policy}
        fields["epilogue"] = [node for node in nodes if node != SQUARED]
    problem = operator(name).parse(fields)
    assert isinstance(problem, Convolution)
    if place == "once":
        return problem
    k = operator(name).product(problem).k  # type: ignore[attr-defined]
    error = largest_error(k, problem.rounding or "floor")
    tight = operator(name).parse({**fields, "truncation": {"policy": "tolerance", "ulp": max(1, error)}})
    assert isinstance(tight, Convolution)
    return tight if k > 8 else _random_problem(name, number, dtype, place, rng)


def properties(arch: str, candidate: Candidate) -> Counter[str]:
    p, t = candidate.problem, candidate.schedule.as_dict()
    assert isinstance(p, Convolution)
    counts = Counter([f"target {arch}", f"layout {p.layout}", str(p.dtype), str(t["algorithm"])])
    counts[f"split {t.get('split')}"] += 1
    if "output_tile" in t:
        counts[f"F({t['output_tile']})"] += 1
    if t["algorithm"] == "limbs" and p.operator in SPLIT_AHEAD:
        counts[f"split {t.get('limb_split', 'fused')}"] += 1
    if t["algorithm"] == "winograd_limbs":
        counts[f"limbs split {t.get('limb_split', 'fused')}"] += 1
    counts.update([f"{t['algorithm']}, truncated by {t['truncate']}", f"{p.rounding}, {min(p.fraction_bits, 2)} bits"])
    counts.update(f"align {candidate.kernel.signature_dict[align]}" for align in ALIGNS[p.operator])
    counts["an epilogue" if p.epilogue else "no epilogue"] += 1
    counts["stride" if max(p.stride) > 1 else "no stride"] += 1
    counts["dilation" if max(p.dilation) > 1 else "no dilation"] += 1
    counts["groups" if p.groups > 1 else "one group"] += 1
    return counts


SPREAD = {
    "target sm_75": 20, "target sm_80": 20, "target sm_90a": 20, "layout nhwc": 30, "layout nchw": 30, "int32": 35,
    "int64": 35, "imad": 20, "limbs": 18, "split none": 15, "split workspace": 3, "imad, truncated by once": 8,
    "imad, truncated by tile": 1, "imad, truncated by product": 1, "limbs, truncated by once": 8,
    "limbs, truncated by tile": 2, "floor, 2 bits": 15, "nearest, 2 bits": 15, "an epilogue": 20, "no epilogue": 15,
    "stride": 10, "no stride": 15, "dilation": 8, "no dilation": 15, "groups": 10, "one group": 25, "align 1": 40,
    "align 2": 8, "align 4": 5,
}  # fmt: skip
SPREAD_OF_WINOGRAD = {
    "winograd_imad": 3, "winograd_limbs": 3, "winograd_fused": 4, "F(2)": 5, "F(4)": 4, "limbs split fused": 1,
    "limbs split ahead": 1,
}  # fmt: skip
