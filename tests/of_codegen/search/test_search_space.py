"""Search spaces: by index, in levels, by lists, explicit; sampled with a seed; which search covers which."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from codegen.errors import InvalidSearch
from codegen.lower import lower
from codegen.operators import operator
from codegen.search.schedule import Schedule
from codegen.search.search import Search, covers
from codegen.search.space import Linked, SearchSpace, Tunable, build_space, permuted
from codegen.targets import target
from tests.support.fixtures.codegen import default_candidate, matmul

LISTS = st.dictionaries(
    st.sampled_from("abcdef"), st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True).map(tuple), max_size=4
)
SHAPES = [
    (1024, 1024, 1024, 1),
    (1024, 3072, 768, 1),
    (128, 128, 64, 96),
    (1, 6144, 4096, 1),
    (1, 1, 1, 1),
    (7, 9, 1000, 3),
]


def space(search: dict[str, Any], **fields: Any) -> SearchSpace:
    return operator("matmul").space(matmul(**fields), target("sm_90a"), Search.model_validate(search))


@given(LISTS)
def test_every_index_is_a_distinct_schedule_and_leads_back(lists: dict[str, tuple[int, ...]]) -> None:
    space = SearchSpace(values=tuple(lists.items()))
    schedules = [space.by_index(index) for index in range(space.size)]
    assert len(set(schedules)) == space.size
    assert [space.index_of(schedule) for schedule in schedules] == list(range(space.size))
    assert all(schedule.as_dict().keys() == lists.keys() for schedule in schedules)
    assert list(space) == schedules


PAIRS = Linked(("way", "count"), (("none", 1), ("sliced", 2), ("sliced", 4)))


@given(LISTS)
def test_linked_tunables_take_their_choices_and_no_others(lists: dict[str, tuple[int, ...]]) -> None:
    space = SearchSpace(values=tuple(lists.items()), linked=(PAIRS,))
    schedules = list(space)
    assert space.size == len(schedules) == len(set(schedules)) == 3 * SearchSpace(values=tuple(lists.items())).size
    assert [space.index_of(schedule) for schedule in schedules] == list(range(space.size))
    assert {(schedule.get("way"), schedule.get("count")) for schedule in schedules} == set(PAIRS.choices)
    assert all(schedule == Schedule.of(schedule.as_dict()) for schedule in schedules)
    assert space.index_of(Schedule.of({**schedules[0].as_dict(), "way": "none", "count": 2})) is None
    assert space.tunables == {**lists, "way": ("none", "sliced"), "count": (1, 2, 4)}


@pytest.mark.parametrize(
    ("search", "size", "linked"),
    [
        ({"level": 1}, 2 * 3, True),
        ({"level": 2}, 3 * 1, True),
        ({"level": 0}, 1, False),
        ({"tunables": {"a": [1]}}, 1 * 3, True),
        ({"tunables": {"count": [2, 3, 4]}}, 2 * 2 * 3, False),
        ({"schedules": [{"a": 2, "way": "none", "count": 9}]}, 1, False),
    ],
)
def test_a_search_that_names_a_linked_tunable_takes_every_combination(
    search: dict[str, Any], size: int, linked: bool
) -> None:
    tunables = (
        Tunable("a", (1, 2, 3), False, "", 1),
        Tunable("way", ("none", "sliced"), False, "", "none"),
        Tunable("count", range(1, 10), True, "", 1),
    )
    default = Schedule.of({"a": 1, "way": "none", "count": 1})
    levels: dict[int, dict[str, tuple[int | str, ...]]] = {1: {"a": (1, 2)}, 2: {"a": (1, 2, 3)}}
    both = {1: PAIRS, 2: Linked(PAIRS.names, PAIRS.choices[:1])}
    space = build_space(Search.model_validate(search), tunables, levels, default, both)
    assert space.size == len(set(space)) == size
    assert bool(space.linked) is linked
    assert all(schedule.as_dict().keys() == {"a", "way", "count"} for schedule in space)


def test_an_index_outside_is_refused() -> None:
    space = SearchSpace(values=(("a", (1, 2)),))
    for index in (-1, 2):
        with pytest.raises(IndexError, match="2 schedules"):
            space.by_index(index)
    assert space.index_of(Schedule.of({"a": 3})) is None
    assert space.index_of(Schedule.of({"b": 1})) is None


def test_a_huge_space_is_not_materialised() -> None:
    space = SearchSpace(values=tuple((f"t{i:02}", tuple(range(10))) for i in range(18)), limit=5, seed=7)
    assert space.size == 10**18
    sample = list(islice(space, 5))
    assert len(set(sample)) == 5
    assert space.by_index(10**18 - 1).get("t17") == 9


@given(st.integers(0, 400), st.integers(0, 2**53 - 1))
def test_a_permutation_has_every_index_once(size: int, seed: int) -> None:
    assert sorted(permuted(size, seed)) == list(range(size))


def test_seeds_give_different_orders_and_one_seed_always_the_same() -> None:
    assert list(permuted(1000, 1)) == list(permuted(1000, 1))
    assert list(permuted(1000, 1)) != list(permuted(1000, 2))
    assert list(permuted(1000, 1)) != list(range(1000))


@pytest.mark.parametrize("limit", [1, 2, 10, 63])
def test_a_smaller_limit_is_a_prefix_of_accepted_schedules(limit: int) -> None:
    problem, sheet = matmul(m=1024, n=1024, k=1024), target("sm_90a")
    large = lower(problem, sheet, Search(level=2, limit=64, seed=11))
    small = lower(problem, sheet, Search(level=2, limit=limit, seed=11))
    assert len(small.candidates) == limit
    assert small.candidates == large.candidates[:limit]
    assert large.candidates != lower(problem, sheet, Search(level=2, limit=64, seed=12)).candidates


@given(LISTS, st.integers(0, 2**53 - 1), st.sampled_from([frozenset(), frozenset("ab"), frozenset({"count", "f"})]))
def test_a_sample_has_every_schedule_once_and_each_kernel_before_any_again(
    lists: dict[str, tuple[int, ...]], seed: int, launch_time: frozenset[str]
) -> None:
    space = SearchSpace(tuple(lists.items()), (PAIRS,), None, limit=1, seed=seed, launch_time=launch_time)
    schedules = list(space)
    assert len(schedules) == len(set(schedules)) == space.size
    kernels = [schedule.only(frozenset(schedule.as_dict()) - launch_time) for schedule in schedules]
    distinct = len(set(kernels))
    assert len(set(kernels[:distinct])) == distinct


def test_problems_whose_launches_alone_differ_sample_the_same_kernels() -> None:
    def sample(counts: tuple[int, ...]) -> list[Schedule]:
        space = SearchSpace((("a", tuple(range(50))), ("count", counts)), limit=9, launch_time=frozenset({"count"}))
        return [schedule.only(frozenset("a")) for schedule in islice(space, 20)]

    assert sample((1, 2)) == sample((1, 2, 4, 8, 16))


def test_a_sample_begins_with_the_default() -> None:
    lowered = lower(matmul(m=1024, n=1024, k=1024), target("sm_90a"), Search(level=2, limit=1, seed=5))
    assert lowered.candidates[0].schedule == default_candidate(matmul(m=1024, n=1024, k=1024)).schedule


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_levels_are_nested_and_none_is_empty(shape: tuple[int, ...], arch: str) -> None:
    problem = matmul(**dict(zip(("m", "n", "k", "batch"), shape, strict=True)))
    op, sheet = operator("matmul"), target(arch)
    zero = {candidate.schedule for candidate in lower(problem, sheet, Search(level=0)).candidates}
    schedules = {candidate.schedule for candidate in lower(problem, sheet, Search(level=1)).candidates}
    two = op.space(problem, sheet, Search(level=2))
    assert len(zero) == 1
    assert zero <= schedules
    assert all(two.index_of(schedule) is not None for schedule in schedules)


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_level_1_of_a_large_problem_has_64_to_130_candidates(shape: tuple[int, ...]) -> None:
    problem = matmul(layout="nt", **dict(zip(("m", "n", "k", "batch"), shape, strict=True)))
    lowered = lower(problem, target("sm_90a"), Search(level=1))
    assert 64 <= len(lowered.candidates) <= 130


def test_level_2_has_thousands_of_candidates_and_many_tunables_vary() -> None:
    lowered = lower(matmul(m=1024, n=1024, k=1024), target("sm_90a"), Search(level=2))
    assert 3000 <= len(lowered.candidates) <= 10_000
    names = [name for name, _ in lowered.candidates[0].schedule.values]
    varying = [name for name in names if len({candidate.schedule.get(name) for candidate in lowered.candidates}) > 1]
    assert len(varying) >= 6
    assert len({candidate.kernel.id for candidate in lowered.candidates}) >= 1000


def test_small_problems_get_small_tiles_by_default() -> None:
    assert default_candidate(matmul(m=1, n=4096, k=4096)).schedule.get("tile_m") == 16
    assert default_candidate(matmul(m=4096, n=4096, k=4096)).schedule.get("tile_m") == 128


def test_value_lists_replace_those_of_level_1() -> None:
    built = space({"tunables": {"tile_m": [128, 64, 64], "unroll_k": [4.0]}}, m=1024, n=1024, k=1024)
    level = space({"level": 1}, m=1024, n=1024, k=1024)
    assert built.tunables == {**level.tunables, "tile_m": (64, 128), "unroll_k": (4,)}


def test_explicit_schedules_are_tried_once_each() -> None:
    schedule = default_candidate(matmul()).schedule.as_dict()
    built = space({"schedules": [schedule, {**schedule, "raster": 1}, dict(reversed(schedule.items()))]})
    assert built.size == 2
    assert {schedule.get("raster") for schedule in built} == {0, 1}
    assert built.index_of(Schedule.of({**schedule, "raster": 1})) is not None
    assert built.index_of(Schedule.of({**schedule, "raster": 8})) is None


@pytest.mark.parametrize(
    ("search", "field", "allowed"),
    [
        ({"tunables": {"tile_q": [1]}}, "search.tunables.tile_q", "tile_m"),
        ({"tunables": {"tile_m": [64, 48]}}, "search.tunables.tile_m", 128),
        ({"tunables": {"tile_m": ["64"]}}, "search.tunables.tile_m", 64),
        ({"schedules": [{"tile_q": 1}]}, "search.schedules.0.tile_q", "tile_m"),
        ({"schedules": [{"tile_m": 64, "fragments": 3}]}, "search.schedules.0.fragments", 2),
    ],
)
def test_an_unknown_tunable_or_value_is_named_with_what_is_allowed(search: Any, field: str, allowed: Any) -> None:
    with pytest.raises(InvalidSearch) as refused:
        space(search)
    assert refused.value.field == field
    assert allowed in refused.value.allowed


def test_a_schedule_with_a_forbidden_value_is_refused() -> None:
    schedule = {**default_candidate(matmul()).schedule.as_dict(), "tile_m": 48}
    with pytest.raises(InvalidSearch, match="tile_m = 48 is not allowed; allowed: 16, 32, 64, 128, 256"):
        space({"schedules": [schedule]})


@pytest.mark.parametrize(
    ("search", "field"),
    [
        ({"level": 3}, "level"), ({"level": -1}, "level"), ({"level": "1"}, "level"), ({"depth": 1}, "depth"),
        ({"level": True}, "level"), ({"level": False}, "level"),
        ({"level": 1, "limit": 0}, "limit"), ({"level": 1, "limit": 10**9}, "limit"),
        ({"level": 1, "seed": -1}, "seed"),
        ({"level": 1, "seed": 2**53}, "seed"), ({"tunables": {"tile_m": []}}, "tunables.tile_m"),
        ({"tunables": {}}, "tunables"),
        ({"schedules": []}, "schedules"), ({"tunables": {"tile_m": [1.5]}}, "tunables.tile_m.0"),
        ({"tunables": {"tile_m": [True]}}, "tunables.tile_m.0"), ({"level": 1, "tunables": {"tile_m": [64]}}, ""),
    ],
)  # fmt: skip
def test_a_malformed_search_is_refused_at_its_field(search: Any, field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Search.model_validate(search)
    assert field in {".".join(map(str, error["loc"])) for error in refused.value.errors()}


def test_the_default_search_is_level_1() -> None:
    assert Search() == Search(level=1)
    assert Search.model_validate({"limit": 4.0}).canonical() == {"level": 1, "limit": 4, "seed": 0}


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"level": 1}, {"level": 1.0, "seed": 9}),
        ({"tunables": {"a": [1, 2], "b": [3]}}, {"tunables": {"b": [3.0], "a": [2, 1, 1]}}),
        ({"schedules": [{"a": 1}, {"a": 2}]}, {"schedules": [{"a": 2}, {"a": 1}, {"a": 2}]}),
        ({"tunables": {"a": ["x", 1]}}, {"tunables": {"a": [1, "x"]}}),
    ],
)
def test_the_canonical_search_ignores_spelling(one: Any, two: Any) -> None:
    assert Search.model_validate(one).canonical() == Search.model_validate(two).canonical()


@pytest.mark.parametrize(
    ("done", "asked", "covered"),
    [
        ({"level": 1}, {"level": 1}, True),
        ({"level": 2}, {"level": 1}, True),
        ({"level": 2}, {"level": 0, "limit": 3, "seed": 4}, True),
        ({"level": 1}, {"level": 2}, False),
        ({"level": 1}, {"level": 2, "limit": 1}, False),
        ({"level": 1, "limit": 10}, {"level": 1}, False),
        ({"level": 1, "limit": 10}, {"level": 1, "limit": 10}, True),
        ({"level": 1, "limit": 10}, {"level": 1, "limit": 9}, True),
        ({"level": 1, "limit": 10}, {"level": 1, "limit": 11}, False),
        ({"level": 1, "limit": 10}, {"level": 1, "limit": 9, "seed": 1}, False),
        ({"level": 2, "limit": 10}, {"level": 1, "limit": 5}, False),
        ({"tunables": {"a": [1, 2]}}, {"tunables": {"a": [2]}}, True),
        ({"tunables": {"a": [1, 2]}}, {"tunables": {"a": [2, 3]}}, False),
        ({"tunables": {"a": [1, 2]}}, {"tunables": {"a": [1], "b": [1]}}, False),
        ({"tunables": {"a": [1], "b": [1]}}, {"tunables": {"a": [1]}}, False),
        ({"tunables": {"a": [1, 2]}}, {"level": 0}, False),
        ({"level": 2}, {"tunables": {"a": [1]}}, False),
        ({"schedules": [{"a": 1}, {"a": 2}]}, {"schedules": [{"a": 2}]}, True),
        ({"schedules": [{"a": 1}]}, {"schedules": [{"a": 2}]}, False),
        ({"level": 2}, {"schedules": [{"a": 1}]}, False),
    ],
)
def test_what_covers_what(done: Any, asked: Any, covered: bool) -> None:
    assert covers(Search.model_validate(done), Search.model_validate(asked)) is covered
