"""Reduced test problems: they have the kernel's own signature, reach its corners, and are cheap enough for a CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.alignment import classes, needs_cuda_cores
from codegen.operators import operator
from codegen.operators.matmul.kernel_family import aligns
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.reduced import MANY_BUDGET, reduced_problems
from tests.support.fixtures.codegen import EVERY_NODE, matmul

OP = operator("matmul")
LAYOUTS = ("nn", "nt", "tn", "tt")
STRUCTURES = [node.structure for node in matmul(epilogue=EVERY_NODE[:7]).epilogue]
STRUCTURES += [node.structure for node in matmul(epilogue=EVERY_NODE[7:]).epilogue]
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
# Types of A and B, of out, and whether tf32 is allowed.
TYPES = [
    ("float32", "float32", False), ("float32", "float16", False), ("float32", "float32", True),
    ("float16", "float16", False), ("bfloat16", "float32", False), ("float16", "bfloat16", False),
    ("int8", "int32", False), ("int8", "float16", False), ("int8", "float32", False),
]  # fmt: skip


def signature_of(
    types: tuple[str, str, bool], layout: str, align: tuple[int, int, int], epilogue: list[str] | None = None
) -> dict[str, Any]:
    dtype, out, tf32 = types
    return {
        "layout": layout, "dtype": dtype, "acc_dtype": "int32" if dtype == "int8" else "float32", "out_dtype": out,
        "allow_tf32": tf32, "epilogue": tuple(epilogue or ()),
        "align_a": align[0], "align_b": align[1], "align_c": align[2],
    }  # fmt: skip


def all_aligns(types: tuple[str, str, bool]) -> list[tuple[int, ...]]:
    quads = needs_cuda_cores(types[0], types[2])
    of_inputs, of_out = (classes(name, quads=quads) for name in types[:2])
    return list(product(of_inputs, of_inputs, of_out))


def all_tiles(types: tuple[str, str, bool], stages: tuple[int, ...]) -> list[dict[str, Any]]:
    """The tiles of the path that the types are computed on, with both numbers of stages."""
    if needs_cuda_cores(types[0], types[2]):
        depths: tuple[int, ...] = (8, 16, 32)
    else:
        depths = tuple(width // SIZES[types[0]] for width in (32, 64, 128))
    extents = (16, 32, 64, 128, 256)
    mma = {} if needs_cuda_cores(types[0], types[2]) else {"mma_k": 16}
    return [
        {"tile_m": m, "tile_n": n, "tile_k": k, "stages": count, **mma}
        for m, n, k, count in product(extents, extents, depths, stages)
    ]


def some_kernels(
    types: tuple[str, str, bool], layout: str, stages: tuple[int, ...], count: int = 150
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Signatures with tunables: sampled from all alignment classes and tiles, always the same ones."""
    everything = list(product(all_aligns(types), all_tiles(types, stages)))
    for align, tunables in random.Random(0).sample(everything, count):
        yield signature_of(types, layout, align), tunables  # type: ignore[arg-type]


def k_steps(problem: MatmulProblem, tunables: dict[str, Any]) -> int:
    return int(-(-problem.k // tunables["tile_k"]))


def cost(problem: MatmulProblem, t: dict[str, Any]) -> int:
    """Multiply-adds of whole tiles and steps."""
    tiles = -(-problem.m // t["tile_m"]) * -(-problem.n // t["tile_n"])
    return int(problem.batch * tiles * t["tile_m"] * t["tile_n"] * k_steps(problem, t) * t["tile_k"])


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reduced_problems_have_the_kernel_s_own_signature(types: tuple[str, str, bool], layout: str) -> None:
    tiles = [{"tile_m": 16, "tile_n": 16}, {"tile_m": 64, "tile_n": 32}]
    depth = 32 // SIZES[types[0]]
    ways = [(tiles[0], "none", 0), (tiles[1], "none", 96), (tiles[0], "workspace", 0)]
    for align, (tile, split, static_k) in product(all_aligns(types), ways):
        signature = signature_of(types, layout, align, ["bias.n", "mask"] if types[1] != "int32" else [])  # type: ignore[arg-type]
        tunables = {**tile, "tile_k": depth, "stages": 3, "mma_k": 16, "split": split, "static_k": static_k}
        for reduced_problem in reduced_problems(signature, tunables):
            assert OP.signature(reduced_problem) == signature


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_even_is_whole_and_tail_is_not_and_none_stands_for_another(types: tuple[str, str, bool], layout: str) -> None:
    for signature, t in some_kernels(types, layout, (1, 2, 4)):
        even, tail, smallest, many = reduced_problems(signature, t)
        tile = {name: t[f"tile_{name}"] for name in "mnk"}
        assert all(getattr(even, name) % tile[name] == 0 for name in "mnk")
        assert k_steps(even, t) > t["stages"]
        assert k_steps(tail, t) > t["stages"]
        for name in "mnk":
            whole = getattr(tail, name) % tile[name] == 0
            assert not whole or (tile[name] == 16 and signature_unit(signature, name) == 16)
        assert tail.lda > tail.stored("a")[1]
        assert tail.ldc > tail.n
        assert (smallest.m, smallest.n, smallest.k) == tuple(signature_unit(signature, name) for name in "mnk")
        assert smallest.batch == 3
        assert -(-many.m // tile["m"]) >= 2
        assert -(-many.n // tile["n"]) == 2
        assert many.m % tile["m"] == signature_unit(signature, "m") % tile["m"]
        require_distinct([tail, smallest, many])


def signature_unit(signature: dict[str, Any], extent: str) -> int:
    """What divides the extent in every problem of the signature."""
    layout = signature["layout"]
    along = {"align_a": "m" if layout[0] == "t" else "k", "align_b": "k" if layout[1] == "t" else "n", "align_c": "n"}
    return max(1, *(int(signature[name]) for name, axis in along.items() if axis == extent), 1)


def require_distinct(problems: Sequence[MatmulProblem]) -> None:
    """No extent, pitch or stride stands for another by chance."""
    for fields in (("m", "n", "k"), ("lda", "ldb", "ldc"), ("stride_a", "stride_b", "stride_c")):
        distinct = [problem for problem in problems if problem.batch > 1 or fields[0] != "stride_a"]
        for one, other in combinations(fields, 2):
            assert any(getattr(problem, one) != getattr(problem, other) for problem in distinct), (one, other, problems)


def test_a_small_tile_gets_a_full_and_a_broken_band_of_rows_and_several_matrices() -> None:
    signature = signature_of(("float16", "float16", False), "nn", (8, 8, 8))
    t = {"tile_m": 32, "tile_n": 32, "tile_k": 16, "stages": 3, "mma_k": 16}
    _, tail, _, many = reduced_problems(signature, t)
    assert (many.batch, -(-many.m // 32), -(-many.n // 32)) == (2, 5, 2)
    assert tail.batch == 2
    assert -(-tail.m // 32) == 5


@pytest.mark.parametrize("split", ["workspace", "atomic"])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_where_k_is_split_slices_are_unequal_and_of_several_steps(split: str, stages: int) -> None:
    signature = signature_of(("float16", "float32", False), "nt", (8, 8, 4))
    t = {"tile_m": 32, "tile_n": 64, "tile_k": 16, "stages": stages, "mma_k": 16, "split": split}
    even, tail, smallest, _ = reduced_problems(signature, t)
    steps = k_steps(even, t)
    two = [steps // 2, steps - steps // 2]
    assert min(two) > 1
    assert steps % 3 != 0 or k_steps(tail, t) % 3 != 0
    assert steps % 2 != 0 or k_steps(tail, t) % 2 != 0
    assert steps > stages
    assert (k_steps(smallest, t), smallest.batch) == (2, 3)


@pytest.mark.parametrize("static_k", [1, 8, 40, 768, 1024])
def test_a_kernel_compiled_for_one_k_gets_no_other(static_k: int) -> None:
    signature = signature_of(("float16", "float16", False), "nt", (1, 1, 8) if static_k == 1 else (8, 8, 8))
    for tile in (32, 256):
        t = {"tile_m": tile, "tile_n": tile, "tile_k": 32, "stages": 2, "mma_k": 16, "static_k": static_k}
        problems = reduced_problems(signature, t)
        assert {problem.k for problem in problems} == {static_k}
        assert any(problem.batch > 1 for problem in problems)
        assert sum(cost(problem, t) for problem in problems) <= max(7 * MANY_BUDGET, 3 * tile * tile * 1024)


@pytest.mark.parametrize("types", TYPES[2:], ids=str)
def test_the_problems_of_a_large_tile_stay_cheap(types: tuple[str, str, bool]) -> None:
    """At 0.4 (int8) to 1 ns per multiply-add and about six runs of each, under 0.4 s."""
    signature = signature_of(types, "nt", tuple(classes(name, quads=False)[0] for name in (types[0], *types[:2])))  # type: ignore[arg-type]
    for t in all_tiles(types, (2, 3, 4)):
        shared = t["stages"] * (t["tile_m"] + t["tile_n"]) * t["tile_k"] * SIZES[types[0]]
        if shared <= 227 * 1024 and t["tile_m"] * t["tile_n"] <= 256 * 128:
            problems = reduced_problems(signature, t)
            assert len(problems) == 4
            assert sum(cost(problem, t) for problem in problems) < 7 * MANY_BUDGET


@settings(max_examples=60)
@given(
    st.sampled_from(TYPES), st.lists(st.sampled_from(STRUCTURES), max_size=8), st.integers(0, 2**32),
    st.sampled_from([(16, 16, 32, 1), (32, 16, 64, 2), (16, 64, 128, 3)]), st.sampled_from(["none", "workspace"]),
)  # fmt: skip
def test_integer_inputs_of_reduced_problems_are_exact_whatever_the_epilogue(
    types: tuple[str, str, bool], chain: list[str], seed: int, tile: tuple[int, int, int, int], split: str
) -> None:
    quads = needs_cuda_cores(types[0], types[2])
    align = tuple(classes(name, quads=quads)[0] for name in (types[0], *types[:2]))
    signature = signature_of(types, "nt", align, [] if types[1] == "int32" else chain)  # type: ignore[arg-type]
    t = dict(zip(("tile_m", "tile_n", "tile_k", "stages"), tile, strict=True)) | {"split": split, "mma_k": 16}
    for problem in reduced_problems(signature, t):
        inputs = OP.make_inputs(problem, "integer", np.random.default_rng(seed))
        result, bound = OP.reference(problem, inputs, exact=True)
        assert np.all(bound == 0.0)
        assert np.all(np.isfinite(result))
        assert aligns(problem) == align


@pytest.mark.parametrize("chain", [["scale", "gelu"], ["bias.n", "scale", "clip"], ["scale", "cast.float16", "tanh"]])
@pytest.mark.parametrize("kind", ["integer", "normal"])
def test_a_scale_brings_int8_sums_to_where_the_other_nodes_bend(chain: list[str], kind: Any) -> None:
    signature = signature_of(("int8", "float32", False), "nt", (16, 16, 4), chain)
    t = {"tile_m": 32, "tile_n": 32, "tile_k": 32, "stages": 3, "mma_k": 32}
    for problem in reduced_problems(signature, t):
        inputs = OP.make_inputs(problem, kind, np.random.default_rng(0))
        assert max(int(np.abs(inputs[name].astype(int)).max()) for name in "ab") > 100
        sums = matmul(
            **{**problem.canonical(), "epilogue": problem.canonical()["epilogue"][: chain.index("scale") + 1]}
        )
        values, _ = OP.reference(sums, inputs)
        assert 0.3 < np.mean(np.abs(values)) < 40.0
