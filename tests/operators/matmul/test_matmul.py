"""Products of matrices, and the text that operators share (`codegen/device/gemm/`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

import pytest

from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators import operator
from codegen.operators.matmul.grid import k_steps
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.split import SPLIT_OR_STREAM, all_steps
from codegen.plan.verification_plan import plan_cases
from codegen.problem import LARGEST_ELEMENTS, LARGEST_EXTENT
from codegen.search.schedule import Schedule
from codegen.targets import target
from codegen.text.render_group import operator_text
from tests.operators.harness import declarations as declare
from tests.operators.harness.checks import add_checks
from tests.operators.harness.declarations import LEVEL_0, Fields, Rejection
from tests.operators.harness.mutations import mutants_of
from tests.operators.matmul.schedules import CUBE, FEW_TILES, GOOD, STREAMED, TURING
from tests.support.fixtures.codegen import default_candidate, matmul
from tests.support.kernels.cpu_helpers import matmul_kernel, tensor_kernel
from tests.support.kernels.mutants import KINDS, find_sites
from tests.support.kernels.random_cases import (
    AMPERE_ONLY,
    LAYOUTS,
    MOST,
    TARGETS,
    random_cases,
    random_problems,
    seed_of_this_run,
)
from tests.support.kernels.random_cases import KINDS as INPUTS

OP = operator("matmul")

# ---- problems

PROBLEMS = declare.Problems(
    refused=[
        ({"m": 0}, "m", "greater than or equal to 1"),
        ({"n": -1}, "n", "greater than or equal to 1"),
        ({"k": 1.5}, "k", "valid integer"),
        ({"k": "64"}, "k", "valid integer"),
        ({"m": True}, "m", "valid integer"),
        ({"m": None}, "m", "valid integer"),
        ({"m": float("nan")}, "m", "valid integer"),
        ({"m": float("inf")}, "m", "valid integer"),
        ({"m": LARGEST_EXTENT + 1}, "m", str(LARGEST_EXTENT)),
        ({"k": 10**400}, "k", str(LARGEST_EXTENT)),
        ({"n": 1e300}, "n", "valid integer"),
        ({"batch": 2**31}, "batch", str(LARGEST_EXTENT)),
        ({"m": 2**22, "k": 2**20}, "lda", str(LARGEST_ELEMENTS)),
        ({"n": 2**22, "k": 2**20}, "ldb", str(LARGEST_ELEMENTS)),
        ({"m": 2**22, "n": 2**20}, "ldc", str(LARGEST_ELEMENTS)),
        ({"m": 2**20, "k": 2**19, "batch": 4}, "stride_a", str(LARGEST_ELEMENTS)),
        ({"layout": "xx"}, "layout", "'nn', 'nt', 'tn' or 'tt'"),
        ({"dtype": "float64"}, "dtype", "'float32', 'float16', 'bfloat16', 'int8', 'int32' or 'int64'"),
        ({"dtype": "uint8"}, "dtype", "'float32', 'float16', 'bfloat16', 'int8', 'int32' or 'int64'"),
        ({"dtype": None}, "dtype", "'int8', 'int32' or 'int64'"),
        ({"acc_dtype": "float16"}, "acc_dtype", "float16, which does not go with dtype float32; allowed: float32"),
        ({"dtype": "float16", "acc_dtype": "float16"}, "acc_dtype", "dtype float16; allowed: float32"),
        ({"dtype": "bfloat16", "acc_dtype": "int32"}, "acc_dtype", "dtype bfloat16; allowed: float32"),
        ({"dtype": "int8", "acc_dtype": "float32"}, "acc_dtype", "dtype int8; allowed: int32"),
        ({"acc_dtype": 32}, "acc_dtype", "'float32', 'int32' or 'int64'"),
        ({"out_dtype": "int32"}, "out_dtype", "dtype float32; allowed: float32, float16, bfloat16"),
        ({"dtype": "float16", "out_dtype": "int8"}, "out_dtype", "allowed: float32, float16, bfloat16"),
        ({"dtype": "int8", "out_dtype": "int8"}, "out_dtype", "allowed: float32, float16, bfloat16, int32"),
        ({"out_dtype": "{words} \ud800"}, "out_dtype", "valid string"),
        ({"dtype": "int8", "epilogue": [{"op": "relu"}]}, "epilogue", "out_dtype int32 takes an empty epilogue"),
        ({"allow_tf32": 0}, "allow_tf32", "valid boolean"),
        ({"allow_tf32": "true"}, "allow_tf32", "valid boolean"),
        ({"dtype": "float16", "allow_tf32": 1}, "allow_tf32", "valid boolean"),
        ({"tile": 3}, "tile", "not permitted"),
        ({"lda": 63}, "lda", "at least 64"),
        ({"ldb": 0}, "ldb", "greater than or equal to 1"),
        ({"ldc": 2**41}, "ldc", str(LARGEST_ELEMENTS)),
        ({"lda": 64.5}, "lda", "valid integer"),
        ({"batch": 2, "stride_a": 4095}, "stride_a", "at least 4096 or 0"),
        ({"batch": 2, "stride_c": 0}, "stride_c", "at least 4096 is allowed"),
        ({"batch": 2, "stride_b": -1}, "stride_b", "greater than or equal to 0"),
        ({"stride_b": -1}, "stride_b", "greater than or equal to 0"),
        ({"stride_c": False}, "stride_c", "valid integer"),
        ({"epilogue": [{"op": "evil"}]}, "epilogue.0", "'gelu'"),
        ({"epilogue": [{"op": "gelu", "value": 1.0}]}, "epilogue.0.gelu.value", "not permitted"),
        ({"epilogue": ["x * 2"]}, "epilogue.0", "valid dictionary"),
        ({"epilogue": [{"op": "relu"}] * 9}, "epilogue", "at most 8"),
        ({"epilogue": [{"op": "bias", "axis": "k"}]}, "epilogue.0.bias.axis", "'m' or 'n'"),
        ({"epilogue": [{"op": "scale"}]}, "epilogue.0.scale.value", "required"),
        ({"epilogue": [{"op": "scale", "value": 1e39}]}, "epilogue.0.scale.value", "fit float32"),
        ({"epilogue": [{"op": "scale", "value": "2"}]}, "epilogue.0.scale.value", "valid number"),
        ({"epilogue": [{"op": "scale", "value": float("nan")}]}, "epilogue.0.scale.value", "finite"),
        ({"epilogue": [{"op": "clip", "lo": 2.0, "hi": 1.0}]}, "epilogue.0.clip", "lo must be at most hi"),
        ({"epilogue": [{"op": "cast", "dtype": "float8"}]}, "epilogue.0.cast.dtype", "'float16' or 'bfloat16'"),
    ],
)  # fmt: skip

# ---- rules of the kernel on tensor cores

REJECTED: list[tuple[str, Fields, Fields, str, str]] = [
        ("mma", {"mma_k": 32}, {}, "sm_90a", "mma.sync on float16 has k = 8 or 16, not mma_k = 32"),
        ("mma", {"mma_k": 8}, {"dtype": "bfloat16"}, "sm_90a", "bfloat16 has k = 16, not mma_k = 8"),
        ("mma", {}, {"dtype": "float32", "allow_tf32": True}, "sm_90a", "tf32 has k = 8, not mma_k = 16"),
        ("mma", {}, {"dtype": "int8"}, "sm_90a", "int8 has k = 32, not mma_k = 16"),
        ("mma", {**TURING, "mma_k": 16}, {}, "sm_75", "float16 with k = 16 needs sm_80; the target is sm_75"),
        ("mma", {}, {"dtype": "bfloat16"}, "sm_75", "bfloat16 with k = 16 needs sm_80"),
        ("mma", {"mma_k": 32}, {"dtype": "int8"}, "sm_75", "int8 with k = 32 needs sm_80"),
        ("tile_k", {"tile_k": 8}, {}, "sm_90a", "tile_k = 8 is 16 bytes; 32, 64, 128 are allowed"),
        ("tile_k", {"tile_k": 128}, {}, "sm_90a", "tile_k = 128 is 256 bytes"),
        ("tile_k", {"tile_k": 16, "mma_k": 32}, {"dtype": "int8", "layout": "nt"}, "sm_90a", "is 16 bytes"),
        ("warp_tile", {"warps_m": 8}, {}, "sm_90a", "64 rows for 8 warps are no multiple of 16 each"),
        ("warp_tile", {"warps_n": 8}, {}, "sm_90a", "64 columns for 8 warps are no multiple of 16 each"),
        ("warp_tile", {"tile_m": 16, "warps_m": 4}, {}, "sm_90a", "16 rows for 4 warps"),
        ("threads", {"tile_m": 256, "tile_n": 256, "warps_m": 8, "warps_n": 8}, {}, "sm_90a",
         "8 x 8 warps are 2048 threads; at most 1024"),
        ("fragments", {"tile_k": 16}, {}, "sm_90a", "even number of 32-byte k-steps; tile_k = 16 has 1"),
        ("copy", {"copy": "registers", "stages": 3}, {}, "sm_90a", "1 or 2 stages, not 3"),
        ("copy", {**TURING, "copy": "cp_async"}, {}, "sm_75", "cp.async needs sm_80; the target is sm_75"),
        ("copy", {}, {"n": 1023}, "sm_90a", "at least 4 bytes; an operand is aligned to 2"),
        ("copy", {"mma_k": 32, "tile_k": 64}, {"dtype": "int8", "n": 1022, "layout": "nn"}, "sm_90a", "aligned to 1"),
        ("copy", {"mma_k": 32, "tile_k": 64}, {"dtype": "int8", "layout": "tn"}, "sm_90a",
         "layout tn needs copy = registers"),
        ("copy", {"stages": 1}, {}, "sm_90a", "2 stages at least"),
        ("split", {"split": "workspace"}, {}, "sm_90a", "split = workspace with 1 slice"),
        ("split", {"split_k": 2}, {}, "sm_90a", "split_k = 2 needs split = workspace or atomic"),
        ("split", {"stream_blocks": 4}, {}, "sm_90a", "stream_blocks = 4 needs split = stream"),
        ("split", {**STREAMED, "split_k": 2}, {}, "sm_90a", "split_k is 1, not 2"),
        ("split_k", {"split": "atomic", "split_k": 33}, {}, "sm_90a", "33 slices of 32 steps (k = 1024, tile_k = 32)"),
        ("split_k", {"split": "workspace", "split_k": 5}, {}, "sm_90a", "has enough with 1056 blocks"),
        ("stream_blocks", {"split": "stream"}, {}, "sm_90a", "needs at least 1 block"),
        ("stream_blocks", STREAMED, {"m": 64, "n": 64}, "sm_90a", "132 blocks for 32 steps leave some empty"),
        ("stream_blocks", {**STREAMED, "stream_blocks": 3}, FEW_TILES, "sm_90a", "3 blocks take 9 whole tiles"),
        ("stream_blocks", STREAMED, {}, "sm_90a", "256 tiles fill 2 x 132 multiprocessors without stream-K"),
        ("stream_blocks", {**STREAMED, "stages": 2, "stream_blocks": 132 * 12}, FEW_TILES, "sm_90a",
         "x 132 at a time"),
        ("maxnreg", {"maxnreg": 128, "min_blocks": 2}, {}, "sm_90a", "maxnreg = 128 or min_blocks = 2, not both"),
        ("maxnreg", {"maxnreg": 255, "tile_m": 256, "warps_m": 8}, {}, "sm_90a",
         "512 threads of 255 registers; sm_90a has 65536"),
        ("registers", {"maxnreg": 64}, {}, "sm_90a", "maxnreg = 64 would spill"),
        ("registers", {"tile_m": 128, "tile_n": 256}, {}, "sm_90a", "at most 255"),
        ("registers", {"tile_m": 128, "tile_n": 128, "warps_m": 4, "warps_n": 4, "min_blocks": 2}, {}, "sm_90a",
         "2 x 512 threads of about"),
        ("shared_memory", {"tile_m": 128, "tile_n": 128, "tile_k": 64, "stages": 8}, {}, "sm_90a",
         "262144 bytes of shared memory; sm_90a has 232448 per block"),
        ("shared_memory", {"stages": 7, "tile_k": 64}, {}, "sm_86", "114688 bytes of shared memory; sm_86 has 101376"),
        ("min_blocks", {"tile_k": 64, "stages": 4, "min_blocks": 4}, {}, "sm_90a", "4 x 66560 bytes of shared memory"),
        ("min_blocks", {**TURING, "tile_m": 128, "tile_n": 128, "warps_m": 4, "warps_n": 4, "min_blocks": 3}, {},
         "sm_75", "3 x 512 threads; sm_75 holds 1024"),
        ("maxnreg", {"maxnreg": 128}, {}, "sm_90a", "about 116 registers fit into 128 unasked"),
        ("min_blocks", {"min_blocks": 4}, {}, "sm_90a", "about 116 registers fit into 128 unasked"),
        ("static_k", {"static_k": 512}, {}, "sm_90a", "static_k = 512 is neither 0 nor k = 1024"),
        ("static_k", {"static_k": 2048}, {"k": 2048}, "sm_90a", "or over 1024"),
        ("tile_m", {}, {"m": 32}, "sm_90a", "tile_m = 64 is mostly padding for m = 32"),
        ("tile_n", {}, {"n": 31, "layout": "nt"}, "sm_90a", "tile_n = 64 is mostly padding for n = 31"),
        ("tile_k", {"stages": 2, "tile_k": 64}, {"k": 32}, "sm_90a", "tile_k = 64 is mostly padding for k = 32"),
        ("stages", {}, {"k": 64}, "sm_90a", "3 stages for 2 steps: k = 64, tile_k = 32"),
        ("stages", {"split": "workspace", "split_k": 16}, {"m": 64, "n": 64}, "sm_90a", "3 stages for 2 steps"),
        ("raster", {"raster": 1}, {"m": 64}, "sm_90a", "orders 1 x 16 tiles as 0 does"),
        ("raster", {"raster": 8}, {"m": 512}, "sm_90a", "bands of 8 rows order 8 rows of tiles"),
        ("grid", {"tile_m": 16, "tile_n": 16, "warps_m": 1, "warps_n": 1, "copy": "registers", "stages": 2},
         {"batch": LARGEST_EXTENT, "m": 17, "n": 17, "k": 96, "stride_a": 0, "stride_b": 0}, "sm_90a",
         f"{4 * LARGEST_EXTENT} blocks; a launch has at most {LARGEST_EXTENT}"),
]  # fmt: skip
SEARCHES = declare.Searches(
    rejected=[
        Rejection({**CUBE, **fields}, {**GOOD, **changes}, rule, said, arch)
        for rule, changes, fields, arch, said in REJECTED
    ],
    capped=[
        ({**CUBE, **fields}, {**GOOD, **changes}, needed)
        for changes, fields, needed in (
            ({"split": "workspace", "split_k": 3}, {"m": 100, "n": 202, "batch": 2}, 3 * 4 * 2 * 100 * 204),
            ({"split": "atomic", "split_k": 3}, {"m": 100, "n": 202, "batch": 2}, 4 * 2 * 100 * 204),
            (STREAMED, FEW_TILES, 4 * 2 * 132 * 64 * 64),
            ({}, {}, 0),
        )
    ],
)

# ---- kernels on the CPU

NODES = (
    "bias.m", "bias.n", "residual", "mask", "scale", "relu", "leaky_relu", "clip", "gelu", "silu", "tanh", "sigmoid",
    "cast.float16", "cast.bfloat16", "masked_activation.bits.relu.identity", "masked_activation.bits.polynomial2.gelu",
    "masked_activation.bytes.square.polynomial3",
)  # fmt: skip
ALIGNS = ((4, 4, 4), (1, 1, 1), (4, 1, 1), (1, 4, 4), (4, 4, 1))
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"stages": 2, "fragments": 2, "padding": 4},
    {"tile_m": 128, "tile_n": 64, "tile_k": 16, "thread_m": 8, "thread_n": 8, "unroll_k": 8, "stages": 2},
    {"tile_m": 16, "tile_n": 16, "thread_m": 2, "thread_n": 2, "tile_k": 32, "warp_m": 8},
    {"tile_m": 32, "tile_n": 32, "thread_m": 1, "thread_n": 1, "warp_m": 32, "unroll_k": 1},  # 1,024 threads
    {"tile_m": 64, "tile_n": 128, "thread_m": 16, "thread_n": 4, "warp_m": 1, "fragments": 2, "unroll_k": 2},
)


def verified() -> dict[str, Kernel]:
    by_name = {}
    for (row, layout), (column, align) in product(enumerate(LAYOUTS), enumerate(ALIGNS)):
        by_name[f"{layout} {align}"] = matmul_kernel(layout, align, **SCHEDULES[(row + column) % len(SCHEDULES)])
    for node in NODES:
        by_name[node] = matmul_kernel("nt", 4, ("bias.n", node), stages=2)
    chain = ("scale", "bias.m", "residual", "gelu", "mask", "clip", "cast.float16")
    return {**by_name, "long chain": matmul_kernel("nn", 1, chain)}


def sanitized() -> list[Kernel]:
    chain = ("bias.m", "residual", "mask", "cast.float16")
    return [
        matmul_kernel("nn", 4, ("bias.n", "gelu"), **SCHEDULES[0]),
        matmul_kernel("tt", 1, chain, tile_m=16, tile_n=64, thread_m=2),
    ]


def test_the_plan_reaches_batches_and_padded_rows() -> None:
    plan = plan_cases(OP, verified()["nn (4, 4, 4)"], seed=1)
    cases = [dict(zip(OP.extent_names, OP.extents(case.problem), strict=True)) for case in plan]
    assert any(case["batch"] > 1 for case in cases)
    assert any(case["lda"] > case["k"] for case in cases)


# ---- mutants

# Here the vectors of a tile are not a multiple of the threads, so that some threads have nothing to bring.
UNEVEN = {"tile_m": 16, "tile_n": 64, "thread_m": 2, "thread_n": 4, "padding": 4}
ATOMIC, WORKSPACE, STREAM = {"split": "atomic"}, {"split": "workspace"}, {"split": "stream"}
# Layouts, alignment classes, stages and fragment buffers of the kernel on CUDA cores.
SIMT: Mapping[str, dict[str, Any]] = {
    "simt nn": {"layout": "nn", "align": 4, "stages": 1, "fragments": 1},
    "simt nt, 1 element": {"layout": "nt", "align": 1, "stages": 2, "fragments": 2, "epilogue": ("bias.n",), **UNEVEN},
    "simt tn, split": {"layout": "tn", "align": 4, "stages": 2, "fragments": 2, "epilogue": ("bias.m",), **WORKSPACE},
    "simt tt": {"layout": "tt", "align": 4, "stages": 1, "fragments": 2, **UNEVEN},
}
REGISTERS, SHARED = {"copy": "registers"}, {"epilogue_path": "shared"}
# More threads than vectors, of A in the first and of B in the second.
WIDE = {"tile_m": 16, "tile_n": 128, "warps_m": 1, "warps_n": 4}
TALL = {"tile_m": 128, "tile_n": 16, "warps_m": 8, "warps_n": 1}
# Each way of copying with each number of stages and fragment buffers, of computing, of writing and of splitting; each
# element type; tiles of which rows lie along k, along the other axis (by ldmatrix.trans, by words), and turned bytes.
TENSOR: Mapping[str, dict[str, Any]] = {
    "fp16 nt": {"layout": "nt", "stages": 2},
    "fp16 nn, read ahead": {"layout": "nn", "stages": 3, "fragments": 2, "epilogue": ("bias.n", "relu"), **SHARED},
    "bf16 tn, 4 bytes": {"layout": "tn", "dtype": "bfloat16", "align": (2, 2, 2), "stages": 4, **WIDE, **WORKSPACE},
    "bf16 tt, read ahead": {"layout": "tt", "dtype": "bfloat16", "stages": 2, "fragments": 2, "tile_m": 64, **SHARED},
    "fp16 nn, 1 element": {"layout": "nn", "align": (1, 1, 1), "stages": 1, **REGISTERS},
    "fp16 tt, registers": {"layout": "tt", "stages": 2, "fragments": 2, "mma_k": 8, **REGISTERS, **TALL, **SHARED},
    "int8 nt, atomic": {"layout": "nt", "dtype": "int8", "stages": 3, "fragments": 2, **ATOMIC},
    "int8 nn": {"layout": "nn", "dtype": "int8", "stages": 1, **REGISTERS, **SHARED},
    "int8 tt, 4 bytes": {"layout": "tt", "dtype": "int8", "align": (4, 4, 2), "stages": 2, **REGISTERS, **TALL},
    "tf32 tn": {"layout": "tn", "dtype": "float32", "stages": 3, **WORKSPACE},
    "fp16 nt, stream-K": {"layout": "nt", "stages": 3, **STREAM},
    "bf16 nn, stream-K": {"layout": "nn", "dtype": "bfloat16", "fragments": 2, **STREAM, **SHARED},
    "tf32 nt": {"layout": "nt", "dtype": "float32", "stages": 2, **WIDE, **SHARED},
}
RING_FILES = ("gemm/ring.cuh", "gemm/limbs.cuh", "gemm/limb_planes.cuh")  # test_ring has their mutants
# Of single configs, by the comment of the line: with fragments read ahead, what a warp reads behind the last barrier of
# the main loop is never used, so that nothing is lost with it.
EXCUSED = {"every warp has read the last stage": ("fp16 nn, read ahead", "bf16 tt, read ahead", "bf16 nn, stream-K")}


def mutated(name: str) -> dict[str, Kernel]:
    simt = {config: matmul_kernel(operator=name, **words) for config, words in SIMT.items()}
    return simt | {config: tensor_kernel(operator=name, **words) for config, words in TENSOR.items()}


def test_matmul_has_mutants_of_every_kind() -> None:
    counts = Counter(mutant.kind for mutant in mutants_of(DECLARED[0]).values())
    assert set(counts) == set(KINDS)
    assert counts["wait"] >= 6 and counts["bounds"] >= 2


@pytest.mark.parametrize(
    "line",
    [
        "if (in_bounds(i, n)) {",
        "if (i < n) {  // bounds: row",
        "const int at = Tile::swizzle(row);  // bounds: row",
        "feed.start(stage_at<Feed>(shared, 1));",
    ],
)
def test_a_call_without_a_mark_and_a_mark_without_a_call_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match="belong on one line"):
        find_sites({"kernel.cuh": line})


# ---- launches

PLANNED_SIMT: dict[str, Any] = {
    "tile_m": 32, "tile_n": 64, "tile_k": 8, "thread_m": 4, "thread_n": 4, "warp_m": 4, "stages": 2, "fragments": 1,
    "padding": 4, "unroll_k": 4, "min_blocks": 1, "raster": 0, "split": "none", "split_k": 1,
}  # fmt: skip
PLANNED_TENSOR: dict[str, Any] = {
    "tile_m": 32, "tile_n": 64, "tile_k": 32, "warps_m": 2, "warps_n": 2, "stages": 2, "fragments": 1, "mma_k": 16,
    "copy": "cp_async", "epilogue_path": "shared", "static_k": 0, "min_blocks": 1, "maxnreg": 0, "raster": 0,
    "split": "none", "split_k": 1, "stream_blocks": 0,
}  # fmt: skip
WAYS: list[dict[str, Any]] = [
    {},
    {"split": "workspace", "split_k": 5},
    {"split": "atomic", "split_k": 3},
    # More slices than steps: bound to what there is, as the exact number of the workspace says.
    {"split": "workspace", "split_k": 64},
]
EXTENTS = [
    {"m": 100, "n": 136, "k": 320},
    {"m": 33, "n": 65, "k": 300, "batch": 3},
    {"m": 32, "n": 64, "k": 160, "batch": 2, "ldc": 100},
]
INT8 = {"dtype": "int8", "layout": "nt"}


def planned(extents: dict[str, int]) -> list[Candidate]:
    copied = {} if extents["n"] % 2 == 0 else {"copy": "registers"}
    simt = [candidate(extents, {**PLANNED_SIMT, **way}) for way in WAYS]
    tensor = [candidate({**extents, "dtype": "float16"}, {**PLANNED_TENSOR, **copied, **way}) for way in WAYS]
    stream = {"split": "stream", "stream_blocks": 7, "tile_k": 64, "mma_k": 32, "stages": 2, "copy": "registers"}
    # A ring of bytes is smaller than what the epilogue exchanges.
    small = {"tile_k": 32, "mma_k": 32, "copy": "registers", "stages": 1}
    return [*simt, *tensor, *(candidate({**extents, **INT8}, {**PLANNED_TENSOR, **way}) for way in (stream, small))]


def candidate(fields: dict[str, Any], schedule: dict[str, Any]) -> Candidate:
    return OP.candidate(matmul(**fields), Schedule.of(schedule))


def bound(candidate: Candidate) -> Schedule:
    """The schedule with as many slices or blocks as a call with so few steps gets; the rules allow no more."""
    t = candidate.schedule.as_dict()
    assert isinstance(candidate.problem, MatmulProblem)
    t["split_k"] = min(int(t["split_k"]), k_steps(candidate.problem.k, int(t["tile_k"])))
    if t["split"] == "stream":
        t["stream_blocks"] = min(int(t["stream_blocks"]), all_steps(candidate.problem, t))
    return Schedule.of(t)


def test_the_codes_of_the_ways_are_those_of_the_kernel() -> None:
    text = operator_text("matmul")
    assert all(f"split_{name} = {code}" in text for code, name in enumerate(SPLIT_OR_STREAM.allowed))
    assert default_candidate(matmul()).schedule.get("split") in SPLIT_OR_STREAM.allowed


# ---- random cases


def properties(arch: str, candidate: Candidate) -> Counter[str]:
    p, t, s = candidate.problem, candidate.schedule.as_dict(), candidate.kernel.signature_dict
    assert isinstance(p, MatmulProblem)
    counts = Counter([f"target {arch}", f"layout {p.layout}", f"inputs {p.dtype}", f"out {p.out_dtype}"])
    for extent in (p.m, p.n, p.k):
        longest = "extent up to 200" if extent <= MOST else "longer extent"
        counts["extent up to 16" if extent <= 16 else longest] += 1
    padded = (p.lda, p.ldb, p.ldc) != tuple(p.stored(name)[1] for name in "abc")
    counts.update(["tensor cores" if "mma_k" in t else "CUDA cores", f"split {t['split']}"])
    counts.update(["another raster" if t["raster"] else "raster 0", "padded rows" if padded else "packed"])
    counts.update(["batch" if p.batch > 1 else "one matrix", f"{min(len(p.epilogue), 2)} or more nodes"])
    counts["a shared operand"] += p.batch > 1 and 0 in (p.stride_a, p.stride_b)
    counts.update(f"align_{name} {s[f'align_{name}']}" for name in "abc")
    if "mma_k" in t:
        counts.update([f"copy {t['copy']}", f"fragments {t['fragments']}", f"epilogue {t['epilogue_path']}"])
        counts.update([f"stages {min(t['stages'], 3)}", "constant k" if t["static_k"] else "k at run time"])
        counts["tf32"] += bool(s["allow_tf32"])
    return counts


# What is decided by a case's number alone nearly as often as it goes round, the rest well below its frequency in 9,900
# random cases.
SPREAD = {
    "extent up to 16": 20, "extent up to 200": 60, "longer extent": 10, "target sm_75": 8, "target sm_80": 20,
    "target sm_90a": 20, "layout nn": 20, "layout nt": 20, "layout tn": 20, "layout tt": 20, "inputs float32": 30,
    "inputs float16": 15, "inputs bfloat16": 15, "inputs int8": 15, "out float32": 9, "out float16": 6,
    "out bfloat16": 6, "out int32": 3, "tensor cores": 60, "tf32": 8, "CUDA cores": 15, "split none": 19,
    "split workspace": 8, "split atomic": 8, "split stream": 4, "raster 0": 30, "another raster": 4, "batch": 20,
    "one matrix": 20, "padded rows": 30, "packed": 10, "a shared operand": 10, "0 or more nodes": 15,
    "1 or more nodes": 10, "2 or more nodes": 20, "align_a 1": 5, "align_b 1": 5, "align_c 1": 4, "align_a 4": 4,
    "align_b 4": 4, "align_c 4": 4, "align_a 8": 2, "align_b 8": 2, "align_c 8": 1, "copy cp_async": 7,
    "copy registers": 20, "fragments 1": 15, "fragments 2": 3, "epilogue direct": 11, "epilogue shared": 11,
    "stages 1": 7, "stages 2": 7, "stages 3": 2, "constant k": 8, "k at run time": 12,
}  # fmt: skip


def test_every_problem_has_a_schedule_to_begin_with() -> None:
    """Level 0, for random problems and for extents that no vector divides, large and small."""
    problems = random_problems(300, seed_of_this_run())
    for (dtype, tf32), layout, arch in product(INPUTS, LAYOUTS, TARGETS):
        if arch == "sm_75" and dtype in AMPERE_ONLY:
            continue
        for m, n, k in ((1023, 1023, 1023), (17, 5001, 4099), (4096, 4096, 4096), (1, 1, 1)):
            problems.append((arch, matmul(m=m, n=n, k=k, dtype=dtype, layout=layout, allow_tf32=tf32)))
    empty = [(arch, problem, lower(problem, target(arch), LEVEL_0).why_empty) for arch, problem in problems]
    assert [entry for entry in empty if entry[2] is not None] == [], f"of {len(problems)}"


DECLARED = (
    declare.Declarations(
        operator="matmul",
        problem={"m": 64, "n": 64, "k": 64},
        problems=PROBLEMS,
        searches=SEARCHES,
        verifications=declare.Verifications(kernels=verified, sanitized=sanitized),
        mutations=declare.Mutations(
            kernels=mutated,
            files=tuple(
                name
                for name in OP.kernel_texts
                if name not in ("gemm/ring.cuh", "gemm/limbs.cuh", "gemm/limb_planes.cuh")
            ),
            definitions={"bounds": 2, "swizzle": 1, "stage": 1},
            excused=EXCUSED,
        ),
        random_cases=declare.RandomCases(
            cases=random_cases, properties=properties, spread=SPREAD, extents=4, each_run=13
        ),
        launches=declare.Launches(
            planned={str(extents): partial(planned, extents) for extents in EXTENTS},
            bound=bound,
        ),
        without={
            "references": "test_matmul_reference.py has property tests",
            "machine_code": "test_tensor_ptx.py looks at every kind of Config",
            "calls": "tests/of_workers/compile/test_library.py calls matmul's",
            "job": "other jobs have matmuls, the quickstart's first of all",
        },
    ),
)
add_checks(globals())
