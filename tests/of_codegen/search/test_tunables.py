"""A tunable is declared once; what is stored under an id stays known when another one is added."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from codegen.errors import InvalidSearch
from codegen.kernel import Candidate
from codegen.lower import lower
from codegen.operator import Operator
from codegen.operators import operator, operators
from codegen.operators.matmul import simt_space
from codegen.problem import Problem
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import SearchSpace, Tunable, build_space
from codegen.targets import target
from tests.support.fixtures.codegen import matmul
from tests.support.run.places import ROOT

SM_90A = target("sm_90a")
HELD = json.loads(Path(__file__).with_name("tunable_defaults.json").read_text(encoding="utf-8"))
"""Stored schedules and ids rest on these: a line may be added, none may be changed. `later`: of tunables that no
schedule had which was stored before."""
DEFAULTS: dict[str, dict[str, int | str]] = HELD["first"]


def test_the_defaults_of_every_operator_are_held() -> None:
    packaged = {name for name, own in operators().items() if own.folder.is_relative_to(ROOT / "codegen")}
    assert DEFAULTS.keys() == packaged


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_a_default_never_changes(name: str) -> None:
    tunables = operator(name).tunables
    assert {each.name: each.default for each in tunables if not each.later} == DEFAULTS[name]
    assert {each.name: each.default for each in tunables if each.later} == HELD["later"].get(name, {})


def test_a_default_is_allowed() -> None:
    with pytest.raises(ValueError, match="the default 3 is not among 1, 2"):
        Tunable("knob", (1, 2), False, "", 3)


def test_a_schedule_may_leave_tunables_out() -> None:
    problem = matmul(m=256, n=256, k=256)
    (candidate,) = lower(problem, SM_90A, Search(schedules=[{"tile_m": 128, "thread_m": 8}])).candidates
    assert candidate.schedule.as_dict() == {
        **{name: DEFAULTS["matmul"][name] for name in candidate.schedule.as_dict()}, "tile_m": 128, "thread_m": 8,
    }  # fmt: skip
    (plain,) = lower(problem, SM_90A, Search(schedules=[{"split_k": 1}])).candidates
    assert plain.schedule.get("tile_m") == DEFAULTS["matmul"]["tile_m"]
    with pytest.raises(InvalidSearch, match="tile_m = 5 is not allowed"):
        lower(problem, SM_90A, Search(schedules=[{"tile_m": 5}]))


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"operator": "conv2d", "n": 2, "h": 12, "w": 12, "c": 32, "k": 32, "r": 3, "s": 3}, "implicit_gemm"),
        ({"operator": "reduce", "shape": [64, 4096], "axes": [1]}, "row"),
        ({"operator": "softmax", "shape": [64, 1024]}, "registers"),
        ({"operator": "masked_activation", "shape": [4096], "where_set": {"op": "relu"}}, "vectorised"),
    ],
)  # fmt: skip
def test_a_schedule_without_its_algorithm_is_of_the_first(fields: dict[str, Any], kind: str) -> None:
    own = operator(fields.pop("operator"))
    space = own.space(
        own.parse(fields), SM_90A, Search(schedules=[{"vector": 1} if "shape" in fields else {"raster": 0}])
    )
    (schedule,) = space
    assert schedule.get("algorithm") == kind


class Later:
    """Matmul with one tunable more."""

    TUNABLE = Tunable("hint", (0, 1, 2), False, "of the compiler", 0, later=True)

    def __init__(self) -> None:
        base = type(operator("matmul"))

        class Grown(base):  # type: ignore[misc, valid-type]
            tunables = (*base.tunables, self.TUNABLE)

            def space(self, problem: Problem, target: Any, search: Search) -> SearchSpace:
                if search.tunables is None and search.schedules is None:
                    return super().space(problem, target, search)
                default = super().space(problem, target, Search(level=0)).by_index(0)
                lists = {name: (value,) for name, value in default.values}
                own = [replace(t, constant=False) for t in self.tunables if t.name in {*lists, "hint"}]
                return build_space(search, own, {1: lists, 2: lists}, default)

        self.grown: Operator = Grown()


@pytest.fixture
def grown() -> Iterator[Operator]:
    yield Later().grown


def test_a_later_tunable_at_its_default_leaves_ids(grown: Operator) -> None:
    problem, own = matmul(m=256, n=256, k=256), operator("matmul")
    (before,) = own.space(problem, SM_90A, Search(level=0))
    by_hint = list(grown.space(problem, SM_90A, Search(tunables={"hint": [0, 1]})))
    assert len(by_hint) == 2
    plain, hinted = sorted(by_hint, key=lambda schedule: len(schedule.values))
    assert plain == before
    assert hinted == Schedule.of({**before.as_dict(), "hint": 1})
    named = [{**before.as_dict(), "hint": value} for value in (0, 1)]
    assert set(grown.space(problem, SM_90A, Search(schedules=named))) == {plain, hinted}

    def of(schedule: Schedule) -> Candidate:
        return grown.candidate(problem, schedule)

    old = own.candidate(problem, before)
    assert (of(plain).id, of(plain).kernel.id) == (old.id, old.kernel.id)
    assert len({old.id, of(hinted).id}) == len({old.kernel.id, of(hinted).kernel.id}) == 2


def test_code_reads_a_later_tunable_at_its_default_and_all_else_as_before(
    grown: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = matmul(m=256, n=256, k=256)
    (before,) = operator("matmul").space(problem, SM_90A, Search(level=0))
    plain = grown.candidate(problem, before).kernel
    hinted = grown.candidate(problem, Schedule.of({**before.as_dict(), "hint": 1})).kernel
    known = grown.config(plain).fields
    monkeypatch.setattr(simt_space, "TUNABLES", (*simt_space.TUNABLES, Later.TUNABLE))
    assert grown.config(plain).fields == {**known, "hint": 0}
    assert grown.config(hinted).fields == {**known, "hint": 1}


def test_a_space_finds_a_schedule_that_names_no_later_tunable() -> None:
    tunables = [Tunable("tile", (1, 2), False, "", 1), Tunable("hint", (0, 1), False, "", 0, later=True)]
    space = build_space(
        Search(tunables={"tile": [1, 2], "hint": [0, 1]}), tunables, {1: {}, 2: {}}, Schedule.of({"tile": 1})
    )
    schedules = list(space)
    assert [schedule.as_dict() for schedule in schedules] == [
        {"tile": 1}, {"tile": 2}, {"hint": 1, "tile": 1}, {"hint": 1, "tile": 2},
    ]  # fmt: skip
    assert [space.index_of(schedule) for schedule in schedules] == [0, 1, 2, 3]
    sampled = replace(space, limit=4, seed=3)
    assert set(sampled) == set(schedules)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("matmul", {"m": 64, "n": 64, "k": 64}),
        ("conv2d", {"n": 1, "h": 8, "w": 8, "c": 64, "k": 64, "r": 3, "s": 3, "padding": 1}),
    ],
)
def test_a_sample_of_several_kinds_has_the_schedules_of_the_level(name: str, fields: dict[str, int]) -> None:
    op = operator(name)
    problem = op.parse({"operator": name, "dtype": "int64", "fraction_bits": 18, **fields})
    space = op.space(problem, SM_90A, Search(level=1))
    sampled = list(replace(space, limit=1, seed=3))
    assert len(sampled) == len(set(sampled))
    assert set(sampled) == set(space)
    assert any(("limb_split", "fused") in part.unnamed for part in space.parts)


def test_a_level_without_a_list_takes_the_default() -> None:
    tunables = [Tunable("tile", (1, 2), False, "", 1), Tunable("depth", (4, 8), False, "", 8)]
    space = build_space(Search(level=1), tunables, {1: {"tile": (1, 2)}, 2: {}}, Schedule.of({"tile": 1, "depth": 8}))
    assert [schedule.as_dict() for schedule in space] == [{"depth": 8, "tile": 1}, {"depth": 8, "tile": 2}]


def test_code_reads_the_place_of_a_word() -> None:
    word = Tunable("copy", ("cp_async", "registers"), False, "", "cp_async")
    assert [word.number({"copy": value}) for value in word.allowed] == [0, 1]
    assert word.number({}) == 0
