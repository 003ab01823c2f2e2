"""Search spaces of matmuls on tensor cores: which path, sane defaults, dozens at level 1, thousands at level 2."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

from codegen.errors import InvalidSearch, UnknownTunable
from codegen.kernel import Candidate
from codegen.lower import Lowered, lower
from codegen.operators import operator
from codegen.operators.matmul import simt_space, tensor_space
from codegen.operators.matmul.grid import blocks
from codegen.operators.matmul.problem import MatmulProblem
from codegen.predict.predict_uncompiled import predict_uncompiled
from codegen.search.rules import Accepted
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import SearchSpace
from codegen.targets import target
from tests.support.fixtures.codegen import matmul
from tests.support.kernels.random_cases import AMPERE_ONLY, KINDS, LAYOUTS
from tests.support.run.each_run import some_each_run

OP = operator("matmul")
TENSOR = {tunable.name for tunable in tensor_space.TUNABLES}
SIMT = {tunable.name for tunable in simt_space.TUNABLES}
FP16, BF16 = {"dtype": "float16"}, {"dtype": "bfloat16", "layout": "nt"}
CUBE = {"m": 1024, "n": 1024, "k": 1024, **FP16}
# Public shapes: BERT-base at batch 8 and sequence 128, Llama-3-8B at several M, squares, and a long sum.
LARGE = [
    {"m": 1024, "n": 2304, "k": 768, **FP16, "layout": "nt"},
    {"m": 1024, "n": 768, "k": 3072, **FP16, "layout": "nt"},
    {"m": 1024, "n": 1024, "k": 1024, **FP16},
    {"m": 8192, "n": 8192, "k": 8192, **FP16},
    {"m": 16, "n": 4096, "k": 4096, **BF16},
    {"m": 16, "n": 28672, "k": 4096, **BF16},
    {"m": 1, "n": 4096, "k": 14336, **BF16},
    {"m": 128, "n": 6144, "k": 4096, **BF16},
    {"m": 512, "n": 28672, "k": 4096, **BF16},
    {"m": 4096, "n": 4096, "k": 14336, **BF16},
    {"m": 4096, "n": 4096, "k": 4096, "dtype": "int8", "layout": "nt"},
    {"m": 2048, "n": 2048, "k": 2048, "allow_tf32": True},
]
SMALL = [
    {"m": 128, "n": 128, "k": 64, "batch": 96, **FP16, "layout": "nt"},
    {"m": 128, "n": 64, "k": 128, "batch": 96, **FP16},
    {"m": 128, "n": 128, "k": 16384, **FP16},
    {"m": 4096, "n": 16, "k": 4096, **FP16},
    {"m": 1, "n": 1, "k": 1, **FP16},
    {"m": 7, "n": 9, "k": 1000, "batch": 3, "allow_tf32": True},
    {"m": 200, "n": 3, "k": 17, "dtype": "int8", "layout": "tt"},
    {"m": 1023, "n": 1023, "k": 1023, **FP16},
]


def space(search: dict[str, Any], arch: str = "sm_90a", **fields: Any) -> SearchSpace:
    return OP.space(matmul(**fields), target(arch), Search.model_validate(search))


def lowered(level: int, fields: dict[str, Any], arch: str = "sm_90a", **search: Any) -> Lowered:
    return lower(matmul(**fields), target(arch), Search(level=level, **search))


def default(fields: dict[str, Any], arch: str = "sm_90a") -> dict[str, Any]:
    (only,) = lowered(0, fields, arch).candidates
    return only.schedule.as_dict()


@pytest.mark.parametrize(
    ("fields", "arch", "tensor"),
    [
        ({}, "sm_90a", False),
        ({"allow_tf32": True}, "sm_90a", True),
        ({"allow_tf32": True}, "sm_75", False),
        (FP16, "sm_75", True),
        (FP16, "sm_90a", True),
        ({"dtype": "bfloat16"}, "sm_80", True),
        ({"dtype": "int8"}, "sm_89", True),
        ({"dtype": "float16", "out_dtype": "float32"}, "sm_120", True),
    ],
)
def test_the_type_and_the_target_choose_the_kernel(fields: dict[str, Any], arch: str, tensor: bool) -> None:
    built = space({"level": 1}, arch, **fields)
    assert built.tunables.keys() == (TENSOR if tensor else SIMT)


@pytest.mark.parametrize("fields", [{"dtype": "bfloat16"}, {"dtype": "int8"}])
def test_what_the_tensor_cores_lack_is_said(fields: dict[str, Any]) -> None:
    result = lowered(1, {**CUBE, **fields}, "sm_75")
    assert not result.candidates
    assert "needs sm_80; the target is sm_75" in str(result.why_empty)


@pytest.mark.parametrize("fields", [*LARGE, *SMALL], ids=str)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90a"])
def test_levels_are_nested_and_none_is_empty(fields: dict[str, Any], arch: str) -> None:
    if arch == "sm_75" and fields.get("dtype") in ("bfloat16", "int8"):
        fields = {**fields, "dtype": "float16"}
    zero = {candidate.schedule for candidate in lowered(0, fields, arch).candidates}
    schedules = {candidate.schedule for candidate in lowered(1, fields, arch).candidates}
    two = space({"level": 2}, arch, **fields)
    assert len(zero) == 1
    assert zero <= schedules
    assert all(two.index_of(schedule) is not None for schedule in schedules)


def any_problem(rng: random.Random) -> MatmulProblem:
    """Extents on both sides of what tiles and vectors divide; pitches that give A, B and C alignments of their own."""
    (dtype, tf32), layout = rng.choice(KINDS), rng.choice(LAYOUTS)
    m, n, k = (rng.choice((1, 7, 16, 17, 26, 63, 100, 1023, 1024, 5001)) for _ in range(3))
    fields: dict[str, Any] = {"m": m, "n": n, "k": k, "dtype": dtype, "allow_tf32": tf32, "layout": layout}
    packed = matmul(**fields)
    for name, columns in (("lda", packed.lda), ("ldb", packed.ldb), ("ldc", packed.ldc)):
        grain = rng.choice((1, 1, 2, 4, 8, 16))
        fields[name] = -(-columns // grain) * grain
    return matmul(**fields, batch=rng.choice((1, 1, 1, 3)))


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90a", "sm_100", "sm_120"])
def test_every_problem_that_the_target_computes_has_schedules_at_every_level(arch: str) -> None:
    rng, sheet = random.Random(arch), target(arch)
    for problem in (any_problem(rng) for _ in range(40)):
        zero, level_1 = (lower(problem, sheet, Search(level=level)) for level in (0, 1))
        if arch == "sm_75" and problem.dtype in AMPERE_ONLY:
            assert "needs sm_80; the target is sm_75" in str(level_1.why_empty)
            continue
        assert len(zero.candidates) == 1, (problem, zero.why_empty)
        assert zero.candidates[0] in level_1.candidates, problem
        assert len(level_1.candidates) >= 2, problem
        schedules = {candidate.schedule for candidate in level_1.candidates}
        others = (schedule for schedule in OP.space(problem, sheet, Search(level=2)) if schedule not in schedules)
        accepted = (schedule for schedule in others if isinstance(OP.rules(problem, schedule, sheet), Accepted))
        assert next(accepted, None) is not None, f"level 2 has nothing of its own: {problem}"


def test_what_is_loaded_element_by_element_is_spread_over_many_threads() -> None:
    """1023 of int8, no two of which one access loads: level 1 still has tiles as large as those of aligned problems."""
    for layout in LAYOUTS:
        candidates = lowered(1, {"m": 1023, "n": 1023, "k": 1023, "dtype": "int8", "layout": layout}).candidates
        assert len(candidates) >= 24
        assert {candidate.schedule.get("tile_k") for candidate in candidates} == {32}
        assert (64, 128) in {
            (candidate.schedule.get("tile_m"), candidate.schedule.get("tile_n")) for candidate in candidates
        }


# Extents, and how much slower the best of level 1 may be.
NEARLY_AS_GOOD = {(1, 1, 4097): 1.05, (997, 1009, 1013): 1.1, (31, 1001, 2049): 1.15, (4096, 64, 4096): 1.02}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_few_outputs_of_a_long_odd_sum_are_divided_among_many_blocks(arch: str) -> None:
    """Where no copy is asynchronous each step waits for its own loads, so that slices of two steps pay."""
    candidates = lowered(1, {"m": 1, "n": 1, "k": 4097, "dtype": "float16"}, arch).candidates
    assert max(candidate.schedule.get("split_k") for candidate in candidates) == 64
    whole = [candidate for candidate in candidates if candidate.schedule.get("split") == "none"]
    assert _best(candidates, arch) < 0.3 * _best(whole, arch)


@pytest.mark.parametrize(("extents", "arch"), some_each_run([*product(NEARLY_AS_GOOD, ("sm_80", "sm_90a"))], 2))
def test_level_1_is_predicted_nearly_as_fast_as_level_2(extents: tuple[int, int, int], arch: str) -> None:
    """Odd extents, whose tiles are loaded element by element, and 64 columns."""
    fields = {**dict(zip("mnk", extents, strict=True)), "dtype": "float16"}
    best, of_all = (_best(lowered(level, fields, arch).candidates, arch) for level in (1, 2))
    assert best <= NEARLY_AS_GOOD[extents] * of_all


def _best(candidates: Iterable[Candidate], arch: str) -> float:
    return min(predict_uncompiled(candidate, target(arch)).us for candidate in candidates)


@pytest.mark.parametrize("fields", LARGE, ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_level_1_of_a_large_problem_has_some_dozens_of_candidates(fields: dict[str, Any], arch: str) -> None:
    assert 32 <= len(lowered(1, fields, arch).candidates) <= 110


def test_level_1_of_a_large_problem_is_not_rejected_away_on_turing() -> None:
    assert len(lowered(1, {**CUBE, "m": 4096, "n": 4096}, "sm_75").candidates) >= 20


def test_level_2_has_thousands_of_schedules_and_hundreds_of_kernels() -> None:
    result = lowered(2, CUBE)
    kernels = {candidate.kernel for candidate in result.candidates if candidate.schedule.get("split") == "none"}
    assert len(kernels) >= 500
    assert 3000 <= len(result.candidates) <= 20_000
    varying = [name for name in TENSOR if len({candidate.schedule.get(name) for candidate in result.candidates}) > 1]
    assert set(varying) >= {
        "tile_m", "tile_n", "tile_k", "warps_m", "warps_n", "stages", "fragments", "epilogue_path", "maxnreg", "split",
        "split_k", "stream_blocks",
    }  # fmt: skip


def test_level_2_tries_every_division_of_k_by_default() -> None:
    long = {"m": 128, "n": 128, "k": 16384, **FP16}
    candidates = lower(matmul(**long), target("sm_90a"), Search(level=2, limit=2000, seed=1)).candidates
    tried = {(candidate.schedule.get("split"), candidate.schedule.get("split_k")) for candidate in candidates}
    slices = (2, 4, 8, 16, 32, 64)
    assert tried == {("none", 1), ("stream", 1), *((way, count) for way in ("workspace", "atomic") for count in slices)}
    assert {candidate.schedule.get("stream_blocks") for candidate in candidates} == {0, 132, 264}


@pytest.mark.parametrize("n", [4096, 6144, 28672])
@pytest.mark.parametrize("k", [4096, 14336])
@pytest.mark.parametrize("m", [1, 16])
def test_decoding_takes_small_tiles_and_slices_of_k_where_the_grid_does_not_fill_the_device(
    m: int, n: int, k: int
) -> None:
    problem, sheet = matmul(m=m, n=n, k=k, **BF16), target("sm_90a")
    result = default({"m": m, "n": n, "k": k, **BF16})
    assert result["tile_m"] == 16
    grid = blocks(problem, result["tile_m"], result["tile_n"])
    assert (result["split_k"] > 1) == (grid < sheet.sm_count)
    assert grid * result["split_k"] >= sheet.sm_count


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("fields", LARGE[:4] + LARGE[7:], ids=str)
def test_the_default_has_large_tiles_that_keep_the_device_busy(fields: dict[str, Any], arch: str) -> None:
    result, sheet = default(fields, arch), target(arch)
    # Half of it at least: a second round of blocks, or a second launch, must be worth more than the rest.
    assert 2 * blocks(matmul(**fields), result["tile_m"], result["tile_n"]) * result["split_k"] >= sheet.sm_count
    assert result["tile_m"] * result["tile_n"] >= 64 * 64
    assert result["copy"] == "cp_async"
    assert result["stages"] >= 3


def test_large_squares_get_larger_tiles_than_small_ones() -> None:
    area = [default({**CUBE, "m": size, "n": size, "k": size}) for size in (128, 1024, 8192)]
    sizes = [int(result["tile_m"]) * int(result["tile_n"]) for result in area]
    assert sizes == sorted(set(sizes))


def test_long_sums_of_few_tiles_are_split() -> None:
    assert default({"m": 128, "n": 128, "k": 16384, **FP16})["split_k"] >= 16


def test_short_sums_have_a_constant_length() -> None:
    assert default({"m": 128, "n": 128, "k": 64, "batch": 96, **FP16})["static_k"] == 64
    assert default(CUBE)["static_k"] == 0


@pytest.mark.parametrize(
    ("fields", "arch", "copy", "mma_k"),
    [
        (FP16, "sm_75", "registers", 8),
        (FP16, "sm_80", "cp_async", 16),
        ({**FP16, "lda": 1030, "ldb": 1030}, "sm_90a", "cp_async", 16),
        ({**FP16, "n": 1023}, "sm_90a", "registers", 16),
        ({"dtype": "int8", "layout": "nt"}, "sm_90a", "cp_async", 32),
        ({"dtype": "int8", "layout": "nn"}, "sm_90a", "registers", 32),
        ({"dtype": "float32", "allow_tf32": True, "n": 1023}, "sm_80", "cp_async", 8),
    ],
)
def test_copies_and_instructions_are_what_the_problem_and_the_target_allow(
    fields: dict[str, Any], arch: str, copy: str, mma_k: int
) -> None:
    result = lowered(1, {**CUBE, **fields}, arch)
    assert {(candidate.schedule.get("copy"), candidate.schedule.get("mma_k")) for candidate in result.candidates} == {
        (copy, mma_k)
    }


def test_any_list_of_slices_is_tried() -> None:
    lowered = lower(matmul(**CUBE), target("sm_90a"), Search(tunables={"split_k": [1, 3, 5, 7], "tile_m": [128]}))
    tried = {(candidate.schedule.get("split"), candidate.schedule.get("split_k")) for candidate in lowered.candidates}
    assert tried >= {("workspace", 3), ("workspace", 5), ("workspace", 7), ("atomic", 3), ("none", 1)}
    assert {way for way, slices in tried if slices > 1} == {"workspace", "atomic"}


@pytest.mark.parametrize(("way", "name"), [("atomic", "split_k"), ("stream", "stream_blocks")])
def test_a_way_to_divide_k_brings_its_own_values(way: str, name: str) -> None:
    fields = {**CUBE, "m": 640, "n": 640}
    candidates = lower(matmul(**fields), target("sm_90a"), Search(tunables={"split": [way]})).candidates
    assert candidates
    assert {candidate.schedule.get("split") for candidate in candidates} == {way}
    assert len({candidate.schedule.get(name) for candidate in candidates}) > 1


def test_a_value_list_of_another_tunable_keeps_level_1_s_division_of_k() -> None:
    fields = {"m": 16, "n": 4096, "k": 4096, **BF16}
    built, level = space({"tunables": {"stages": [3, 5]}}, **fields), space({"level": 1}, **fields)
    assert built.linked == level.linked
    assert built.tunables == {**level.tunables, "stages": (3, 5)}


@pytest.mark.parametrize(
    ("search", "fields", "field", "said"),
    [
        ({"tunables": {"thread_m": [4]}}, FP16, "search.tunables.thread_m",
         "'thread_m' is no tunable on tensor cores, where sm_90a computes this float16 matmul"),
        ({"tunables": {"mma_k": [16]}}, {}, "search.tunables.mma_k", "'mma_k' is no tunable on CUDA cores"),
        ({"schedules": [{"tile_m": 64}, {"warps_m": 2}]}, {}, "search.schedules.1.warps_m", "'warps_m' is no tunable"),
        ({"tunables": {"tile_q": [4]}}, FP16, "search.tunables.tile_q", "unknown tunable 'tile_q'"),
    ],
)  # fmt: skip
def test_a_tunable_of_the_other_kernel_is_refused_by_name(
    search: dict[str, Any], fields: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(UnknownTunable) as refused:
        space(search, **fields)
    assert refused.value.field == field
    assert refused.value.message.startswith(said)
    assert set(refused.value.allowed) == (TENSOR if fields else SIMT)


@pytest.mark.parametrize(
    ("name", "value", "fields", "said"),
    [
        ("tile_k", 64, {}, "allowed: 8, 16, 32"),
        ("stages", 3, {}, "allowed: 1, 2"),
        ("split", "stream", {}, "allowed: none, workspace, atomic"),
        ("split_k", 0, FP16, "allowed: 1 to 1024"),
        ("static_k", 2000, FP16, "allowed: 0 to 1024"),
        ("copy", "tma", FP16, "allowed: cp_async, registers"),
    ],
)
def test_a_value_is_checked_against_the_kernel_s_own_list(
    name: str, value: int | str, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidSearch) as refused:
        space({"tunables": {name: [value]}}, **fields)
    assert refused.value.field == f"search.tunables.{name}"
    assert said in refused.value.message


def test_the_catalogue_has_the_tunables_of_both_kernels() -> None:
    by_name = {tunable.name: tunable for tunable in OP.tunables}
    assert by_name.keys() == TENSOR | SIMT | {"algorithm", "truncate", "chain_k", "limb_split"}
    assert all(by_name[name].meaning.startswith("over rings only") for name in by_name.keys() - (TENSOR | SIMT))
    assert by_name["tile_k"].allowed == (8, 16, 32, 64, 128)
    assert by_name["split"].allowed == ("none", "workspace", "atomic", "stream")
    assert by_name["warp_m"].meaning.startswith("on CUDA cores only: ")
    assert by_name["warps_m"].meaning.startswith("on tensor cores only: ")
    assert by_name["raster"].meaning.startswith("order of the tiles")
    assert OP.launch_tunables == ("raster", "split_k", "stream_blocks")


def test_launch_values_follow_the_launch_abi() -> None:
    schedule = Schedule.of({**default(CUBE), "raster": 4, "split": "atomic", "split_k": 3})
    assert OP.launch_values(schedule) == [4, 3, 0]
    assert OP.launch_values(Schedule.of({**default({"m": 64, "n": 64, "k": 64}), "raster": 1})) == [1, 1, 0]
