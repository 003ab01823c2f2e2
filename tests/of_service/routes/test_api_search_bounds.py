"""Searches that ask for too much are refused before anything is written: with the number, the lists and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from codegen.operator import Operator
from codegen.operators import operator
from codegen.operators.matmul import tensor_space
from codegen.search.search import Search
from codegen.targets import target
from cukiln.types import ProblemDetail
from service.requests.resolve import MOST_LOOKS
from tests.support.fixtures.api import MATMUL, Api, serving

CUBE = {"operator": "matmul", "m": 4096, "n": 4096, "k": 4096, "dtype": "float16"}
EVERY: dict[str, list[Any]] = {
    tunable.name: list(tunable.allowed)[:64]
    for tunable in tensor_space.TUNABLES
    if not isinstance(tunable.allowed, range)
}
EVERY["split_k"], EVERY["static_k"], EVERY["stream_blocks"] = list(range(1, 65)), list(range(64)), list(range(64))
EVERY["tile_k"] = [16, 32, 64]
SMALL: dict[str, list[Any]] = {"tile_m": [64, 128], "tile_n": [64, 128]}


@pytest.fixture(scope="module")
def small_bounds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with serving(tmp_path_factory.mktemp("api"), max_space=100, max_candidates_per_problem=10) as api:
        yield api


def refused(api: Api, *problems: dict[str, Any], **fields: Any) -> ProblemDetail:
    before = api.rows()
    answer = api.submit(*problems, **fields)
    assert answer.status_code == 422, answer.text
    assert api.rows() == before
    return ProblemDetail.model_validate_json(answer.content)


def accepted(api: Api, *problems: dict[str, Any], **fields: Any) -> None:
    answer = api.submit(*problems, **fields)
    assert answer.status_code == 202, answer.text
    api.client.delete(f"/v1/jobs/{answer.json()['job']}").raise_for_status()


def test_a_space_over_the_bound_is_refused_with_its_number_its_lists_and_what_to_do(shared_api: Api) -> None:
    detail = refused(shared_api, MATMUL, {**CUBE, "search": {"tunables": EVERY}})
    assert detail.type == "urn:cukiln:problem:search-space-too-large"
    assert detail.field == "problems[1].search.tunables"
    assert detail.allowed == {"maximum": 500_000}
    size = 1
    for name, values in EVERY.items():
        size *= len(values)
        assert f"{name} {len(values)}" in detail.detail
    assert size > 10**12
    assert (
        f"The search has {size:,} schedules (split_k 64 × static_k 64 × stream_blocks 64 × maxnreg 8" in detail.detail
    )
    assert "at most 500,000 are looked at without a limit: give a limit" in detail.detail


def test_a_limit_samples_what_is_too_large_to_look_at_in_full(api_with: Api) -> None:
    accepted(api_with, {**CUBE, "search": {"tunables": EVERY, "limit": 20_000}})


@pytest.fixture
def api_with(tmp_path: Path) -> Iterator[Api]:
    with serving(tmp_path) as api:
        yield api


def test_the_bound_is_a_setting_with_both_outcomes(small_bounds: Api) -> None:
    problem = {**MATMUL, "m": 512, "n": 512, "k": 512}
    detail = refused(small_bounds, problem, search={"level": 2})
    assert detail.type == "urn:cukiln:problem:search-space-too-large"
    assert "at most 100 are" in detail.detail
    accepted(small_bounds, problem, search={"level": 0})
    accepted(small_bounds, problem, search={"level": 2, "limit": 10})


def test_the_job_s_search_is_named_once_with_a_problem_that_it_is_too_large_for(small_bounds: Api) -> None:
    problem = {**MATMUL, "m": 512, "n": 512, "k": 512}
    detail = refused(small_bounds, problem, problem, search={"level": 2})
    assert (detail.field, detail.errors) == ("search.level", None)
    assert detail.detail.startswith("For problems[0]: The search has ")


def test_problems_of_one_signature_with_spaces_of_their_own_are_each_looked_at(small_bounds: Api) -> None:
    few, many = {**MATMUL, "m": 4, "n": 4, "k": 4}, {**MATMUL, "m": 4096, "n": 4096, "k": 4096}
    search = {"tunables": {"stages": [1, 2]}}
    accepted(small_bounds, few, search=search)
    detail = refused(small_bounds, few, many, search=search)
    assert detail.field == "search.tunables"
    assert detail.detail.startswith("For problems[1]: ")


RING = {**MATMUL, "m": 64, "n": 64, "k": 64, "dtype": "int64", "fraction_bits": 4}
LOOSE = {**RING, "truncation": {"policy": "tolerance", "ulp": 200}}
CONV = {"operator": "conv2d", "n": 1, "h": 8, "w": 8, "c": 16, "k": 16, "dtype": "float16", "winograd": "f2"}
SQUARE, WIDE = {**CONV, "r": 3, "s": 3, "padding": 1}, {**CONV, "r": 5, "s": 5, "padding": 2, "winograd": "none"}


@pytest.mark.parametrize(("fine", "other", "tunables"), [
    (LOOSE, RING, {"truncate": ["product"]}),
    (RING, {**RING, "k": 20000}, {"algorithm": ["limbs"], "chain_k": [0]}),
    (SQUARE, WIDE, {"algorithm": ["winograd"]}),
])  # fmt: skip
@pytest.mark.parametrize("turned", [False, True])
def test_a_shared_search_that_means_nothing_for_one_problem_is_refused_by_its_place(
    small_bounds: Api, fine: dict[str, Any], other: dict[str, Any], tunables: dict[str, Any], turned: bool
) -> None:
    problems = (other, fine) if turned else (fine, other)
    detail = refused(small_bounds, *problems, search={"tunables": tunables, "limit": 10})
    assert detail.detail.startswith(f"For problems[{0 if turned else 1}]: ")
    assert detail.errors is None


def test_ten_thousand_problems_cost_a_bounded_number_of_looks(
    small_bounds: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    own = type(operator("matmul")).space

    def counted(self: Operator, *arguments: Any) -> Any:
        looks.append(1)
        return own(self, *arguments)

    monkeypatch.setattr(type(operator("matmul")), "space", counted)
    problems = [{**MATMUL, "m": 4 * number} for number in range(1, 3 * MOST_LOOKS // 2)]
    lists = {"tile_m": [16], "tile_n": [16], "thread_m": [4], "thread_n": [4]}
    accepted(small_bounds, *problems, search={"tunables": lists})
    assert len(looks) == 1 + MOST_LOOKS


@pytest.mark.parametrize(
    ("search", "field"),
    [
        ({"level": 1, "limit": 11}, "search.limit"),
        ({"level": 0, "limit": 100_000}, "search.limit"),
        ({"level": 0, "keep": 11}, "search.keep"),
        ({"level": 0, "keep": 12, "limit": 11}, "search.keep"),
    ],
)
def test_a_limit_or_keep_of_more_candidates_than_a_problem_may_have_is_refused(
    small_bounds: Api, search: dict[str, Any], field: str
) -> None:
    detail = refused(small_bounds, {**MATMUL, "search": search})
    name = field.rpartition(".")[2]
    assert (detail.type, detail.field) == ("urn:cukiln:problem:invalid-value", f"problems[0].{field}")
    assert detail.allowed == {"minimum": 1, "maximum": 10}
    assert f"{field} is {search[name]:,}, but a problem may have at most 10 candidates" in detail.detail
    assert refused(small_bounds, MATMUL, MATMUL | {"n": 80}, search=search).errors is None


@pytest.mark.parametrize(
    "search", [{"level": 0, "limit": 10}, {"level": 0, "keep": 10}, {"level": 1, "limit": 500, "keep": 10}]
)
def test_a_sample_may_be_larger_than_what_is_kept_of_it(small_bounds: Api, search: dict[str, Any]) -> None:
    accepted(small_bounds, {**MATMUL, "search": search})


def test_a_lookup_may_name_any_search(small_bounds: Api) -> None:
    answer = small_bounds.client.post("/v1/lookups", json={"problems": [MATMUL], "search": {"level": 2}})
    assert answer.status_code == 200, answer.text


def test_schedules_are_listed_for_as_many_problems_as_a_job_may_have_candidates(tmp_path: Path) -> None:
    space = operator("matmul").space(operator("matmul").parse(MATMUL), target("sm_80"), Search(level=1))
    listed = {"schedules": [schedule.as_dict() for schedule in islice(space, 5)]}
    other = {**MATMUL, "epilogue": [{"op": "relu"}]}
    with serving(tmp_path, max_candidates_per_job=9) as api:
        accepted(api, MATMUL, {**MATMUL, "m": 80}, search=listed)  # of one signature
        accepted(api, {**MATMUL, "search": listed}, {**other, "search": {"level": 0}})
        detail = refused(api, MATMUL, other, {**MATMUL, "layout": "nt"}, search=listed)
        assert detail.type == "urn:cukiln:problem:search-space-too-large"
        assert (detail.field, detail.allowed, detail.errors) == ("search.schedules", {"maximum": 9}, None)
        assert (
            refused(api, MATMUL | {"search": listed}, other | {"search": listed}).field
            == "problems[1].search.schedules"
        )
