"""Random matmuls over rings of integers, with random schedules."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from codegen.fixed_point import bits_of
from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.operators.matmul import ring_space
from codegen.operators.matmul.limb_planes import LIMB_SPLIT
from codegen.operators.matmul.problem import MatmulProblem
from codegen.search.rules import Accepted
from codegen.search.search import Search
from codegen.search.space import completed
from codegen.targets import target
from tests.operators.harness.declarations import Fields
from tests.operators.matmul.ring_kernels import RINGS
from tests.support.kernels.random_cases import LAYOUTS, MOST, TARGETS

OP = operator("matmul")
SQUARED = {"op": "masked_activation", "mask": "bytes", "where_set": {"op": "square"}, "where_clear": {"op": "relu"}}
POLYNOMIAL = {
    "op": "masked_activation", "mask": "bytes",
    "where_set": {"op": "polynomial", "coefficients": [-0.5, 3.25, 1.0, 2.0]},
}  # fmt: skip

NUMBERS = {"align": (1, 2, 4, 1), "place": ("once", "once", "tile", "once", "product")}
F = {"int32": (0, 1, 11, 18, 31), "int64": (0, 1, 18, 40, 63)}
NODES = (
    {"op": "bias"}, {"op": "bias", "axis": "m"}, {"op": "residual"}, {"op": "relu"}, {"op": "mask"},
    {"op": "masked_activation", "where_set": {"op": "relu"}, "mask": "bytes"}, SQUARED, POLYNOMIAL,
)  # fmt: skip


def random_cases(count: int, seed: int) -> list[tuple[str, Candidate]]:
    rng = random.Random(seed)
    start = rng.randrange(10_000)
    return [_case(start + number, random.Random(rng.getrandbits(64))) for number in range(count)]


def _case(number: int, rng: random.Random) -> tuple[str, Candidate]:
    dtype, arch = list(RINGS)[number % 2], TARGETS[number // 2 % 3]
    algorithm = "imad" if arch == "sm_75" or number % 5 < 2 else "limbs"
    place = NUMBERS["place"][number // 2 % 5]
    if place == "product" and algorithm == "limbs":
        place = "tile"
    tunables = ring_space.IMAD if algorithm == "imad" else (*ring_space.LIMBS, LIMB_SPLIT)
    while True:
        problem = _random_problem(number, dtype, place, rng)
        lists = dict(OP.space(problem, target(arch), Search(tunables={"algorithm": [algorithm]})).parts[0].tunables)
        wide = OP.space(problem, target(arch), Search(level=2)).parts[algorithm == "limbs"].tunables
        lists |= {name: wide[name] for name in wide if name not in ("split", "split_k")}
        split = rng.choice(("none", "workspace"))
        lists |= {"truncate": (place,), "split": (split,), "split_k": (2, 3, 5) if split == "workspace" else (1,)}
        if algorithm == "limbs" and rng.random() < 0.3:
            lists |= {"copy": ("registers",), "stages": (1, 2)}
        for _ in range(300):
            schedule = completed({name: rng.choice(values) for name, values in lists.items()}, tunables)
            if isinstance(OP.rules(problem, schedule, target(arch)), Accepted):
                return arch, OP.candidate(problem, schedule)


def _random_problem(number: int, dtype: str, place: str, rng: random.Random) -> MatmulProblem:
    grain = NUMBERS["align"][number // 3 % 4]

    def extent() -> int:
        return max(grain, rng.randint(1, rng.choice((20, 80, MOST))) // grain * grain)

    m, n, k = extent(), extent(), extent()
    f = F[dtype][number // 7 % 5]
    fields: dict[str, Any] = {
        "m": m, "n": n, "k": k, "batch": rng.choice((1, 1, 2)), "dtype": dtype, "layout": LAYOUTS[number // 4 % 4],
        "fraction_bits": f, "rounding": rng.choice(("floor", "nearest")),
        "epilogue": rng.sample(NODES, k=rng.choice((0, 0, 1, 2))),
    }  # fmt: skip
    if f not in (11, 18, 40):  # its coefficients are no numbers of the ring
        fields["epilogue"] = [node for node in fields["epilogue"] if node != POLYNOMIAL]
    if place != "once":
        fields |= {"fraction_bits": min(f or 4, bits_of(dtype) - 2), "truncation": {"policy": "tolerance", "ulp": k}}
        fields["epilogue"] = [node for node in fields["epilogue"] if node not in (SQUARED, POLYNOMIAL)]
    if rng.random() < 0.4:
        columns = m if fields["layout"][0] == "t" else k
        fields["lda"] = columns + grain * rng.randint(1, 3)
    if rng.random() < 0.3:
        fields["ldc"] = n + grain * rng.randint(1, 3)
    if fields["batch"] > 1 and rng.random() < 0.4:
        fields[rng.choice(("stride_a", "stride_b"))] = 0
    return ring_problem(fields)


def ring_problem(fields: Fields) -> MatmulProblem:
    problem = OP.parse({"operator": "matmul", "m": 64, "n": 64, "k": 64, "dtype": "int64", **fields})
    assert isinstance(problem, MatmulProblem)
    return problem


def properties(arch: str, candidate: Candidate) -> Counter[str]:
    p, t = candidate.problem, candidate.schedule.as_dict()
    assert isinstance(p, MatmulProblem)
    counts = Counter([f"target {arch}", f"layout {p.layout}", str(p.dtype), str(t["algorithm"]), f"split {t['split']}"])
    counts.update(
        [f"{t['algorithm']}, truncated by {t['truncate']}", f"{p.rounding}, {min(p.fraction_bits, 2)} bits or more"]
    )
    counts.update(["an epilogue" if p.epilogue else "no epilogue", "batch" if p.batch > 1 else "one matrix"])
    counts.update(f"align_{name} {candidate.kernel.signature_dict[f'align_{name}']}" for name in "abc")
    if t["algorithm"] == "limbs":
        counts[f"copy {t['copy']}"] += 1
        counts[f"split {t.get('limb_split', 'fused')}"] += 1
    return counts


SPREAD = {
    "target sm_75": 20, "target sm_80": 20, "target sm_90a": 20, "layout nn": 15, "layout nt": 15, "layout tn": 15,
    "layout tt": 15, "int32": 40, "int64": 40, "imad": 30, "limbs": 25, "split none": 20, "split workspace": 10,
    "imad, truncated by once": 10, "imad, truncated by tile": 2, "imad, truncated by product": 2,
    "limbs, truncated by once": 10, "limbs, truncated by tile": 4, "floor, 2 bits or more": 15,
    "nearest, 2 bits or more": 15, "an epilogue": 20, "no epilogue": 20, "batch": 15, "one matrix": 30,
    "align_a 1": 10, "align_b 1": 10, "align_c 1": 10, "align_a 2": 5, "align_b 4": 3, "align_c 2": 5,
    "copy cp_async": 10, "copy registers": 4, "split fused": 10, "split ahead": 5,
}  # fmt: skip
