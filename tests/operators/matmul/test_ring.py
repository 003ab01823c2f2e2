"""Matmuls over Z/2^32 and Z/2^64: on the CUDA cores, and by limbs on tensor cores."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from codegen.fixed_point import PLACES, largest_error, truncated_numbers
from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators.matmul import ring_space
from codegen.operators.matmul.grid import k_steps
from codegen.operators.matmul.problem import MatmulProblem
from codegen.plan.verification_plan import Part
from codegen.predict.predict_uncompiled import predict_uncompiled
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.targets import target
from tests.operators.harness import declarations as declare
from tests.operators.harness.checks import add_checks
from tests.operators.harness.declarations import LEVEL_1, LEVEL_2, SM_90A, Fields, Inputs, Rejection
from tests.operators.matmul.ring_cases import OP, POLYNOMIAL, SPREAD, SQUARED, properties, random_cases, ring_problem
from tests.operators.matmul.ring_kernels import RINGS, ring_kernel
from tests.support.kernels.cpu_helpers import verify
from tests.support.kernels.random_cases import LAYOUTS
from tests.support.kernels.ring_integers import finished
from tests.support.kernels.ring_runs import UNCHAINED_K
from tests.support.run.each_run import some_each_run

TOLERANT = {"fraction_bits": 4, "truncation": {"policy": "tolerance", "ulp": 63}}
CHAIN = [{"op": "bias"}, {"op": "residual"}, {"op": "relu"}]

# ---- problems

PACKED = {
    "m": 8, "n": 16, "k": 4, "batch": 1, "layout": "nn", "allow_tf32": False, "epilogue": [],
    "lda": 4, "ldb": 16, "ldc": 16, "stride_a": 32, "stride_b": 64, "stride_c": 128,
}  # fmt: skip
INT64 = {"dtype": "int64", "acc_dtype": "int64", "out_dtype": "int64"}
ONCE = {"truncation": {"policy": "exact_once"}, "rounding": "floor"}
PROBLEMS = declare.Problems(
    refused=[
        ({"dtype": "float32", "fraction_bits": 8}, "fraction_bits", "is 8, but float32 is no fixed point: dtype int32"),
        ({"dtype": "int8", "fraction_bits": 8}, "fraction_bits", "int8 is no fixed point"),
        ({"dtype": "int32", "fraction_bits": 32}, "fraction_bits", "Z/2^32 leaves a bit: 0 to 31 are allowed"),
        ({"fraction_bits": 64}, "fraction_bits", "less than or equal to 63"),
        ({"fraction_bits": -1}, "fraction_bits", "greater than or equal to 0"),
        ({"fraction_bits": True}, "fraction_bits", "valid integer"),
        ({"fraction_bits": None}, "fraction_bits", "valid integer"),
        ({"dtype": "float16", "truncation": {"policy": "exact_once"}}, "truncation", "float16 is no fixed point"),
        ({"dtype": "float16", "rounding": "nearest"}, "rounding", "is nearest, but float16 is no fixed point"),
        ({"rounding": "up"}, "rounding", "'floor' or 'nearest'"),
        ({"truncation": {"policy": "never"}}, "truncation", "'exact_once', 'tolerance'"),
        ({"truncation": {"policy": "tolerance"}}, "truncation.tolerance.ulp", "required"),
        ({"truncation": {"policy": "tolerance", "ulp": -1}}, "truncation.tolerance.ulp", "greater than or equal to 0"),
        ({"truncation": {"policy": "tolerance", "ulp": 0.5}}, "truncation.tolerance.ulp", "valid integer"),
        ({"truncation": {"policy": "exact_once", "ulp": 1}}, "truncation.exact_once.ulp", "not permitted"),
        ({"fraction_bits": 63, "truncation": {"policy": "tolerance", "ulp": 1}}, "truncation",
         "allowed: exact_once, or at most 62 fraction bits"),
        ({"dtype": "int32", "fraction_bits": 31, "truncation": {"policy": "tolerance", "ulp": 1}}, "truncation",
         "allowed: exact_once, or at most 30 fraction bits"),
        ({"acc_dtype": "int32"}, "acc_dtype", "does not go with dtype int64; allowed: int64"),
        ({"out_dtype": "float32"}, "out_dtype", "does not go with dtype int64; allowed: int64"),
        ({"dtype": "int32", "out_dtype": "int64"}, "out_dtype", "allowed: int32"),
        ({"epilogue": [{"op": "relu"}, {"op": "gelu"}]}, "epilogue", "node 1 is gelu; Z/2^64 computes bias, mask"),
        ({"epilogue": [{"op": "scale", "value": 2.0}]}, "epilogue", "node 0 is scale"),
        (
            {"epilogue": [{"op": "masked_activation", "where_set": {"op": "relu"}, "where_clear": {"op": "gelu"}}]},
            "epilogue",
            "where_clear of node 0 is gelu; Z/2^64 computes bias, mask, relu, residual exactly, and masked_activation",
        ),
        ({**TOLERANT, "epilogue": [SQUARED]}, "epilogue", "has a square or a polynomial, which multiplies an error"),
    ],
    defaults=[
        ({"m": 8, "n": 16, "k": 4}, {**PACKED, **INT64, **ONCE, "fraction_bits": 0}),
        (
            {"m": 8, "n": 16, "k": 4, "fraction_bits": 18, "truncation": {"policy": "tolerance", "ulp": 2.0}},
            {**PACKED, **INT64, **ONCE, "fraction_bits": 18, "truncation": {"policy": "tolerance", "ulp": 2}},
        ),
    ],
    alike=[
        ({}, {"fraction_bits": 0, "rounding": "nearest", "truncation": {"policy": "tolerance", "ulp": 9}}),
        ({"fraction_bits": 8}, {"fraction_bits": 8.0, "rounding": None, "truncation": {"policy": "exact_once"}}),
    ],
    aligned=[
        ({"m": 8, "n": 16, "k": 4}, {"align_a": 2, "align_b": 2, "align_c": 2, "fraction_bits": 0}),
        ({"m": 8, "n": 15, "k": 4}, {"align_a": 2, "align_b": 1, "align_c": 1, "rounding": "floor"}),
        ({"dtype": "int32", "m": 8, "n": 16, "k": 6}, {"align_a": 2, "align_b": 4, "align_c": 4}),
    ],
    operands=[
        (
            {"m": 8, "n": 16, "k": 4, "epilogue": CHAIN},
            [
                ("a", "int64", "in", (8, 4)), ("b", "int64", "in", (4, 16)), ("bias", "int64", "in", (16,)),
                ("residual", "int64", "in", (8, 16)), ("out", "int64", "out", (8, 16)),
            ],
        ),
    ],
    unspecialised=[({"m": 8}, {"m": 16, "truncation": {"policy": "tolerance", "ulp": 3}}, [])],
    in_schema=[{"operator": "matmul", "m": 8, "n": 8, "k": 8, **TOLERANT, "dtype": "int32"}],
    out_of_schema=[{"operator": "matmul", "m": 8, "n": 8, "k": 8, "dtype": "int32", "rounding": "up"}],
)  # fmt: skip


def test_other_problems_are_keyed_without_the_fields_of_rings() -> None:
    """What was stored under their keys before there were rings is found still."""
    fields = OP.parse({"operator": "matmul", "m": 8, "n": 8, "k": 8}).canonical()
    assert fields.keys().isdisjoint({"fraction_bits", "rounding", "truncation"})
    assert "fraction_bits" not in OP.signature(OP.parse(fields))


# ---- schedules

IMAD = {t.name: t.default for t in ring_space.IMAD} | {"tile_k": 16, "padding": 4}
LIMBS = {t.name: t.default for t in ring_space.LIMBS} | {
    "algorithm": "limbs", "tile_m": 32, "tile_n": 64, "warps_m": 2, "warps_n": 4,
}  # fmt: skip
AHEAD = {"algorithm": "limbs", "limb_split": "ahead"}
CUBE = {"m": 1024, "n": 1024, "k": 1024}
FEW_TILES = {"m": 192, "n": 192, "k": 16384}
REJECTED: list[tuple[str, Fields, Fields, str, str]] = [
    ("mma", LIMBS, {}, "sm_75", "mma.sync on uint8 with k = 32 needs sm_80; the target is sm_75"),
    ("tile_k", {**LIMBS, "tile_k": 16}, {}, "sm_90a", "limbs have tiles of 32 or 64"),
    ("warp_tile", {**LIMBS, "warps_m": 4}, {}, "sm_90a", "32 rows for 4 warps"),
    ("warp_tile", {**LIMBS, "warps_n": 8}, {}, "sm_90a", "64 columns for 8 warps"),
    ("threads", {**LIMBS, "tile_m": 128, "tile_n": 128, "warps_m": 8, "warps_n": 8}, {}, "sm_90a", "2048 threads"),
    ("copy", {**LIMBS, "copy": "registers", "stages": 3}, {}, "sm_90a", "1 or 2 stages, not 3"),
    ("copy", {**LIMBS, "stages": 1}, {}, "sm_90a", "2 stages at least"),
    ("registers", {**LIMBS, "warps_m": 1}, {}, "sm_90a", "at most 255"),
    ("registers", {**LIMBS, "tile_m": 64, "warps_m": 4}, {}, "sm_90a", "512 threads of about"),
    ("shared_memory", {**LIMBS, "stages": 5}, {}, "sm_86", "122880 bytes of shared memory"),
    ("tile_m", LIMBS, {"m": 10}, "sm_90a", "tile_m = 32 is mostly padding for m = 10"),
    ("stages", {**LIMBS, "stages": 3}, {"k": 64}, "sm_90a", "3 stages for 2 steps"),
    ("chain_k", LIMBS, {"k": UNCHAINED_K + 1}, "sm_90a", "k = 16513; without carries the diagonals of Z/2^64 hold"),
    ("chain_k", {**LIMBS, "chain_k": 512}, {"dtype": "int32"}, "sm_90a", "all diagonals may wrap around"),
    ("chain_k", {**LIMBS, "chain_k": 2048}, {}, "sm_90a", "chain_k = 2048 carries nothing before k = 1024"),
    ("chain_k", {**LIMBS, "chain_k": 512, "truncate": "tile"}, TOLERANT, "sm_90a", "leave nothing to carry"),
    ("limb_split", {**LIMBS, **AHEAD, "copy": "registers"}, {}, "sm_90a", "copied by cp_async, not by copy"),
    ("truncate", {**LIMBS, "truncate": "product"}, {**TOLERANT, "k": 64}, "sm_90a", "before any is truncated"),
    ("truncate", {**LIMBS, "truncate": "tile"}, {"fraction_bits": 4}, "sm_90a", "off by up to 31 units of"),
    ("truncate", {**LIMBS, "truncate": "tile"}, {**TOLERANT, "k": 32}, "sm_90a", "has one part, as once does"),
    ("truncate", {**LIMBS, "truncate": "tile"}, {}, "sm_90a", "fraction_bits = 0 truncates nothing"),
    ("truncate", {**IMAD, "truncate": "product"}, TOLERANT, "sm_90a", "1024 truncated parts are off by up to 1023"),
    ("truncate", {**IMAD, "truncate": "tile"}, {**TOLERANT, "k": 1040}, "sm_90a", "the problem allows 63"),
    ("registers", {**IMAD, "thread_m": 8, "thread_n": 8}, {}, "sm_90a", "at most 255"),
    ("shared_memory", {**IMAD, "tile_m": 256, "tile_n": 256, "thread_m": 8, "thread_n": 8}, {"dtype": "int32"}, "sm_75",
     "66560 bytes of shared memory"),
    ("split", {**LIMBS, "split": "workspace"}, {}, "sm_90a", "with 1 slice"),
]  # fmt: skip
SEARCHES = declare.Searches(
    rejected=[
        Rejection({**CUBE, **fields}, schedule, rule, said, arch) for rule, schedule, fields, arch, said in REJECTED
    ],
    accepted=[
        (CUBE, IMAD), (CUBE, LIMBS), ({**CUBE, "k": UNCHAINED_K}, LIMBS),
        ({**CUBE, "k": UNCHAINED_K + 1}, {**LIMBS, "chain_k": 512}),
        ({**CUBE, **TOLERANT}, {**LIMBS, "truncate": "tile"}),
        ({**CUBE, **TOLERANT}, {**IMAD, "truncate": "tile"}),
        ({**CUBE, **TOLERANT, "k": 64}, {**IMAD, "truncate": "product"}),
        ({**CUBE, "dtype": "int32", "k": 10**6}, LIMBS),
    ],
    public=[
        {
            "name": f"{dtype} {m}x{n}x{k}", "operator": "matmul", "dtype": dtype, "m": m, "n": n, "k": k,
            "fraction_bits": 12,
        }
        for dtype in RINGS for m, n, k in ((1024, 1024, 1024), (64, 1024, 576), (100, 10, 512), (1, 1, 1))
    ],
    nested=[CUBE, {**CUBE, "dtype": "int32"}, {**FEW_TILES, **TOLERANT}],
    tried=[(fields, {"imad", "limbs"}) for fields in (CUBE, {"dtype": "int32"}, {"m": 1, "n": 1, "k": 1})],
    begun=[
        (arch, {"dtype": dtype, "m": m, "n": n, "k": k, "layout": layout}, "")
        for arch in ("sm_75", "sm_80", "sm_86", "sm_90a", "sm_120") for dtype in RINGS for layout in ("nn", "tt")
        for m, n, k in ((1023, 1023, 1023), (17, 5001, 40990), (1, 1, 1))
    ],
    capped=[
        ({**CUBE, "m": 100, "n": 202, "batch": 2}, {**LIMBS, "split": "workspace", "split_k": 3},
         3 * 8 * 2 * 100 * 204),
        ({**CUBE, "m": 100, "n": 202, "dtype": "int32"}, {**IMAD, "split": "workspace", "split_k": 2},
         2 * 4 * 100 * 204),
    ],
    meaningless=[
        ({**CUBE, "fraction_bits": 4, "truncation": {"policy": "tolerance", "ulp": 0}},
         {"tunables": {"truncate": ["product"]}},
         "search.tunables.truncate", "is off by up to 1023 units of the last bit at k = 1024"),
        ({**CUBE, "k": 64, "fraction_bits": 4, "truncation": {"policy": "tolerance", "ulp": 0}},
         {"tunables": {"truncate": ["tile"]}}, "search.tunables.truncate", "the problem's policy the whole sum alone"),
        ({**CUBE, "fraction_bits": 4}, {"schedules": [IMAD, {**IMAD, "truncate": "tile"}]},
         "search.schedules.1.truncate", "the problem's policy the whole sum alone; allowed: once"),
        (CUBE, {"tunables": {"truncate": ["tile"]}}, "search.tunables.truncate", "truncates nothing"),
        ({**CUBE, "k": UNCHAINED_K + 1}, {"schedules": [{"algorithm": "limbs"}]}, "search.schedules.0.chain_k",
         "hold a k of 16512, not 16513; allowed: 512, 2048, 8192, 16384"),
        ({**CUBE, "k": 20000}, {"tunables": {"chain_k": [0]}}, "search.tunables.chain_k", "hold a k of 16512"),
        ({**CUBE, "k": 20000}, {"tunables": {"algorithm": ["imad"], "chain_k": [0]}}, "search.tunables",
         "algorithm, chain_k leave nothing"),
        (CUBE, {"tunables": {"algorithm": ["wmma"]}}, "search.tunables.algorithm", "allowed: imad, limbs"),
        (CUBE, {"tunables": {"maxnreg": [64]}}, "search.tunables.maxnreg", "unknown tunable"),
        (CUBE, {"tunables": {"split": ["atomic"]}}, "search.tunables.split", "allowed: none, workspace"),
        ({**CUBE, "dtype": "float16"}, {"tunables": {"truncate": ["once"]}}, "search.tunables.truncate",
         "on tensor cores"),
    ],
)  # fmt: skip


@pytest.mark.parametrize("tunables", [
    {"chain_k": [0, 512]}, {"algorithm": ["limbs"], "truncate": ["tile"]},
    {"algorithm": ["limbs"], "truncate": ["tile"], "chain_k": [0]},
])  # fmt: skip
def test_a_long_k_is_computed_by_what_of_a_search_can(tunables: dict[str, Any]) -> None:
    long = {**CUBE, "k": 20000, "fraction_bits": 4, "truncation": {"policy": "tolerance", "ulp": 20000}}
    lowered = lower(ring_problem(long), target("sm_80"), Search.model_validate({"tunables": tunables}))
    chains = {candidate.schedule.get("chain_k") for candidate in lowered.candidates}
    assert chains == ({0} if "truncate" in tunables else {512})


def test_on_turing_only_the_cuda_cores_are_tried() -> None:
    lowered = lower(ring_problem({**CUBE}), target("sm_75"), LEVEL_1)
    assert {candidate.schedule.get("algorithm") for candidate in lowered.candidates} == {"imad"}


@pytest.mark.parametrize("dtype", RINGS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_limbs_are_predicted_faster_where_there_is_much_to_multiply(dtype: str, arch: str) -> None:
    """By the rates of the data sheets: 64 integer multiply-adds a clock, 4 for one of int64; 2,048 or more of bytes, of
    which it takes 36, and 10 for int32."""
    best: dict[object, float] = {}
    for candidate in lower(ring_problem({**CUBE, "dtype": dtype}), target(arch), LEVEL_1).candidates:
        us, algorithm = predict_uncompiled(candidate, target(arch)).us, candidate.schedule.get("algorithm")
        best[algorithm] = min(us, best.get(algorithm, us))
    assert 1.5 < best["imad"] / best["limbs"] < 5.0


def test_a_level_truncates_early_only_where_the_policy_allows_it() -> None:
    def places(fields: Fields) -> set[tuple[object, object]]:
        candidates = lower(ring_problem({"m": 64, "n": 64, **fields}), SM_90A, LEVEL_2).candidates
        return {(candidate.schedule.get("algorithm"), candidate.schedule.get("truncate")) for candidate in candidates}

    once = {("imad", "once"), ("limbs", "once")}
    assert places({"k": 1024, "fraction_bits": 4}) == once
    assert places({"k": 1024, **TOLERANT}) == once | {("imad", "tile"), ("limbs", "tile")}
    assert places({"k": 64, **TOLERANT}) == once | {("imad", "tile"), ("limbs", "tile"), ("imad", "product")}


@pytest.mark.parametrize("dtype", some_each_run(list(RINGS)))
def test_a_problem_has_no_more_candidates_at_level_2_than_may_be_asked_for(dtype: str) -> None:
    """`CUKILN_MAX_CANDIDATES_PER_PROBLEM`, also where every place of truncation is allowed."""
    loose = {"dtype": dtype, "fraction_bits": 4, "truncation": {"policy": "tolerance", "ulp": 2**31 - 1}}
    for extents in (CUBE, {"m": 128, "n": 100, "k": 512}, FEW_TILES):
        assert len(lower(ring_problem({**extents, **loose}), target("sm_80"), LEVEL_2).candidates) < 20_000


@pytest.mark.parametrize("place", PLACES)
def test_truncations_are_counted(place: str) -> None:
    """A run has those of whole tiles of 16 along k; numbers of the problem are fewer."""
    problem, schedule = ring_problem({**CUBE, **TOLERANT, "k": 100}), Schedule.of({**IMAD, "truncate": place})
    each, executed = {"once": (1, 1), "tile": (7, 7), "product": (100, 112)}[place]
    assert truncated_numbers(problem, schedule.as_dict()) == each * 1024 * 1024
    assert OP.cost(problem, schedule).truncations == executed * 1024 * 1024
    assert truncated_numbers(ring_problem({**CUBE}), schedule.as_dict()) == 0
    squared = ring_problem({**CUBE, "fraction_bits": 4, "epilogue": [SQUARED]})
    assert truncated_numbers(squared, IMAD) == 2 * 1024 * 1024
    assert (
        OP.cost(OP.parse({"operator": "matmul", **CUBE}), Schedule.of({"split": "none", "split_k": 1})).truncations == 0
    )


# ---- references


def in_python(problem: Any, inputs: Inputs) -> Any:
    a, b = (inputs[name].astype(object) for name in ("a", "b"))
    a = a.swapaxes(-1, -2) if problem.a_transposed else a
    b = b.swapaxes(-1, -2) if problem.b_transposed else b
    by_rows = any(node.op == "bias" and node.axis == "m" for node in problem.epilogue)
    return finished(problem, np.matmul(a, b), {**inputs, "bias": inputs["bias"][:, None]} if by_rows else inputs)


DEFINED: dict[str, Fields] = {
    f"{dtype} {layout} {f} {rounding}": {
        "m": 7, "n": 9, "k": 33, "batch": 2, "dtype": dtype, "layout": layout, "fraction_bits": f, "rounding": rounding,
        "epilogue": nodes,
    }
    for dtype, bits in RINGS.items()
    for layout, f, rounding, nodes in (
        ("nn", 0, "floor", []), ("nt", 1, "floor", [{"op": "bias"}]), ("tn", 18, "nearest", CHAIN),
        ("tt", bits - 1, "nearest", [{"op": "bias", "axis": "m"}, {"op": "mask"}]),
        ("nn", 12, "floor", [{"op": "relu"}]), ("tn", 7, "floor", [POLYNOMIAL]),
        ("nt", 9, "nearest", [{"op": "bias"}, SQUARED, {"op": "residual"}]),
    )
}  # fmt: skip
REFERENCES = declare.References(
    definition=in_python,
    defined=DEFINED,
    on_device=[(kind, DEFINED[name]) for kind in ("integer", "normal") for name in list(DEFINED)[::2]],
)


def test_inputs_reach_every_limb_and_both_ends() -> None:
    problem = ring_problem({"m": 64, "n": 64, "k": 64})
    a = OP.make_inputs(problem, "integer", np.random.default_rng(1))["a"]
    assert {-(2**63), 2**63 - 1, -1, 0} <= set(a.ravel().tolist())
    every_byte = a.view(np.uint8).reshape(-1, 8)
    assert all(len(set(every_byte[:, limb].tolist())) == 256 for limb in range(8))


@pytest.mark.parametrize("kind", ["integer", "normal"])
@pytest.mark.parametrize("dtype", RINGS)
@pytest.mark.parametrize("f", [1, 12, 30])
@pytest.mark.parametrize("k", [3, 5000])
def test_under_a_tolerance_no_partial_sum_of_the_inputs_wraps_around(kind: Any, dtype: str, f: int, k: int) -> None:
    problem = ring_problem({"m": 4, "n": 4, "k": k, "dtype": dtype, **TOLERANT, "fraction_bits": f})
    inputs = OP.make_inputs(problem, kind, np.random.default_rng(2))
    a, b = (np.abs(inputs[name].astype(object)) for name in ("a", "b"))
    assert 0 < np.matmul(a, b).max() < 2 ** (RINGS[dtype] - 1)


@pytest.mark.parametrize("rounding", ["floor", "nearest"])
def test_parts_are_off_by_what_the_derivation_says_and_no_more(rounding: str) -> None:
    """All sums of up to four parts of three bits, and one of the worst: the bound is reached and never passed."""
    f, values = 2, range(-4, 4)

    def shifted(x: int) -> int:
        return (x + (2 if rounding == "nearest" else 0)) >> f

    for count in (1, 2, 3, 4):
        errors = {sum(map(shifted, sums)) - shifted(sum(sums)) for sums in product(values, repeat=count)}
        low = -largest_error(count, rounding)
        assert min(errors) >= low and max(errors) <= (0 if rounding == "floor" else -low)
        assert low in errors or -low in errors


# ---- kernels on the CPU

EPILOGUES: tuple[tuple[str, ...], ...] = (
    (), ("bias.n", "relu"), ("bias.m", "residual"), ("mask",), ("residual", "masked_activation.bits.relu.identity"),
    ("masked_activation.bytes.identity.relu",), ("bias.n", "masked_activation.bits.polynomial2.square"),
)  # fmt: skip


REGISTERS = {"copy": "registers"}
LIMB_SCHEDULES: tuple[dict[str, Any], ...] = (
    {}, {"tile_m": 64, "tile_n": 64, "warps_m": 4, "warps_n": 4, "stages": 3}, {"tile_k": 64, **REGISTERS, "stages": 1},
    {"tile_n": 32, "warps_n": 2, **REGISTERS, "stages": 2}, {"split": "workspace", "stages": 2},
)  # fmt: skip
AHEAD_SCHEDULES: tuple[dict[str, Any], ...] = (
    {"tile_m": 64, "tile_n": 64, "warps_m": 4, "warps_n": 2, "stages": 3}, {"tile_k": 64, "split": "workspace"},
    {"tile_n": 32, "warps_n": 2},
)  # fmt: skip
IMAD_SCHEDULES: tuple[dict[str, Any], ...] = (
    {"stages": 2, "fragments": 2, "padding": 4}, {"tile_m": 64, "tile_n": 32, "thread_m": 8, "tile_k": 16},
    {"tile_m": 16, "tile_n": 16, "thread_m": 2, "thread_n": 2, "warp_m": 8}, {"split": "workspace"},
    {"thread_m": 1, "thread_n": 1, "warp_m": 32, "unroll_k": 1},
)  # fmt: skip


def verified() -> dict[str, Kernel]:
    """Both ways, rings and layouts with each class of alignment; roundings, epilogues, and places of truncation."""
    by_name = {}
    for number, (dtype, layout, narrow) in enumerate(product(RINGS, LAYOUTS, (False, True))):
        bits, rounding = (0, 5, 17, RINGS[dtype] - 1)[number % 4], ("floor", "nearest")[number // 4 % 2]
        words: dict[str, Any] = {
            "layout": layout, "dtype": dtype, "align": 1 if narrow else None, "bits": bits,
            "rounding": rounding if bits else "floor", "epilogue": EPILOGUES[number % len(EPILOGUES)],
        }  # fmt: skip
        limbs, imad = LIMB_SCHEDULES[number % 5], IMAD_SCHEDULES[number % 5]
        by_name[f"limbs {dtype} {layout} {words['align'] or ''}"] = ring_kernel(algorithm="limbs", **words, **limbs)
        by_name[f"imad {dtype} {layout} {words['align'] or ''}"] = ring_kernel(**words, **imad)
    for dtype, rounding in product(RINGS, ("floor", "nearest")):
        words = {"dtype": dtype, "bits": 7, "rounding": rounding, "layout": "nt"}
        by_name[f"limbs {dtype} {rounding}, tiles"] = ring_kernel(algorithm="limbs", truncate="tile", **words)
        by_name[f"imad {dtype} {rounding}, tiles"] = ring_kernel(truncate="tile", split="workspace", **words)
        by_name[f"imad {dtype} {rounding}, products"] = ring_kernel(truncate="product", **words)
    for number, (dtype, layout) in enumerate((("int64", "nn"), ("int64", "tt"), ("int32", "tn"), ("int32", "nt"))):
        words = {"dtype": dtype, "layout": layout, "align": number % 2 or None, "bits": number}
        by_name[f"limbs {dtype} {layout}, split ahead"] = ring_kernel(**AHEAD, **words, **AHEAD_SCHEDULES[number % 3])
    by_name["limbs with carries"] = ring_kernel("nt", algorithm="limbs", chain_k=512, bits=9)
    by_name["limbs, classes of 2 of int32"] = ring_kernel("tn", "int32", 2, algorithm="limbs")
    return by_name


def sanitized() -> list[Kernel]:
    return [
        ring_kernel("tn", algorithm="limbs", bits=20, rounding="nearest", epilogue=("bias.n", "relu")),
        ring_kernel("nn", "int32", 1, algorithm="limbs", bits=3, **REGISTERS),
        ring_kernel("nt", algorithm="limbs", chain_k=512),
        ring_kernel("tt", bits=20, epilogue=("bias.m", "residual"), split="workspace"),
        ring_kernel("nn", "int32", bits=31, truncate="product"),
    ]


@pytest.mark.parametrize("dtype", some_each_run(list(RINGS)))
def test_the_main_loop_by_limbs_has_no_bank_conflicts(dtype: str) -> None:
    kernels = {
        layout: ring_kernel(layout, dtype, algorithm="limbs", tile_m=64, tile_n=32, warps_m=4, warps_n=2, tile_k=tile_k)
        for layout, tile_k in zip(LAYOUTS, (32, 64, 64, 32), strict=True)
    }
    # Each launch once: other runs are not race-checked.
    verdicts = verify(list(kernels.values()), part=Part(order="ascending"))
    for layout, verdict in zip(kernels, verdicts, strict=True):
        assert (verdict.verdict, verdict.message) == ("ok", "")
        counted = {site["site"]: (site["wavefronts"], site["ideal"]) for site in verdict.details["shared_memory"]}
        reads = {site: counts for site, counts in counted.items() if site.startswith("gemm/limbs.cuh")}
        assert len(reads) == (1 if layout in ("nt", "tn") else 2)
        assert all(wavefronts == ideal for wavefronts, ideal in reads.values()), (layout, reads)


# ---- mutants


def mutated(name: str) -> dict[str, Kernel]:
    return {
        "limbs nt": ring_kernel("nt", algorithm="limbs", bits=18, operator=name),
        "limbs nn": ring_kernel(
            "nn", algorithm="limbs", bits=18, rounding="nearest", operator=name, tile_n=32, warps_n=2
        ),
        "limbs int32": ring_kernel("tt", "int32", algorithm="limbs", bits=9, operator=name, tile_n=32),
        "limbs, carries": ring_kernel("nt", algorithm="limbs", chain_k=512, operator=name),
        "limbs, tiles": ring_kernel("nt", algorithm="limbs", truncate="tile", bits=5, operator=name),
        "limbs, split ahead": ring_kernel("nn", **AHEAD, bits=18, operator=name, tile_n=64, warps_n=2, tile_k=64),
        "limbs int32, split ahead": ring_kernel("tt", "int32", **AHEAD, bits=9, operator=name, split="workspace"),
        "limbs, split ahead by many threads": ring_kernel("nt", "int32", **AHEAD, operator=name, tile_m=128, warps_m=8),
        "imad": ring_kernel("nn", bits=18, operator=name, epilogue=("bias.n", "masked_activation.bytes.relu.square")),
        "imad int32": ring_kernel("tn", "int32", bits=9, rounding="nearest", split="workspace", operator=name),
        "imad, tiles": ring_kernel("nt", truncate="tile", bits=5, rounding="nearest", operator=name),
        "imad, products": ring_kernel("nt", truncate="product", bits=5, operator=name),
    }


RING, LIMBS_TEXT, PLANES = "gemm/ring.cuh", "gemm/limbs.cuh", "gemm/limb_planes.cuh"
SIMT, TILE = "gemm/simt.cuh", "gemm/tile.cuh"
_LIMB = "mma_m16n8k32_u8(d[p + q], a[p], b[q]);"
WRONG = {
    "a product of limbs missing": (LIMBS_TEXT, _LIMB, f"if (p != 1 || q != 1) {_LIMB}"),
    "the last product of limbs missing": (LIMBS_TEXT, _LIMB, f"if (p + q + 1 < limbs || p > 0) {_LIMB}"),
    "signed limbs": (LIMBS_TEXT, _LIMB, "mma_m16n8k32_s8(d[p + q], a[p], b[q]);"),
    "a diagonal shifted by a bit less": (LIMBS_TEXT, "part << 8 * d", "part << (8 * d - (d == 2))"),
    "a byte too much kept at a carry": (LIMBS_TEXT, "held & 255u", "held & 511u"),
    "the first 16 of a step twice": (
        LIMBS_TEXT,
        "moved(i * chunk_bytes, half * 16 * size)",
        "moved(i * chunk_bytes, 0)",
    ),
    "rows of k in another order": (LIMBS_TEXT, "half * 16 + j", "half * 16 + (j ^ 1)"),
    "planes of B where those of A are": (
        PLANES,
        "of_b.of_matrix(first + of_a.bytes(), tile.matrix)",
        "of_b.of_matrix(first, tile.matrix)",
    ),
    "a shift without the sign": (
        RING,
        "value >> bits",
        "static_cast<T>(static_cast<typename UnsignedOf<T>::type>(value) >> bits)",
    ),
    "rounded to zero": (RING, "value >> bits", "value / (T(1) << bits)"),
    "rounded the other way": (RING, "C::nearest", "!C::nearest"),
    "tiles truncated where the sum is": (
        SIMT,
        "accumulators[i][j] = multiply_add<C>(a.data[i], b.data[j], accumulators[i][j]);",
        "accumulators[i][j] = plus(accumulators[i][j], truncated<C>(product(a.data[i], b.data[j])));",
    ),
    "truncated twice": (TILE, "truncated<C>(sums.data[i])", "truncated<C>(truncated<C>(sums.data[i]))"),
    "not truncated": (TILE, "truncated<C>(sums.data[i])", "sums.data[i]"),
    "bias before the shift": (
        TILE,
        "C::Epilogue::apply(shifted, at, arguments.epilogue);",
        "Vector<Number<C>, width> early; for (int i = 0; i < width; ++i) early.data[i] = Number<C>(sums.data[i]); "
        "C::Epilogue::apply(early, at, arguments.epilogue); "
        "for (int i = 0; i < width; ++i) shifted.data[i] = Number<C>(truncated<C>(early.data[i].value));",
    ),
    "a square that is not truncated": (
        RING,
        "gemm::truncated<C>(gemm::product(x.value, x.value))",
        "gemm::product(x.value, x.value)",
    ),
}


# ---- what nvcc makes of it


def compiled() -> dict[str, Kernel]:
    return {
        "limbs int64": ring_kernel("nt", algorithm="limbs", bits=18, tile_n=64, warps_n=4),
        "limbs int64 nn": ring_kernel("nn", algorithm="limbs", bits=18, tile_n=64, warps_n=4),
        "limbs int32": ring_kernel("nt", "int32", algorithm="limbs", bits=9, tile_m=64, tile_n=64, warps_n=2),
        "imad int64": ring_kernel("nn", bits=18, tile_m=64, tile_n=64, tile_k=16, stages=2, fragments=2, padding=4),
    }


def has_the_products_of_limbs(kernel: Kernel, code: Any) -> None:
    t = kernel.tunables.as_dict()
    rows, columns = t["tile_m"] // t["warps_m"], t["tile_n"] // t["warps_n"]
    each = 36 if kernel.signature_dict["dtype"] == "int64" else 10
    assert code.count("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32") == each * (rows // 16) * (columns // 8)
    assert code.count("mma") == code.count("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32"), "none saturates"


def spills_nothing(kernel: Kernel, code: Any) -> None:
    assert code.resources.spill_bytes == 0


MACHINE_CODE = declare.MachineCode(
    kernels=compiled,
    claims={
        **{
            name: [has_the_products_of_limbs, spills_nothing]
            for name in ("limbs int64", "limbs int64 nn", "limbs int32")
        },
        "imad int64": [spills_nothing],
    },
)

# ---- launches


def planned(fields: Fields) -> list[Candidate]:
    problem = ring_problem({**fields, "fraction_bits": 8})
    ways: list[dict[str, Any]] = [{}, {"split": "workspace", "split_k": 5}, {"split": "workspace", "split_k": 64}]
    bases = (IMAD, LIMBS, {**LIMBS, **AHEAD})
    return [OP.candidate(problem, Schedule.of({**base, **way})) for base in bases for way in ways]


def bound(candidate: Candidate) -> Schedule:
    """With as many slices as a call with so few steps gets."""
    t = candidate.schedule.as_dict()
    assert isinstance(candidate.problem, MatmulProblem)
    return Schedule.of({**t, "split_k": min(int(t["split_k"]), k_steps(candidate.problem.k, int(t["tile_k"])))})


def refused_k() -> Candidate:
    return OP.candidate(ring_problem({"m": 64, "n": 64, "k": 64, "layout": "nt"}), Schedule.of(LIMBS))


LONG = UNCHAINED_K + 2
CALLS = {
    "limbs": declare.Library(
        candidate=refused_k,
        refused={
            "k beyond the accumulators": (
                {"a": f"T((64, {LONG}), 'int64')", "b": f"T((64, {LONG}), 'int64')"},
                "ValueError",
                f"k is {LONG}; the accumulators of this kernel hold 16512",
            ),
            "another ring": ({"a": "T((64, 64), 'int32')"}, "TypeError", "int64"),
            "floats": ({"out": "T((64, 64), 'float32', address=0x50000000)"}, "TypeError", "int64"),
        },
        taken={
            "the longest k": (
                {"a": f"T((64, {UNCHAINED_K}), 'int64')", "b": f"T((64, {UNCHAINED_K}), 'int64')"}, 1,
            ),
        },
    )
}  # fmt: skip

DECLARED = (
    declare.Declarations(
        operator="matmul",
        problem={"m": 64, "n": 64, "k": 64, "dtype": "int64"},
        problems=PROBLEMS,
        searches=SEARCHES,
        references=REFERENCES,
        verifications=declare.Verifications(kernels=verified, sanitized=sanitized),
        mutations=declare.Mutations(
            kernels=mutated,
            files=(RING, LIMBS_TEXT, PLANES),
            wrong=WRONG,
            definitions={"swizzle": 0},
        ),
        random_cases=declare.RandomCases(
            cases=random_cases, properties=properties, spread=SPREAD, extents=4, each_run=12
        ),
        machine_code=MACHINE_CODE,
        launches=declare.Launches(
            planned={
                str(extents): partial(planned, extents)
                for extents in ({"m": 100, "n": 136, "k": 320}, {"m": 33, "n": 65, "k": 300, "batch": 3})
            },
            bound=bound,
        ),
        calls=CALLS,
        without={"job": "test_every_operator.py has one of rings and of Winograd"},
    ),
)
add_checks(globals())
