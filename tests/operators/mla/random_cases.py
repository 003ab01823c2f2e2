"""Random problems of multi-head latent attention over the whole domain, each with one accepted schedule."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from typing import Any

from codegen.kernel import Candidate
from codegen.operators.attention.problem import PAGE_SIZES
from codegen.operators.mla.problem import CACHES, TENSORS, VECTOR, MlaProblem
from codegen.operators.mla.seen import of_batch
from codegen.operators.mla.space import TUNABLES
from codegen.search.rules import Accepted
from codegen.search.space import completed
from codegen.targets import target
from tests.operators.mla.kernels import OP, mla

TARGETS = ("sm_80", "sm_90a", "sm_86")
HEADS = (1, 3, 8, 16, 16, 20, 37, 128)
LENGTHS = (1, 20, 70, 70, 150)
PARTS = (2, 2, 3, 5)  # of keys, where they are split
MOST_SCORES = 6_000
NAMES = ("tile_q", "tile_kv", "warps", "warps_vo", "stages")
EVERY = [
    dict(zip(NAMES, values, strict=True))
    for values in product(*(tuple(tunable.allowed) for tunable in TUNABLES if tunable.name in NAMES))
]


def random_cases(count: int, seed: int) -> list[tuple[str, Candidate]]:
    """Targets and candidates."""
    rng = random.Random(seed)
    start = rng.randrange(10_000)
    return [_case(start + number, random.Random(rng.getrandbits(64))) for number in range(count)]


def _case(number: int, rng: random.Random) -> tuple[str, Candidate]:
    arch = TARGETS[number // 2 % 3]
    while True:
        problem, parts = _problem(number, rng), rng.choice(PARTS) if number // 3 % 2 else 1
        for values in rng.sample(EVERY, len(EVERY)):
            own = {**values, "split": "workspace" if parts > 1 else "none", "split_kv": parts}
            schedule = completed(own, TUNABLES)
            if isinstance(OP.rules(problem, schedule, target(arch)), Accepted):
                return arch, OP.candidate(problem, schedule)


def _problem(number: int, rng: random.Random) -> MlaProblem:
    ragged = number // 4 % 2 == 1
    while True:
        batch, longest = rng.choice((1, 2, 3, 5)), {"q": rng.choice((1, 2, 9, 30)) if ragged else 1, "kv": _length(rng)}
        fields: dict[str, Any] = {
            "dtype": ("float16", "bfloat16")[number % 2], "queries": "ragged" if ragged else "one", "batch": batch,
            "seq_q": longest["q"], "seq_kv": longest["kv"], "heads_q": rng.choice(HEADS),
            "page_size": PAGE_SIZES[number % 3], "lse": number % 5 == 0, "causal": ragged and number // 5 % 2 == 0,
        }  # fmt: skip
        if rng.random() < 0.3:
            fields["scale"] = rng.choice((1.0, 0.3, 0.01))
        for of in ("q", "kv") if ragged else ("kv",):
            most = longest[of]
            lengths_of_batch = [rng.choice((rng.randint(0, most), most, 1, 0)) for _ in range(batch)]
            fields[f"{of}_lengths"] = lengths_of_batch if any(lengths_of_batch) else [most] * batch
        problem = mla(**fields)
        if problem.heads_q * sum(queries * keys for queries, keys in problem.sequences) <= MOST_SCORES:
            return mla(**fields, **_gaps(problem, rng)) if rng.random() < 0.5 else problem


def _length(rng: random.Random) -> int:
    most = rng.choice(LENGTHS)
    return rng.randint(max(1, most // 3), most)


def _gaps(problem: MlaProblem, rng: random.Random) -> dict[str, Any]:
    """Strides of some tensors that leave gaps, or put the second axis before the first."""
    fields: dict[str, Any] = {}
    for name in TENSORS:
        outer, inner, columns = problem.shape(name)
        step = columns + rng.randint(0, 2) * VECTOR
        if name not in CACHES and rng.random() < 0.4:
            fields[f"{name}_strides"] = (step, outer * step)  # heads first
        elif rng.random() < 0.6:
            fields[f"{name}_strides"] = (inner * step + rng.randint(0, 2) * VECTOR, step)
    return fields


def properties(arch: str, candidate: Candidate) -> Counter[str]:
    p, t = candidate.problem, candidate.schedule.as_dict()
    assert isinstance(p, MlaProblem)
    tile_q, tile_kv, parts = int(t["tile_q"]), int(t["tile_kv"]), int(t.get("split_kv", 1))
    packed = {f"{name}_strides": None for name in TENSORS}
    most = max(seen.most_tiles(tile_q, tile_kv * p.heads_q) for _, seen in of_batch(p))
    kinds = {
        "split": parts > 1,
        "not split": parts == 1,
        "split, lse": parts > 1 and p.lse,
        "lse": p.lse,
        "causal": p.causal,
        "no keys": any(not keys for _, keys in p.sequences),
        "no queries": any(not queries for queries, _ in p.sequences),
        "fewer keys than queries": any(keys < queries for queries, keys in p.sequences),
        "tiles of keys": most > 1,
        "one tile of keys": most <= 1,
        "tiles of a query": p.heads_q > tile_q,
        "queries of a tile": p.ragged and 2 * p.heads_q <= tile_q,
        "heads that divide no tile": bool(p.heads_q % 16),
        "gaps": any(p.strides(name) != mla(**{**p.canonical(), **packed}).strides(name) for name in TENSORS),
        "a page in part": p.page_size > 1 and any(keys % p.page_size for _, keys in p.sequences),
        "tiles of a page": p.page_size > tile_kv,
        "pages of a tile": 1 < p.page_size < tile_kv,
    }
    named = [f"{name} {t[name]}" for name in NAMES]
    return Counter([
        f"target {arch}", f"dtype {p.dtype}", f"queries {p.queries}", f"pages of {p.page_size}", *named,
        *(kind for kind, has in kinds.items() if has),
    ])  # fmt: skip


# At about a third of how often it comes up.
SPREAD = {
    "target sm_80": 20, "target sm_90a": 20, "target sm_86": 20, "dtype float16": 30, "dtype bfloat16": 30,
    "queries one": 30, "queries ragged": 30, "pages of 1": 20, "pages of 16": 20, "pages of 64": 20, "split": 10,
    "not split": 15, "split, lse": 2, "lse": 8, "causal": 8, "no keys": 15, "no queries": 5,
    "fewer keys than queries": 8, "tiles of keys": 10, "one tile of keys": 10, "tiles of a query": 5,
    "queries of a tile": 10, "heads that divide no tile": 15, "gaps": 10, "a page in part": 15, "tiles of a page": 10,
    "pages of a tile": 2, "tile_q 16": 10, "tile_q 32": 3, "tile_q 64": 1, "tile_kv 16": 8, "tile_kv 32": 4,
    "tile_kv 64": 1, "warps 2": 4, "warps 4": 4, "warps 8": 3, "warps_vo 2": 8, "warps_vo 4": 5,
    "stages 2": 10, "stages 3": 1,
}  # fmt: skip
