"""The compile benchmarks measure what they say: hidet's rule, the floor, the kernels and candidates they take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import bench_compile
from benchmarks.bench_compile import (
    CASES,
    HIDET_GROUP,
    Case,
    Compiled,
    Pending,
    Ways,
    cutlass_headers,
    cutlass_seconds,
    figures,
    first_kernels,
    fit_line,
    hidet_groups,
    model_candidates,
    require_equal_code,
)
from benchmarks.bench_tune import MODELS, problems_of, require_equal_winners
from benchmarks.shapes import public_shape, shape_sets, stored_sets
from codegen.lower import lower
from codegen.operators import operator, operators
from codegen.search.search import Search
from codegen.targets import target
from cukiln.types import Job
from tests.support.fixtures.compile import matmul_candidates
from workers.compile.toolchain import Toolchain
from workers.processes.processes import Processes

H100 = target("sm_90a")


@pytest.mark.parametrize(
    ("kernels", "workers", "sizes"),
    [
        (1, 2, [1]),
        (2, 2, [1, 1]),
        (3, 2, [2, 1]),
        (64, 2, [32, 32]),
        (65, 2, [17, 16, 16, 16]),
        (96, 2, [24, 24, 24, 24]),
        (96, 16, [6] * 16),
    ],
)
def test_hidets_rule_has_known_groups(kernels: int, workers: int, sizes: list[int]) -> None:
    assert [len(group) for group in hidet_groups(kernels, workers)] == sizes


@given(st.integers(1, 600), st.integers(1, 64))
def test_hidets_groups_hold_every_kernel_once_and_at_most_32(kernels: int, workers: int) -> None:
    groups = hidet_groups(kernels, workers)
    assert sorted(index for group in groups for index in group) == list(range(kernels))
    assert all(1 <= len(group) <= HIDET_GROUP for group in groups)
    assert len(groups) % workers == 0 or len(groups) == kernels


def test_a_straight_line_is_found_with_its_slope() -> None:
    assert fit_line([(24, 3.4), (48, 6.4), (96, 12.4)]) == pytest.approx((0.125, 1.0))


def test_r2_is_the_share_of_the_variance_that_the_line_explains() -> None:
    # By hand: 2 x - 1/3 leaves 2/3, -4/3 and 2/3; 8/3 of squares, of 32/3 about the mean.
    assert fit_line([(1, 1), (2, 5), (3, 5)]) == pytest.approx((2.0, 0.75))
    assert fit_line([(1, 2), (2, 2)]) == (0.0, 1.0)


@pytest.mark.parametrize("name", CASES)
def test_a_case_names_public_shapes_of_its_operator(name: str) -> None:
    case = CASES[name]
    assert name.partition("/")[0] == case.operator
    assert {public_shape(shape)["operator"] for shape in case.shapes} == {case.operator}
    assert case.model is None or case.operator in {problem["operator"] for problem in shape_sets()[case.model]}


def test_the_kernels_are_the_first_of_level_2_of_each_shape() -> None:
    case = CASES["matmul"]
    kernels, candidates = first_kernels(Case("matmul", case.shapes, 9), H100)
    assert candidates >= 9
    assert len(set(kernels)) == 9
    assert [kernel.signature_dict["dtype"] for kernel in kernels] == ["float32"] * 4 + ["float16"] * 5
    assert kernels[4:] == first_kernels(Case("matmul", case.shapes[1:], 5), H100)[0]
    problem = operator("matmul").parse(public_shape("square/float16_1024"))
    space = operator("matmul").space(problem, H100, Search(level=2))
    assert kernels[4] == operator("matmul").candidate(problem, space.by_index(0)).kernel


def test_the_groups_of_the_floor_hold_kernels_of_every_shape_alike() -> None:
    kernels, _ = first_kernels(CASES["matmul"], H100)
    for step in (1, 2, 4):
        kinds = [kernel.signature_dict["dtype"] for kernel in kernels[::step]]
        assert kinds.count("float16") == kinds.count("float32") == 48 // step


def test_the_candidates_of_a_model_are_those_of_its_problems() -> None:
    case = CASES["matmul"]
    candidates = model_candidates(case, H100, 3)
    assert len(candidates) == 3 * 6
    first = operator("matmul").parse(public_shape("bert_base/qkv"))
    assert candidates[:3] == list(lower(first, H100, Search(level=2, limit=3)).candidates)
    assert model_candidates(CASES["matmul/float16"], H100, 3) == []


def compiled(wall: float, code: str = "a", **phases: float) -> Compiled:
    return Compiled(wall, 2 * wall, {"kernel": code}, phases, [100, 70, 50])


DEVICE = {24: 3.9, 48: 7.5, 96: 14.7}  # 0.15 s for each kernel, 0.3 s for the file


def turns() -> list[dict[str, Compiled]]:
    """Three rounds."""
    ways = {"baseline": 80.0, "hidet_rule": 16.0, "ours": 8.0}
    return [{name: compiled(wall * slow, cicc=slow) for name, wall in ways.items()} for slow in (1, 3, 0.5)]


def test_the_figures_are_of_the_medians_and_have_every_key() -> None:
    measured = figures(turns(), DEVICE, 96, 120, 2)
    assert measured.keys() >= {
        "kernels", "candidates", "baseline_s", "hidet_rule_s", "ours_s", "ratio_wall", "ratio_cpu", "ratio_hidet",
        "floor_s", "over_floor", "phases",
    }  # fmt: skip
    assert (measured["baseline_s"], measured["ours_s"], measured["kernels"], measured["candidates"]) == (
        80.0,
        8.0,
        96,
        120,
    )
    ratios = [measured[f"ratio_{name}"] for name in ("wall", "cpu", "hidet")]
    assert ratios == [10.0, 10.0, 2.0]
    assert measured["phases"] == {"cicc": 1}
    assert measured["memory"]["peak_bytes"] == 170  # two processes: never more than the two largest at once


def test_the_floor_leaves_a_files_fixed_seconds_out() -> None:
    measured = figures(turns(), DEVICE, 96, 120, 2)
    assert measured["floor_s"] == pytest.approx(0.15 * 96 / 2)
    assert (measured["over_floor"], measured["floor"]["r2"]) == (1.11, 1.0)
    assert measured["over_floor_cpu"] == measured["over_floor"], "two processes were busy all the time"


def test_ways_that_come_to_different_code_end_the_benchmark() -> None:
    require_equal_code({"one": compiled(1.0), "other": compiled(2.0)})
    with pytest.raises(SystemExit, match="1 kernels differs between one and other"):
        require_equal_code({"one": compiled(1.0), "other": compiled(2.0, code="b")})


def test_workers_take_each_kernel_once_the_longest_first_and_less_towards_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_compile, "kernel_seconds", lambda kernel: 0.5)
    kernels = [candidate.kernel for candidate in matmul_candidates(60)]
    files = list(Pending([*kernels, *kernels[:7]], 2))
    assert sorted(kernel.id for file in files for kernel in file) == sorted(kernel.id for kernel in kernels)
    assert [len(file) for file in files] == [23, 18, 9, 5, 2, 1, 1, 1]


def test_all_ways_come_to_the_same_code(toolchain: Toolchain, processes: Processes) -> None:
    kernels = [candidate.kernel for candidate in matmul_candidates(3)]
    ways = Ways(toolchain, H100, processes, 2)
    found = {"alone": ways.alone(kernels), "hidet": ways.hidet(kernels), "ours": ways.ours(kernels)}
    require_equal_code(found)
    assert found["ours"].digests.keys() == {kernel.id for kernel in kernels}
    assert [len(way.files) for way in found.values()] == [3, 2, 1]
    assert {"cicc", "ptxas", "host", "link"} <= found["ours"].phases.keys()
    assert all(way.cpu > 0 for way in found.values())
    assert ways.device_seconds(kernels) < found["ours"].cpu * 1.5


def test_cutlass_is_looked_for_where_it_was_named(tmp_path: Any) -> None:
    assert cutlass_headers(tmp_path) is None
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass/cutlass.h").write_text("")
    assert cutlass_headers(tmp_path) == tmp_path


def test_cutlass_is_compiled_beside_a_kernel_of_the_same_tile(tmp_path: Any, processes: Processes) -> None:
    (tmp_path / "cutlass").mkdir()
    lines = [f"#define CUTLASS_{part} {number}\n" for part, number in (("MAJOR", 4), ("MINOR", 2), ("PATCH", 0))]
    (tmp_path / "cutlass/version.h").write_text("".join(lines))
    texts: list[str] = []

    def library(text: str, folder: Any, include: Any) -> Any:
        texts.append(text)
        return SimpleNamespace(wall_seconds=1.0, cpu_seconds=3.0 if include else 2.0)

    ways: Any = SimpleNamespace(library=library)
    seconds = cutlass_seconds(tmp_path, ways, processes, H100)
    assert (seconds["version"], seconds["ratio_cpu"]) == ("4.2.0", 1.5)
    assert "static constexpr int tile_m = 128;" in texts[1]


def test_a_models_problems_are_those_whose_operator_exists() -> None:
    problems = problems_of(MODELS, ["matmul"])
    assert len(problems) == 6 + 24
    assert len({problem["m"] for problem in problems if problem["name"].startswith("llama3_8b")}) == 6
    assert len(problems_of(MODELS, ["matmul", "attention"])) == 6 + 24 + 3
    assert {problem["operator"] for problem in problems_of(MODELS, operators())} <= set(operators())
    attention = problems_of(MODELS, operators(), ["bert_base/attn", "llama3_8b/decode"])
    assert [problem["operator"] for problem in attention] == ["attention", "attention"]


def test_a_model_is_whole() -> None:
    """BERT-base's layer is the attention and the products beside it; the bench of models leaves out none."""
    assert problems_of(MODELS, operators()) == [problem for model in MODELS for problem in stored_sets()[model]]


def job(*schedules: dict[str, int] | None) -> Job:
    """A finished job with these winners."""
    winner = {
        "candidate": "c",
        "verified": "cpu",
        "ranked_by": "predicted",
        "predicted_us": 1.0,
        "measured_us": None,
        "so_sha256": "d",
    }
    problems = [
        {
            "name": f"p{number}", "key": "k", "operator": "matmul", "problem": {}, "target": "sm_90a",
            "device_class": "predicted:sm_90a", "state": "done", "cached": False, "candidates": 1,
            "winner": schedule and {**winner, "schedule": schedule},
        }
        for number, schedule in enumerate(schedules)
    ]  # fmt: skip
    progress = {name: {"done": 1, "total": 1} for name in ("lower", "compile", "verify", "finish")}
    return Job.model_validate(
        {
            "job": "j", "state": "done", "cached": False, "priority": "normal", "created_at": 0.0, "seconds": {},
            "progress": {**progress, "candidates_done": 1, "candidates_failed": 0}, "problems": problems,
        }
    )  # fmt: skip


def test_both_ways_of_the_model_must_have_the_same_winners() -> None:
    require_equal_winners(job({"tile": 1}), job({"tile": 1}))
    for other in (job({"tile": 2}), job(None)):
        with pytest.raises(SystemExit, match="p0: the winners differ"):
            require_equal_winners(job({"tile": 1}), other)
