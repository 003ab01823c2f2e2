"""Tunables that take any integer of a range: what a search may say of them, and how they are shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from codegen.errors import InvalidSearch, UnknownTunable
from codegen.plan import generator as generator_module
from codegen.plan.generator import generator
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import SearchSpace, Tunable, allowed_json, allowed_text
from codegen.targets import target
from tests.support.fixtures.compile import PROBE, probe_candidate

PROBLEM = PROBE.parse({"operator": "probe", "n": 8})
WORDS = "allowed: 1 to 1024"


def space(**search: Any) -> SearchSpace:
    return PROBE.space(PROBLEM, target("sm_80"), Search.model_validate(search))


@pytest.mark.parametrize("value", [0, 1025, -1, 2**53 - 1, "x", "3"])
def test_a_value_outside_the_range_is_refused_with_its_ends(value: int | str) -> None:
    with pytest.raises(InvalidSearch) as refused:
        space(tunables={"slices": [1, value]})
    assert str(refused.value) == f"slices = {value!r} is not allowed; {WORDS}"
    assert refused.value.field == "search.tunables.slices"
    assert refused.value.allowed == {"minimum": 1, "maximum": 1024}
    assert not isinstance(refused.value, UnknownTunable)
    schedule = probe_candidate().schedule.as_dict() | {"slices": value}
    with pytest.raises(InvalidSearch, match=WORDS) as refused:
        space(schedules=[schedule])
    assert refused.value.field == "search.schedules.0.slices"


def test_every_value_of_the_range_is_taken() -> None:
    built = space(tunables={"slices": [1024, 1, 777, 777], "factor": [1]})
    assert built.tunables["slices"] == (1, 777, 1024)
    assert [schedule.get("slices") for schedule in built] == [1, 777, 1024]
    listed = space(schedules=[probe_candidate(slices=1000).schedule.as_dict()])
    assert [schedule.get("slices") for schedule in listed] == [1000]


def test_a_schedule_with_a_value_beyond_it_is_refused_with_the_ends() -> None:
    schedule = probe_candidate().schedule.as_dict()
    with pytest.raises(InvalidSearch, match="slices = 1025 is not allowed; allowed: 1 to 1024") as refused:
        space(schedules=[{**schedule, "slices": 1025}])
    assert refused.value.allowed == {"minimum": 1, "maximum": 1024}
    del schedule["slices"]
    assert [listed.get("slices") for listed in space(schedules=[schedule])] == [1]


def test_an_unknown_tunable_is_distinguished_from_a_wrong_value() -> None:
    with pytest.raises(UnknownTunable, match="unknown tunable 'slice'; allowed: factor, fault"):
        space(tunables={"slice": [1]})


@pytest.mark.parametrize(
    ("allowed", "json", "text"),
    [
        (range(1, 1025), {"minimum": 1, "maximum": 1024}, "1 to 1024"),
        (range(1), {"minimum": 0, "maximum": 0}, "0 to 0"),
        ((1, 2, 4), [1, 2, 4], "1, 2, 4"),
        (("none", "atomic"), ["none", "atomic"], "none, atomic"),
    ],
)
def test_what_is_allowed_as_json_and_as_text(allowed: Any, json: Any, text: str) -> None:
    assert allowed_json(allowed) == json
    assert allowed_text(allowed) == text


@pytest.mark.parametrize("allowed", [range(0, 8, 2), range(3, 3), range(9, 0, -1), ()])
def test_a_range_of_anything_else_is_a_programming_error(allowed: Any) -> None:
    with pytest.raises(ValueError, match="split_k: allowed is a list of values or a range of all integers"):
        Tunable("split_k", allowed, True, "slices", 1)


def test_the_ends_of_a_range_are_part_of_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    def digest_with(allowed: range) -> str:
        tunables = tuple(
            replace(tunable, allowed=allowed) if tunable.name == "slices" else tunable for tunable in PROBE.tunables
        )
        monkeypatch.setattr(type(PROBE), "tunables", tunables)
        generator_module.generator.cache_clear()
        return generator("probe")

    try:
        assert digest_with(range(1, 1025)) == digest_with(range(1, 1025)) != digest_with(range(1, 1024))
    finally:
        monkeypatch.undo()
        generator_module.generator.cache_clear()


def test_it_is_launch_time_and_keeps_its_place_in_the_launch() -> None:
    assert PROBE.launch_values(Schedule.of(probe_candidate(slices=512).schedule.as_dict())) == [512]
    assert probe_candidate(slices=512).kernel == probe_candidate(slices=2).kernel
