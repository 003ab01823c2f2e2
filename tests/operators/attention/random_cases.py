"""Random attention problems over the whole domain, each with one accepted schedule.

What a case is about (dtype, target, mask, layout, alignment, whether there is a cap or an lse) goes round in steps that
share no factor; the extents and the rest are chance.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

from codegen.kernel import Candidate
from codegen.operators.attention import INPUTS
from codegen.operators.attention.packing import rows_of_query
from codegen.operators.attention.problem import PAGE_SIZES, AttentionProblem
from codegen.operators.attention.seen import Seen
from codegen.operators.attention.space import BANDS, TUNABLES, side_by_side
from codegen.search.rules import Accepted
from codegen.search.schedule import Schedule
from codegen.search.space import completed
from codegen.targets import target
from tests.operators.attention.kernels import OP, attention

TARGETS = ("sm_80", "sm_90a", "sm_86")
TYPES = ("float16", "bfloat16")
MASKS = ("none", "causal", "left", "right", "both", "causal, left", "causal")
GRAINS = (8, 8, 4, 8, 2, 8, 1)  # elements that heads and strides are multiples of
GROUPS = (1, 4, 2, 8, 3, 1, 16)
LENGTHS = (1, 8, 40, 130, 260)
HEAD_DIMS = (64, 128, 16, 96, 40, 72, 192, 256)
WARPS = (1, 2, 4, 4, 8, 8, 8)  # the more, the fewer schedules there are
OF_QUERIES = [(warps, tile_q) for warps in WARPS for tile_q in (16, 32, 64, 128, 256) if tile_q % (16 * warps) == 0]
PARTS = (2, 2, 3, 4, 5, 7, 12)  # of keys, where they are split
WALKERS = (1, 1, 2, 3, 5)  # of tiles of which a batch may have one
MOST_PRODUCTS = 1_500_000
ATTEMPTS = 400


def random_cases(count: int, seed: int, lengths: str = "dense") -> list[tuple[str, Candidate]]:
    """Targets and candidates."""
    rng = random.Random(seed)
    start = rng.randrange(10_000)
    return [_case(start + number, random.Random(rng.getrandbits(64)), lengths) for number in range(count)]


def _case(number: int, rng: random.Random, lengths: str) -> tuple[str, Candidate]:
    arch = TARGETS[number // 2 % 3]
    while True:
        problem = _problem(number, rng, lengths)
        for _ in range(ATTEMPTS):
            schedule = _schedule(number, problem, rng)
            if isinstance(OP.rules(problem, schedule, target(arch)), Accepted):
                return arch, OP.candidate(problem, schedule)


def _schedule(number: int, problem: AttentionProblem, rng: random.Random) -> Schedule:
    """Without those that most often break a rule: of warps without queries, and of more heads than there are."""
    values = {tunable.name: rng.choice(tunable.allowed) for tunable in TUNABLES}
    values["band"] = rng.choice([band for band in BANDS if band < side_by_side(problem, {})])
    values["warps"], values["tile_q"] = rng.choice(OF_QUERIES)
    parts = rng.choice(PARTS) if number // 2 % 2 else 1
    walkers = rng.choice(WALKERS) if problem.ragged and parts == 1 and number % 3 == 0 else 0
    values |= {"split": "workspace" if parts > 1 else "none", "split_kv": parts, "walkers": walkers or 1}
    values |= {"walk": "longest_first", "band": 0} if walkers else {"walk": "none"}
    return completed(values, TUNABLES)


def _problem(number: int, rng: random.Random, lengths: str) -> AttentionProblem:
    grain, mask, group = GRAINS[number % 7], MASKS[number // 3 % 7], GROUPS[number // 5 % 7]
    while True:
        fields: dict[str, Any] = {
            "dtype": TYPES[number % 2], "layout": ("bshd", "bhsd")[number // 2 % 2], "batch": rng.choice((1, 1, 2, 3)),
            "seq_q": _length(rng), "seq_kv": _length(rng), "heads_kv": rng.choice((1, 1, 2)), "lse": number % 3 == 0,
            "head_dim_qk": _head_dim(rng, grain), "causal": "causal" in mask,
        }  # fmt: skip
        fields |= {"heads_q": group * fields["heads_kv"]}
        # As many as the other, or a head of its own size.
        fields["head_dim_vo"] = fields["head_dim_qk"] if rng.random() < 0.6 else _head_dim(rng, grain)
        if number % 4 == 1:
            fields["softcap"] = rng.choice((0.5, 5.0, 30.0))
        if rng.random() < 0.3:
            fields["scale"] = rng.choice((1.0, 0.3, 0.01))
        if "left" in mask or mask == "both":
            fields["window_left"] = rng.randint(0, fields["seq_kv"] + 3)
        if mask in ("right", "both"):
            fields["window_right"] = rng.randint(1, fields["seq_q"] + 3)
        if lengths != "dense":
            fields |= _uneven(lengths, fields, rng)
        problem = attention(**fields)
        products = problem.heads_q * sum(queries * keys for queries, keys in problem.sequences)
        if products * (problem.head_dim_qk + problem.head_dim_vo) <= MOST_PRODUCTS:
            return attention(**fields, **_gaps(problem, grain, rng)) if rng.random() < 0.5 else problem


def _uneven(lengths: str, fields: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A batch of up to 9 sequences, some of them empty, some with as many queries as keys."""
    batch, longest = rng.choice((1, 2, 3, 4, 5, 9)), {"q": fields["seq_q"], "kv": fields["seq_kv"]}
    own: dict[str, Any] = {"lengths": lengths, "batch": batch, "layout": "bshd"}
    if lengths == "paged":
        own["page_size"] = rng.choice(PAGE_SIZES)
    for of, most in longest.items():
        lengths_of_batch = [rng.choice((rng.randint(0, most), rng.randint(0, most), most, 1, 0)) for _ in range(batch)]
        own[f"{of}_lengths"] = lengths_of_batch if any(lengths_of_batch) else [most] * batch
    return own


def _length(rng: random.Random) -> int:
    most = rng.choice(LENGTHS)
    return rng.randint(max(1, most // 3), most)


def _head_dim(rng: random.Random, grain: int) -> int:
    head_dim = rng.choice(HEAD_DIMS)
    return head_dim if grain == 8 else max(4, head_dim - rng.choice((0, 1, 3)) * grain)


def _gaps(problem: AttentionProblem, grain: int, rng: random.Random) -> dict[str, Any]:
    """Strides of some tensors that leave gaps behind each head, each position or each matrix."""
    fields = {}
    for name in ("q", "k", "v", "out"):
        if rng.random() < 0.6:
            _, outer, inner, columns = problem.shape(name)  # type: ignore[arg-type]
            first, second, third = (rng.randint(0, 2) * grain for _ in range(3))
            step = columns + first
            middle = inner * step + second
            fields[f"{name}_strides"] = (outer * middle + third, middle, step)
    return fields


def properties(arch: str, candidate: Candidate) -> Counter[str]:
    p, t, s = candidate.problem, candidate.schedule.as_dict(), candidate.kernel.signature_dict
    assert isinstance(p, AttentionProblem)
    seen, tile_q, tile_kv = Seen.of(p), int(t["tile_q"]), int(t["tile_kv"])
    windows = (
        "both" if p.window_left is not None and p.window_right else "left" if p.window_left is not None else "none"
    )
    return Counter([
        f"target {arch}", f"dtype {p.dtype}", f"layout {p.layout}", f"window {windows}", f"align {s['align']}",
        f"align_out {s['align_out']}", f"q_in {t['q_in']}", f"stages {t['stages']}", f"warps {t['warps']}",
        "causal" if p.window_right == 0 else "not causal", "capped" if p.softcap else "not capped",
        "lse" if p.lse else "no lse", "one head of each" if p.group == 1 else "groups",
        "unlike heads" if p.head_dim_qk != p.head_dim_vo else "like heads",
        "padded heads" if p.head_dim_qk % 16 or p.head_dim_vo % 16 else "whole heads",
        "one tile of keys" if p.seq_kv <= tile_kv else "tiles of keys",
        "some queries see nothing" if seen.by(0)[0] == seen.by(0)[1] else "all queries see a key",
        "one query" if p.seq_q == 1 else "queries", "a part of a tile" if p.seq_q % tile_q else "whole tiles",
        "packed" if all(p.strides(name) == attention(**_packed(p)).strides(name) for name in INPUTS) else "gaps",
        "heads packed" if t.get("packing") else "heads apart",
        "bands" if t["band"] else "all heads side by side", "split" if "split" in t else "not split",
        *(["a split is empty"] if _empty(seen, t, rows_of_query(p, t)) else []),
        *(["split, lse"] if "split" in t and p.lse else []),
    ])  # fmt: skip


def _empty(seen: Seen, t: Mapping[str, Any], rows: int) -> bool:
    """Whether a block, with so many rows of a query, has fewer tiles of keys than there are splits."""
    tile_q, tile_kv, parts = int(t["tile_q"]), int(t["tile_kv"]), int(t.get("split_kv", 1))
    for first in range(0, seen.queries * rows, tile_q):
        (begin, _), (_, end) = seen.by(first // rows), seen.by((first + tile_q - 1) // rows)
        if -(-end // tile_kv) - begin // tile_kv < parts:
            return parts > 1
    return False


def _packed(p: AttentionProblem) -> dict[str, Any]:
    return {
        name: value for name, value in p.canonical().items() if not name.endswith("_strides") and name != "operator"
    }


def of_sequences(arch: str, candidate: Candidate) -> Counter[str]:
    """Of a batch whose sequences have lengths of their own."""
    p, tile_q = candidate.problem, int(candidate.schedule.get("tile_q"))
    assert isinstance(p, AttentionProblem)
    begins = [sum(queries for queries, _ in p.sequences[:number]) for number in range(p.batch)]
    kinds = {
        "no queries": any(queries == 0 for queries, _ in p.sequences),
        "queries without keys": any(queries and not keys for queries, keys in p.sequences),
        "fewer keys than queries": any(keys < queries for queries, keys in p.sequences),
        "a tile of several sequences": any(begin % tile_q for begin in begins),
        "tiles of a sequence": any(queries > tile_q for queries, _ in p.sequences),
        "a list": "walk" in candidate.schedule.as_dict(),
        "one sequence": p.batch == 1,
        "sequences": p.batch > 1,
        "one query each": all(queries == 1 for queries, _ in p.sequences),
        f"pages of {p.page_size}": p.page_size is not None,
        "a page in part": bool(p.page_size) and any(keys % (p.page_size or 1) for _, keys in p.sequences),
        "tiles of a page": (p.page_size or 1) > int(candidate.schedule.get("tile_kv")),
        "pages of a tile": 1 < (p.page_size or 1) < int(candidate.schedule.get("tile_kv")),
    }
    of_all = properties(arch, candidate)
    return of_all + Counter(kind for kind, has in kinds.items() if has)


# At about a third of how often it comes up.
SPREAD = {
    "target sm_80": 20, "target sm_90a": 20, "target sm_86": 20, "dtype float16": 30, "dtype bfloat16": 30,
    "layout bshd": 30, "layout bhsd": 30, "window none": 15, "window left": 8, "window both": 4, "causal": 15,
    "not causal": 15, "align 8": 12, "align 4": 4, "align 2": 4, "align 1": 4, "align_out 8": 12, "align_out 1": 4,
    "q_in registers": 15, "q_in shared": 15, "stages 1": 10, "stages 2": 5, "stages 3": 2, "warps 1": 8, "warps 2": 6,
    "warps 4": 3, "warps 8": 1, "capped": 8, "not capped": 25, "lse": 10, "no lse": 20, "groups": 20,
    "one head of each": 5, "unlike heads": 8, "like heads": 20, "padded heads": 20, "whole heads": 8,
    "one tile of keys": 10, "tiles of keys": 15, "some queries see nothing": 3, "all queries see a key": 20,
    "queries": 25, "one query": 2, "a part of a tile": 20, "gaps": 10, "packed": 15, "bands": 10,
    "all heads side by side": 3,
    "heads packed": 8, "heads apart": 20, "split": 10, "not split": 15, "a split is empty": 1, "split, lse": 3,
}  # fmt: skip

# What is not said of sequences with lengths of their own.
WITHOUT_LENGTHS = ("layout", "some queries", "all queries", "a split is empty")
SPREAD_OF_SEQUENCES = {
    **{kind: share for kind, share in SPREAD.items() if not kind.startswith(WITHOUT_LENGTHS)},
    "no queries": 15, "queries without keys": 10, "fewer keys than queries": 20, "a tile of several sequences": 15,
    "a list": 5, "tiles of a sequence": 10, "one sequence": 4, "sequences": 25, "queries": 25, "one query each": 1,
}  # fmt: skip

SPREAD_OF_PAGES = {
    **SPREAD_OF_SEQUENCES, "pages of 1": 10, "pages of 16": 10, "pages of 64": 10, "a page in part": 20,
    "tiles of a page": 3, "pages of a tile": 3,
}  # fmt: skip
