"""The prediction beside published runs: it ranks their tiles, and no small product is faster than any that was
measured."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.bench_prediction import figures
from benchmarks.published_runs import PublishedSet, Run, read_sets, sheet_of


@pytest.fixture(scope="module")
def rated() -> dict[str, dict[str, float]]:
    return {published.name: figures(published, [run.predicted for run in published.runs]) for published in read_sets()}


def test_the_best_of_a_few_predicted_fastest_is_nearly_the_best_of_all(rated: dict[str, dict[str, float]]) -> None:
    tiles = {name: row for name, row in rated.items() if row["top1"] is not None}
    assert len(tiles) == 3
    for row in tiles.values():
        assert row["top4"] >= 0.97 and row["top1"] >= 0.75 and row["rho"] > 0.65
    assert math.prod(row["top1"] for row in tiles.values()) ** (1 / 3) >= 0.85


def test_no_product_is_predicted_faster_than_the_fastest_that_was_measured(rated: dict[str, dict[str, float]]) -> None:
    row = rated["cublas-h100-bf16"]
    assert row["under_floor"] == 0 and row["rho"] > 0.95 and 0.8 < row["ratio_median"] < 1.25


def test_figures_are_those_of_their_definition() -> None:
    runs = [Run((1, 1, 1), measured, 0.0) for measured in (4.0, 1.0, 2.0)] + [Run((2, 2, 2), 3.0, 0.0)] * 2
    rated = figures(PublishedSet("x", "h100", "float16", tiles=True, runs=tuple(runs)), [1.0, 2.0, math.inf, 6.0, 6.0])
    # The predicted fastest takes four times the best of its problem; that of the other is as fast as all.
    assert rated["top1"] == 0.5 and rated["top4"] == 1.0 and rated["ratio_median"] == 2.0
    assert rated["rho"] == -0.5  # of the first problem; the other has nothing to rank


def test_a_problem_that_a_constant_was_fitted_to_is_not_evaluated_on() -> None:
    fitted = [Run((128, 4096, 4096), measured, 0.0) for measured in (4.0, 1.0)]
    runs = [*fitted, Run((2, 2, 2), 3.0, 0.0), Run((2, 2, 2), 6.0, 0.0)]
    published = PublishedSet("triton-h100-fp16", "h100", "float16", tiles=True, runs=tuple(runs))
    rated = figures(published, [1.0, 9.0, 3.0, 6.0])
    assert (rated["top1"], rated["ratio_median"], rated["rho"]) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("sgemm-64-rtx-9999.csv", "tile_m\n", "no GPU of its name has a data sheet; allowed: rtx-2080-ti"),
        ("other-h100.csv", "a,b\n1,2\n", "columns a, b are of no known kind"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, text: str, what: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=what):
        read_sets(tmp_path)


def test_a_gpu_has_its_own_data_sheet() -> None:
    gpu, sheet = sheet_of("sgemm-4096-rtx-2080-ti")
    assert (gpu, sheet.name, sheet.sm_count, sheet.dram_gb_s) == ("rtx-2080-ti", "sm_75", 68, 616.0)
