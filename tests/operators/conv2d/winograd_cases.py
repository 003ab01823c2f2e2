"""Kernels and random cases of Winograd, and Winograd in NumPy."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np

from codegen.epilogue import MAX_NODES
from codegen.kernel import Candidate, Kernel
from codegen.operators import operator
from codegen.operators.conv2d.problem import Conv2dProblem
from codegen.operators.convolution.problem import AllowsWinograd
from codegen.search.rules import Accepted
from codegen.search.schedule import Schedule, Value
from codegen.search.search import Search
from codegen.targets import target
from tests.operators.conv2d.convolutions import channels_first
from tests.operators.conv2d.kernels import Kernels
from tests.operators.conv2d.random_cases import GRAINS, INPUTS, LAYOUTS, NODES, NODES_OF, TARGETS
from tests.operators.harness.declarations import Array, Fields, Inputs
from tests.support.kernels.cpu_helpers import MMA_K, SMALL_TENSOR_TILE, SMALL_TILE, TILE_K

OWN: dict[str, int | str] = {"algorithm": "winograd", "output_tile": 2, "transform_width": 2}
FUSED: dict[str, int | str] = {
    "algorithm": "winograd_fused", "output_tile": 2, "tile_m": 16, "tile_n": 16, "tile_k": 8, "thread_m": 4,
    "thread_n": 4,
}  # fmt: skip
DIVIDED = ("split", "static_k")
EACH_RUN = 6
ATTEMPTS = 300  # schedules that are looked at for one that is accepted; another problem comes after them
MOST_PRODUCTS = 400_000  # of the convolution: those of the places and their tiles are padded
FORMS = ("f2", "f4")


def tensor_schedule(dtype: str, **tunables: Any) -> dict[str, Any]:
    tile = {name: value for name, value in SMALL_TENSOR_TILE.items() if name not in DIVIDED}
    return {**OWN, **tile, "tile_k": TILE_K[dtype], "mma_k": MMA_K[dtype], **tunables}


def simt_schedule(**tunables: Any) -> dict[str, Any]:
    tile = {name: value for name, value in SMALL_TILE.items() if name not in DIVIDED}
    return {**OWN, **tile, **tunables}


def tensor(of: Kernels, words: Mapping[str, Any], **tunables: Any) -> Kernel:
    return of.kernel(words, tensor_schedule(words.get("dtype", "float16"), **tunables))


def simt(of: Kernels, words: Mapping[str, Any], **tunables: Any) -> Kernel:
    return of.kernel({"dtype": "float32", "tf32": False, **words}, simt_schedule(**tunables))


def fused(of: Kernels, words: Mapping[str, Any], **tunables: Any) -> Kernel:
    return of.kernel({"dtype": "float32", "tf32": False, **words}, {**FUSED, **tunables})


# ---- in NumPy


def matrices(outputs: int) -> tuple[Array, Array, Array]:
    """B^T, G and A^T of F(outputs, 3) from Toom and Cook's interpolation at 0, 1, -1 (and 2, -2) and infinity, scaled
    as Lavin and Gray have them: derived here, so that a wrong coefficient anywhere shows."""
    points = [Fraction(0), Fraction(1), Fraction(-1), Fraction(2), Fraction(-2)][: outputs + 1]
    inverse = [[point**power for point in points] + [Fraction(power == outputs - 1)] for power in range(outputs)]
    filters, image = [], []
    everything = _expanded(points)
    for point in points:
        weight = Fraction(1)
        for other in points:
            weight *= 1 if other == point else point - other
        filters.append([point**power / weight for power in range(3)])
        image.append([*_expanded([other for other in points if other != point]), Fraction(0)])
    filters.append([Fraction(0), Fraction(0), Fraction(1)])
    image.append(everything)
    return tuple(np.array(matrix, dtype=float) for matrix in (image, filters, inverse))  # type: ignore[return-value]


def _expanded(roots: Sequence[Fraction]) -> list[Fraction]:
    """The coefficients of the polynomial with these roots, the constant first."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted, scaled = [Fraction(0), *coefficients], [*(-root * each for each in coefficients), Fraction(0)]
        coefficients = [first + second for first, second in zip(shifted, scaled, strict=True)]
    return coefficients


def winograd(p: Conv2dProblem, inputs: Inputs, outputs: int, element: str, lost: bool = False) -> Array:
    """Transforms in fp32, rounded to `element`, sums in fp32. `lost`: a channel of the middle place of each tile."""
    image, filters, inverse = (matrix.astype(np.float32) for matrix in matrices(outputs))
    x, w = (channels_first(p, inputs[name]).astype(np.float32) for name in "xw")
    down, across = -(-p.p // outputs), -(-p.q // outputs)
    padded = np.zeros((p.n, p.c, outputs * down + 2 + p.h, outputs * across + 2 + p.w), np.float32)
    padded[:, :, p.corner[0] : p.corner[0] + p.h, p.corner[1] : p.corner[1] + p.w] = x
    out = np.zeros((p.n, p.k, outputs * down, outputs * across), np.float32)
    u = rounded(np.einsum("ir,kcrs,js->ijkc", filters, w, filters), element)
    for row in range(down):
        for column in range(across):
            top, left = outputs * row, outputs * column
            tile = padded[:, :, top : top + outputs + 2, left : left + outputs + 2]
            v = rounded(np.einsum("ir,ncrs,js->ijnc", image, tile, image), element)
            if lost:
                v[1, 1, :, 0] = 0.0
            sums = np.matmul(v, u.transpose(0, 1, 3, 2))
            out[:, :, top : top + outputs, left : left + outputs] = np.einsum(
                "ir,rsnk,js->nkij", inverse, sums, inverse
            )
    result: Array = out[:, :, : p.p, : p.q]
    return result.transpose(0, 2, 3, 1) if p.layout == "nhwc" else result


def rounded(values: Array, element: str) -> Array:
    """To nearest even of float16, bfloat16 or tf32, as float32."""
    if element == "float16":
        return values.astype(np.float16).astype(np.float32)
    dropped = {"bfloat16": 16, "tf32": 13, "float32": 0}[element]
    if not dropped:
        return values.astype(np.float32)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    half = ((bits >> dropped) & 1) + ((1 << (dropped - 1)) - 1)
    return ((bits + half.astype(np.uint32)) >> dropped << dropped).astype(np.uint32).view(np.float32)


# ---- random cases


def random_cases(count: int, seed: int, name: str = "conv2d") -> list[tuple[str, Candidate]]:
    """Targets and candidates. `name`: the operator's."""
    rng = random.Random(seed)
    start = rng.randrange(10_000)
    return [_case(name, start + number, random.Random(rng.getrandbits(64))) for number in range(count)]


def _case(name: str, number: int, rng: random.Random) -> tuple[str, Candidate]:
    while True:
        problem, arch = _problem(name, number, rng), TARGETS[number // 4 % 3]
        if arch == "sm_75" and problem.dtype == "bfloat16":
            arch = "sm_86"
        candidate = _candidate(problem, arch, number, rng)
        if candidate is not None:
            return arch, candidate


def _problem(name: str, number: int, rng: random.Random) -> AllowsWinograd:
    dtype, tf32 = INPUTS[number % 4]
    grain = GRAINS[number // 3 % 5]
    while True:
        fields: dict[str, Any] = {"n": rng.choice((1, 1, 2, 3)), "layout": LAYOUTS[(number + number // 4) % 2]}
        fields |= {name: max(grain, rng.randint(1, 48) // grain * grain) for name in "ck"}
        fields |= {"h": rng.randint(1, 22), "w": rng.randint(1, 22), "dtype": dtype, "allow_tf32": tf32}
        fields["padding"] = [[rng.randint(0, 2), rng.randint(0, 2)] for _ in "hw"]
        fields["out_dtype"] = rng.choice(("float32", "float16", "bfloat16", dtype))
        fields["epilogue"] = rng.choices(NODES_OF[name], k=NODES[number // 7 % 5])
        if any(fields["hw"[axis]] + sum(fields["padding"][axis]) < 3 for axis in (0, 1)):
            continue
        problem = operator(name).parse({"operator": name, "r": 3, "s": 3, "winograd": FORMS[number // 5 % 2], **fields})
        assert isinstance(problem, AllowsWinograd)
        if problem.n * problem.p * problem.q * problem.k * problem.taps <= MOST_PRODUCTS:
            return problem


def _candidate(problem: AllowsWinograd, arch: str, number: int, rng: random.Random) -> Candidate | None:
    """A random accepted schedule of level 2, or of a wider list."""
    op, where = operator(problem.operator), target(arch)
    space = op.space(problem, where, Search(level=2))
    ways = {part.tunables["algorithm"]: part for part in space.parts if part.size > 1}
    in_one_launch = ("winograd_fused",) in ways and number // 8 % 2 == 1
    lists: dict[str, Sequence[Value]] = dict(ways["winograd_fused" if in_one_launch else "winograd",].tunables)
    lists |= {} if in_one_launch else {"transform_width": (1, 2, 4, 8)}
    if problem.winograd == "f4" and number % 3:
        lists["output_tile"] = (4,)
    if "copy" in lists:
        lists |= {"tile_m": (16, 32, 64), "tile_n": (16, 32, 64), "stages": (1, 2, 3), "raster": (0, 1, 4)}
        lists["copy"] = ("cp_async", "registers")
    tried = (Schedule.of({name: rng.choice(values) for name, values in lists.items()}) for _ in range(ATTEMPTS))
    accepted = (schedule for schedule in tried if isinstance(op.rules(problem, schedule, where), Accepted))
    return next((op.candidate(problem, schedule) for schedule in islice(accepted, 1)), None)


def properties(arch: str, candidate: Candidate) -> Counter[str]:
    p, t, s = candidate.problem, candidate.schedule.as_dict(), candidate.kernel.signature_dict
    assert isinstance(p, AllowsWinograd)
    rows, columns = p.shape_of(p.writes)[1:3] if p.channels_last else p.shape_of(p.writes)[2:]
    counts = Counter([f"target {arch}", f"layout {p.layout}", f"inputs {p.dtype}", f"out {p.out_dtype}"])
    counts.update(f"{name} {t[name]}" for name in ("output_tile", "transform_width", "copy") if name in t)
    counts.update(f"{name} {s[name]}" for name in ("align_x", "align_out"))
    counts[f"{min(len(p.epilogue), 2)} or more nodes"] += 1
    counts["tensor cores" if "mma_k" in t else "CUDA cores"] += 1
    counts[str(t["algorithm"])] += 1
    about = {
        "all nodes": len(p.epilogue) == MAX_NODES,
        "broken tiles": rows % int(t["output_tile"]) > 0 and columns % int(t["output_tile"]) > 0,
        "padding of one side": any(before != behind for before, behind in p.padding),
        "no padding": p.padded == (p.h, p.w), "several images": p.n > 1,
    }  # fmt: skip
    counts.update(name for name, true in about.items() if true)
    return counts


SPREAD: Fields = {
    "target sm_80": 25, "target sm_90a": 25, "target sm_75": 10, "layout nhwc": 40, "layout nchw": 40,
    "inputs float32": 40, "inputs float16": 20, "inputs bfloat16": 20, "out float32": 10, "out float16": 8,
    "out bfloat16": 8, "output_tile 2": 30, "output_tile 4": 25, "transform_width 1": 30, "transform_width 2": 3,
    "transform_width 4": 2, "tensor cores": 60, "CUDA cores": 20, "winograd": 70,
    "winograd_fused": 8, "copy cp_async": 15, "copy registers": 15,
    "align_x 1": 30, "align_x 8": 2, "align_out 1": 20, "align_out 8": 2, "broken tiles": 10,
    "padding of one side": 50, "several images": 25, "0 or more nodes": 10, "1 or more nodes": 10,
    "2 or more nodes": 30, "all nodes": 10,
}  # fmt: skip
