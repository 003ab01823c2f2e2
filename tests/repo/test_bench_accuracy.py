"""What the accuracy benchmark says: right ways and wrong ones, and any operator's problem."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.bench_accuracy import (
    WAYS,
    by_numpy,
    by_torch,
    chosen,
    default_problems,
    figures,
    report,
    winners,
    without_last_product,
)
from codegen.operators import operator
from cukiln.client import Client
from storage.config.settings import load_settings
from tests.support.fixtures.service import Started
from workers.processes.processes import Processes

MATMUL = {"operator": "matmul", "m": 8, "n": 16, "k": 3000, "layout": "tn", "dtype": "float32"}
CONV = {"operator": "conv2d", "n": 1, "h": 6, "w": 5, "c": 8, "k": 8, "r": 3, "s": 3, "padding": 1, "dtype": "float16"}


@pytest.fixture
def client(tmp_path: Path, at_work: Started) -> Iterator[Client]:
    settings = load_settings(data_dir=tmp_path, port=0, workers=1)
    with at_work(settings) as running, Client(running.url, cache_dir=tmp_path / "client") as found:
        yield found


def problem(**fields: Any) -> Any:
    return operator("matmul").parse({**MATMUL, **fields})


def test_a_product_left_out_hides_in_the_bound_of_a_long_sum_and_differs_on_integers() -> None:
    measured = figures(problem(k=200_000), {"numpy": by_numpy, "wrong": without_last_product})
    right, wrong = measured["numpy"], measured["wrong"]
    assert right["integers_wrong"] == 0.0 and right["of_bound"] < 0.01
    assert wrong["of_bound"] < 1.0 and wrong["integers_wrong"] > 0.5
    assert wrong["rms"] > 1000 * right["rms"]
    assert figures(problem(k=300), {"wrong": without_last_product})["wrong"]["of_bound"] > 1.0


def test_an_error_is_reported_in_parts_of_the_results_size() -> None:
    def off(asked: Any, inputs: Any) -> Any:
        expected, _ = operator("matmul").reference(asked, inputs)
        return expected + 2.0 * np.sqrt(np.mean(expected**2)) * np.where(np.arange(16) == 3, 1.0, 0.0)

    measured = figures(problem(), {"off": off})["off"]
    assert measured["max"] == pytest.approx(2.0)
    assert measured["rms"] == pytest.approx(0.5)
    assert measured["integers_wrong"] == pytest.approx(1 / 16)


def test_a_way_that_does_not_know_the_problem_is_left_out() -> None:
    biased = problem(epilogue=[{"op": "bias", "axis": "n"}])
    assert figures(biased, {"numpy": by_numpy}) == {}
    assert figures(biased, {"torch": by_torch}) == {}


def test_any_operators_problem_is_computed_by_its_own_kernel() -> None:
    candidate = chosen(CONV, None)
    with closing(Processes()) as processes:
        row = report(candidate, candidate.problem, processes)
    assert row["sum_length"] == 72
    ours = row["figures"].pop("ours")
    assert ours["integers_wrong"] == 0.0 and 0.0 < ours["max"] < 2e-3 and ours["of_bound"] < 1.0
    assert set(row["figures"]) <= set(WAYS) - {"numpy"}
    for other in row["figures"].values():  # PyTorch's, where it is installed
        assert other["integers_wrong"] == 0.0 and other["of_bound"] < 1.0


@pytest.mark.parametrize("padding", [1, [[0, 1], [2, 0]]])
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("name", ["conv2d", "conv2d_dgrad", "conv2d_wgrad"])
def test_pytorchs_convolutions_are_right(name: str, layout: str, padding: Any) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    asked = {
        **CONV,
        "operator": name,
        "layout": layout,
        "padding": padding,
        "stride": 2,
        "groups": 2,
        "out_dtype": "float32",
    }
    measured = figures(operator(name).parse(asked), {"torch": by_torch})["torch"]
    assert measured["integers_wrong"] == 0.0 and 0.0 < measured["of_bound"] < 1.0


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_a_pixel_left_out_of_a_filter_gradient_differs_on_integers(layout: str) -> None:
    asked = {**CONV, "operator": "conv2d_wgrad", "layout": layout, "padding": 0, "n": 8, "h": 22, "w": 22}
    measured = figures(operator("conv2d_wgrad").parse(asked), {"wrong": without_last_product})["wrong"]
    assert measured["integers_wrong"] > 0.5
    padded = operator("conv2d_wgrad").parse({**asked, "padding": 1})
    assert figures(padded, {"wrong": without_last_product}) == {}


def test_a_jobs_winners_are_run_on_the_longest_sums_of_their_plans(client: Client) -> None:
    small = {**MATMUL, "k": 36, "name": "one"}
    job = client.tune([small], target="sm_80", search={"level": 0, "limit": 1})
    ((name, candidate, reduced),) = winners(job.job, client.url)
    assert (name, candidate.schedule.as_dict()) == ("one", job.problems[0].winner.schedule)
    assert reduced.sum_length == max(
        each.sum_length or 0 for each in operator("matmul").test_problems(candidate.kernel)
    )


def test_the_default_problems_have_a_long_sum_of_every_dtype() -> None:
    longest = {(p["dtype"], p.get("allow_tf32", False)) for p, _ in default_problems() if p["k"] == 8 * 56 * 56}
    assert longest == {("float32", False), ("float32", True), ("float16", False), ("bfloat16", False)}
