"""`keep`: of a search only the candidates that are predicted fastest before anything is compiled."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from codegen.lower import Lowered, lower
from codegen.operator import LaunchBounds, Operator
from codegen.operators import operator
from codegen.predict.predict_uncompiled import BestPredicted, estimate, predict_uncompiled
from codegen.predict.roofline import predict
from codegen.search.rules import Accepted
from codegen.search.search import Search, covers
from codegen.targets import target
from cukiln.types import ProblemDetail
from storage.entities.searches import is_covered, search_entry
from tests.support.fixtures.api import MATMUL, Api
from tests.support.fixtures.codegen import default_candidate, matmul
from tests.support.run.each_run import some_each_run

HALF = {"dtype": "float16", "out_dtype": "float16"}
PROBLEMS = {
    "tensor cores": matmul(m=512, n=768, k=1024, **HALF),
    "split k": matmul(m=16, n=32, k=1024, **HALF),
    "cuda cores": matmul(m=40, n=64, k=32),
    "few": matmul(m=1, n=16, k=8),
}
SM_90A = target("sm_90a")


@cache
def searched(name: str, **search: Any) -> Lowered:
    return lower(PROBLEMS[name], SM_90A, Search(**search))


def ids(found: Lowered) -> list[str]:
    return [candidate.id for candidate in found.candidates]


SEARCHES = st.fixed_dictionaries(
    {"level": st.sampled_from([0, 1, 2]), "limit": st.sampled_from([20, 60]), "seed": st.integers(0, 2)}
)


@settings(max_examples=25)
@given(st.sampled_from(sorted(PROBLEMS)), SEARCHES, st.integers(1, 70), st.integers(1, 70))
def test_what_is_kept_is_a_part_of_the_search_and_of_what_is_kept_of_more(
    name: str, search: dict[str, int], few: int, many: int
) -> None:
    few, many = sorted((few, many))
    every, more, fewer = (searched(name, **search, **kept) for kept in ({}, {"keep": many}, {"keep": few}))
    for found, count in ((more, many), (fewer, few)):
        assert len(found.candidates) == min(count, len(every.candidates))
        # The rest is there, in the order of the whole search.
        assert ids(found) == [each for each in ids(every) if each in set(ids(found))]
    assert set(ids(fewer)) <= set(ids(more))


@pytest.mark.parametrize("name", PROBLEMS)
def test_nothing_that_is_left_out_is_predicted_faster(name: str) -> None:
    every, kept = searched(name, level=1), searched(name, level=1, keep=5)
    slowest = max(predict_uncompiled(candidate, SM_90A).us for candidate in kept.candidates)
    left = [
        predict_uncompiled(candidate, SM_90A).us for candidate in every.candidates if candidate not in kept.candidates
    ]
    assert all(us >= slowest for us in left)
    assert left or len(every.candidates) <= 5


def test_of_equal_predictions_the_smaller_id_is_kept() -> None:
    lowered = lower(PROBLEMS["cuda cores"], SM_90A, Search(level=2))
    alike: dict[float, list[str]] = {}
    for one in lowered.candidates:
        alike.setdefault(predict_uncompiled(one, SM_90A).us, []).append(one.id)
    us, tied = next((us, sorted(group)) for us, group in sorted(alike.items()) if len(group) > 2)
    faster = sum(len(group) for other, group in alike.items() if other < us)
    for candidates in (lowered.candidates, lowered.candidates[::-1]):
        best = BestPredicted(faster + 2, SM_90A)
        for one in candidates:
            best.append(one)
        choice = best.choice()
        assert {each.id for each in choice.kept} & set(tied) == set(tied[:2])
        assert choice.best_left is not None
        assert choice.best_left[0].id == tied[2]
        assert choice.left == len(candidates) - len(choice.kept)


def test_what_is_left_out_is_counted_with_the_best_of_it_and_its_predicted_time() -> None:
    every, fewer = searched("tensor cores", level=1), searched("tensor cores", level=1, keep=3)
    rejection = fewer.rejections["keep"]
    assert rejection.count == len(every.candidates) - 3
    assert "3 that are predicted fastest" in rejection.message
    assert "before compiling" in rejection.message
    assert fewer.space_size == len(fewer.candidates) + sum(each.count for each in fewer.rejections.values())
    best_left = next(candidate for candidate in every.candidates if candidate.schedule.as_dict() == rejection.example)
    fourth = sorted(predict_uncompiled(candidate, SM_90A).us for candidate in every.candidates)[3]
    assert predict_uncompiled(best_left, SM_90A).us == fourth
    assert f"predicted {fourth:.2f} us" in rejection.message


def test_where_nothing_is_left_out_nothing_is_said() -> None:
    every = searched("few", level=1)
    assert searched("few", level=1, keep=len(every.candidates)) == every
    assert "keep" not in every.rejections


def test_the_sample_comes_before_the_choice() -> None:
    sample = {"level": 2, "limit": 40, "seed": 3}
    kept = searched("tensor cores", **sample, keep=4)
    every = searched("tensor cores", **sample).candidates
    best = sorted(every, key=lambda each: (predict_uncompiled(each, SM_90A).us, each.id))[:4]
    assert kept.candidates == tuple(each for each in every if each in best)


def test_the_request_s_policy_comes_before_the_choice() -> None:
    problem = PROBLEMS["split k"]
    lowered = lower(problem, SM_90A, Search(level=2, keep=8), workspace_limit=0)
    assert len(lowered.candidates) == 8
    assert all(
        operator("matmul").cost(problem, candidate.schedule).workspace_bytes == 0 for candidate in lowered.candidates
    )


def test_it_is_off_by_default() -> None:
    assert Search().keep is None
    assert "keep" not in Search().canonical()


@pytest.mark.parametrize("keep", [0, -1, 100_001, 1.5, "3", True])
def test_a_number_that_is_none_is_refused_at_its_field(keep: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        Search.model_validate({"level": 1, "keep": keep})
    assert {error["loc"][0] for error in refused.value.errors()} == {"keep"}


def test_the_service_names_the_field_and_what_is_allowed(shared_api: Api) -> None:
    answer = shared_api.client.post("/v1/jobs", json={"problems": [MATMUL], "search": {"level": 1, "keep": 0}})
    detail = ProblemDetail.model_validate_json(answer.content)
    assert (answer.status_code, detail.field) == (422, "search.keep")
    assert "1" in str(detail.allowed), detail.allowed


def test_the_published_schema_has_it() -> None:
    described = Search.model_json_schema()["properties"]["keep"]
    assert {"type": "integer", "minimum": 1, "maximum": 100_000} in described["anyOf"]
    assert described["default"] is None


@pytest.mark.parametrize(
    ("search", "canonical"),
    [
        ({"keep": 4.0}, {"level": 1, "keep": 4}),
        ({"level": 2, "limit": 9, "keep": 4}, {"level": 2, "limit": 9, "seed": 0, "keep": 4}),
        # What cannot leave anything out does not matter.
        ({"level": 0, "keep": 4}, {"level": 0}),
        ({"level": 2, "limit": 4, "keep": 4}, {"level": 2, "limit": 4, "seed": 0}),
        ({"schedules": [{"a": 1}, {"a": 2}, {"a": 1}], "keep": 2}, {"schedules": [{"a": 1}, {"a": 2}]}),
        ({"schedules": [{"a": 1}, {"a": 2}], "keep": 1}, {"schedules": [{"a": 1}, {"a": 2}], "keep": 1}),
        ({"tunables": {"a": [1]}, "keep": 1}, {"tunables": {"a": [1]}, "keep": 1}),
    ],
)
def test_the_canonical_search_has_it_where_it_matters(search: Any, canonical: dict[str, Any]) -> None:
    assert Search.model_validate(search).canonical() == canonical


COVERED = [
    ({"level": 1}, {"level": 1, "keep": 5}, True),
    ({"level": 2}, {"level": 1, "keep": 5}, True),
    ({"level": 1}, {"level": 2, "keep": 5}, False),
    ({"level": 1, "keep": 5}, {"level": 1}, False),
    ({"level": 1, "keep": 5}, {"level": 1, "keep": 5}, True),
    ({"level": 1, "keep": 5}, {"level": 1, "keep": 4}, True),
    ({"level": 1, "keep": 5}, {"level": 1, "keep": 6}, False),
    # The best of a part need not be among the best of the whole.
    ({"level": 2, "keep": 5}, {"level": 1, "keep": 5}, False),
    ({"level": 2, "keep": 5}, {"level": 0}, False),
    ({"level": 2, "limit": 9, "keep": 5}, {"level": 2, "limit": 9, "keep": 3}, True),
    ({"level": 2, "limit": 9, "keep": 5}, {"level": 2, "limit": 8, "keep": 3}, False),
    ({"level": 2, "limit": 9, "keep": 5}, {"level": 2, "limit": 9, "seed": 1, "keep": 3}, False),
    ({"level": 2, "limit": 9}, {"level": 2, "limit": 8, "keep": 3}, True),
    ({"level": 2, "limit": 9, "keep": 9}, {"level": 2, "limit": 8}, True),
    ({"tunables": {"a": [1, 2]}, "keep": 5}, {"tunables": {"a": [1]}, "keep": 5}, False),
    ({"schedules": [{"a": 1}, {"a": 2}], "keep": 2}, {"schedules": [{"a": 2}]}, True),
]  # fmt: skip


@pytest.mark.parametrize(("done", "asked", "covered"), COVERED)
def test_what_covers_what(done: Any, asked: Any, covered: bool) -> None:
    assert covers(Search.model_validate(done), Search.model_validate(asked)) is covered


@pytest.mark.parametrize(
    ("done", "asked", "name"),
    some_each_run([(done, asked, name) for done, asked, covered in COVERED if covered for name in PROBLEMS], 12),
)
def test_what_is_covered_was_tried(done: dict[str, Any], asked: dict[str, Any], name: str) -> None:
    if "level" in done:
        assert set(ids(searched(name, **asked))) <= set(ids(searched(name, **done)))


@pytest.mark.parametrize(
    ("done_limit", "asked_limit", "covered"), [(None, 1024, False), (1024, 1024, True), (1024, 512, False)]
)
def test_another_policy_keeps_others(done_limit: int | None, asked_limit: int, covered: bool) -> None:
    search = {"level": 1, "keep": 5}
    done, asked = (search_entry(search, "today", limit) for limit in (done_limit, asked_limit))
    assert is_covered([done], asked) is covered


# The prediction before a compile.


@pytest.mark.parametrize("name", PROBLEMS)
def test_registers_are_estimated_as_the_rules_do_within_the_launch_bounds(name: str) -> None:
    problem, op = PROBLEMS[name], operator("matmul")
    for candidate in searched(name, level=2, limit=60).candidates:
        estimated, bounds = estimate(candidate, SM_90A), op.launch_bounds(candidate.kernel, "run")
        assert estimated.registers == min(op.estimated_registers(candidate.kernel), bounds.registers(SM_90A))
        assert estimated.registers <= SM_90A.registers_per_thread
        assert predict_uncompiled(candidate, SM_90A) == predict(candidate, estimated, SM_90A)
        assert isinstance(op.rules(problem, candidate.schedule, SM_90A), Accepted)


def test_fewer_registers_by_order_let_more_blocks_reside() -> None:
    """With a limit on registers, the kernel's occupancy is another, before a compile too."""
    problem = matmul(m=4096, n=4096, k=4096, **HALF)
    tile: dict[str, Any] = {"tile_m": 128, "tile_n": 128, "warps_m": 2, "warps_n": 4, "stages": 2}
    free, limited = (default_candidate(problem, **tile, maxnreg=most) for most in (0, 96))
    assert estimate(limited, SM_90A).registers == 96 < estimate(free, SM_90A).registers
    assert predict_uncompiled(limited, SM_90A).blocks_per_sm > predict_uncompiled(free, SM_90A).blocks_per_sm


@pytest.mark.parametrize(
    ("bounds", "arch", "most"),
    [
        (LaunchBounds(256), "sm_90a", 255),
        (LaunchBounds(256, 2), "sm_90a", 128),
        (LaunchBounds(128, 2), "sm_90a", 255),
        (LaunchBounds(256, 1, 96), "sm_90a", 96),
        (LaunchBounds(1024, 2), "sm_90a", 32),
    ],
)
def test_launch_bounds_say_how_many_registers_a_thread_gets(bounds: LaunchBounds, arch: str, most: int) -> None:
    assert bounds.registers(target(arch)) == most


def test_an_operator_without_an_estimate_is_predicted_all_the_same() -> None:
    assert Operator.estimated_registers(operator("matmul"), default_candidate(PROBLEMS["few"]).kernel) > 0
