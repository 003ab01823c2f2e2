"""The bound on searches that look at every schedule: sizes without enumeration, and the lists that make them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.errors import SpaceTooLarge
from codegen.operators import operator
from codegen.operators.matmul import tensor_space
from codegen.search.schedule import Schedule
from codegen.search.search import Search, distinct
from codegen.search.space import Linked, SearchSpace
from codegen.search.space_bound import lists_text, require_bounded
from codegen.targets import target, targets
from storage.config.settings import Settings
from tests.support.fixtures.codegen import matmul

LISTS = st.dictionaries(
    st.sampled_from("abcde"), st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True).map(tuple), max_size=5
)
TOGETHER = Linked(("way", "count"), (("none", 1), ("sliced", 2), ("sliced", 4)))
DEFAULT_BOUND: int = Settings.model_fields["max_space"].default


@given(st.lists(st.tuples(LISTS, st.booleans()), min_size=1, max_size=3), st.integers(0, 3000))
def test_the_computed_size_is_that_of_the_enumeration(parts: list[tuple[dict[str, Any], bool]], most: int) -> None:
    spaces = [SearchSpace(tuple(lists.items()), (TOGETHER,) if linked else ()) for lists, linked in parts]
    for space in (*spaces, SearchSpace(parts=tuple(spaces))):
        size = sum(1 for _ in space)
        assert space.size == size
        refused = False
        try:
            require_bounded(space, Search(tunables={"a": [1]}), most)
        except SpaceTooLarge as error:
            refused = True
            assert f"{size:,} schedules" in error.message
        assert refused == (size > most)


def test_the_lists_are_named_the_longest_first_and_those_of_one_value_not_at_all() -> None:
    space = SearchSpace((("one", (7,)), ("b", (1, 2)), ("a", (1, 2)), ("long", tuple(range(9)))), (TOGETHER,))
    assert lists_text(space) == "long 9 × way with count 3 × a 2 × b 2"
    small = SearchSpace((("c", (1, 2)),))
    assert lists_text(SearchSpace(parts=(small, space))) == f"most of them by {lists_text(space)}"
    assert lists_text(SearchSpace(parts=(space,))) == lists_text(space)


def test_a_search_over_too_much_is_refused_with_the_number_the_lists_and_what_to_do() -> None:
    space = SearchSpace((("a", tuple(range(10))), ("b", (1, 2))))
    require_bounded(space, Search(level=2), 20)
    with pytest.raises(SpaceTooLarge) as refused:
        require_bounded(space, Search(level=2), 19)
    assert refused.value.message == (
        "the search has 20 schedules (a 10 × b 2); at most 19 are looked at without a limit: give a limit, which "
        "samples them, or shorter lists"
    )
    assert (refused.value.field, refused.value.allowed) == ("search.level", {"maximum": 19})


def test_a_sample_of_any_space_is_allowed() -> None:
    space = SearchSpace((("a", (1, 2, 3)),))
    require_bounded(space, Search(level=2, limit=1), 2)
    with pytest.raises(SpaceTooLarge):
        require_bounded(space, Search(level=2), 2)


def test_listed_schedules_count_too() -> None:
    search = Search.model_validate({"schedules": [{"a": 1}, {"a": 2}, {"a": 1}]})
    with pytest.raises(SpaceTooLarge, match=r"has 2 schedules; .* a shorter list") as refused:
        require_bounded(SearchSpace(schedules=tuple(distinct(map(Schedule.of, search.schedules or ())))), search, 1)
    assert refused.value.field == "search.schedules"


@pytest.mark.parametrize("digits", [18, 30, 99])
def test_a_hostile_number_is_counted_and_nothing_is_enumerated(digits: int) -> None:
    space = SearchSpace(tuple((f"t{index:02}", tuple(range(10))) for index in range(digits)))
    with pytest.raises(SpaceTooLarge) as refused:
        require_bounded(space, Search(tunables={"t00": list(range(10))}), DEFAULT_BOUND)
    (number,) = re.findall(r"has ([\d,]+) schedules", refused.value.message)
    assert int(number.replace(",", "")) == 10**digits
    assert refused.value.field == "search.tunables"


ALL_OF = (
    "tile_m", "tile_n", "tile_k", "warps_m", "warps_n", "stages", "fragments", "mma_k", "copy", "epilogue_path",
    "min_blocks", "maxnreg",
)  # fmt: skip
HALF = {"m": 4096, "n": 4096, "k": 4096, "dtype": "float16"}


def test_every_allowed_value_of_a_matmul_is_over_the_default_bound() -> None:
    allowed = {tunable.name: tunable.allowed for tunable in tensor_space.TUNABLES}
    search = Search(tunables={name: list(allowed[name]) for name in ALL_OF})
    space = operator("matmul").space(matmul(**HALF), target("sm_80"), search)
    assert space.size == 24_576_000
    with pytest.raises(SpaceTooLarge, match=r"has 24,576,000 schedules .maxnreg 8 × stages 8 × tile_k 5 × tile_m 5 ×"):
        require_bounded(space, search, DEFAULT_BOUND)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("shape", [(128, 4096, 14336), (4096, 4096, 4096), (16, 16, 1 << 20), (1, 14336, 4096)])
def test_level_2_is_under_half_of_the_default_bound_on_every_target(dtype: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    for sheet in targets().values():
        space = operator("matmul").space(matmul(m=m, n=n, k=k, dtype=dtype), sheet, Search(level=2))
        assert space.size <= DEFAULT_BOUND / 2
