"""Levels and rules: what is tried, what is rejected with which words, what a search may not ask."""

from __future__ import annotations

import pytest

from codegen.errors import InvalidSearch
from codegen.lower import lower
from codegen.predict.predict_uncompiled import predict_uncompiled
from codegen.search.rules import ACCEPTED, Rejected
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.targets import target
from tests.operators.harness.declarations import LEVEL_0, LEVEL_1, LEVEL_2, SM_90A, Declarations, Fields, Rejection

TABLES = {
    "accepted": lambda declared: declared.searches.accepted,
    "rejection": lambda declared: declared.searches.rejected,
    "public": lambda declared: {shape["name"]: shape for shape in declared.searches.public},
    "nested": lambda declared: declared.searches.nested,
    "tried": lambda declared: declared.searches.tried,
    "begun": lambda declared: declared.searches.begun,
    "capped": lambda declared: declared.searches.capped,
    "meaningless": lambda declared: declared.searches.meaningless,
}


def test_good_schedules_are_accepted(declared: Declarations, accepted: tuple[Fields, Fields]) -> None:
    fields, schedule = accepted
    assert declared.op.rules(declared.parse(fields), Schedule.of(schedule), SM_90A) == ACCEPTED


def test_each_rule_says_why(declared: Declarations, rejection: Rejection) -> None:
    problem, schedule = declared.parse(rejection.fields), Schedule.of(rejection.schedule)
    outcome = declared.op.rules(problem, schedule, target(rejection.arch), rejection.workspace_limit)
    assert isinstance(outcome, Rejected)
    assert (outcome.rule, rejection.said in outcome.message) == (rejection.rule, True), outcome


def test_a_cap_on_the_workspace_rejects_with_the_number(
    declared: Declarations, capped: tuple[Fields, Fields, int]
) -> None:
    fields, tunables, needed = capped
    problem, schedule = declared.parse(fields), Schedule.of(tunables)
    assert declared.op.cost(problem, schedule).workspace_bytes == needed
    assert declared.op.rules(problem, schedule, SM_90A, needed) == ACCEPTED
    assert declared.op.rules(problem, schedule, SM_90A, needed - 1) == Rejected(
        "workspace", f"needs {needed} bytes of workspace, the limit is {needed - 1}"
    )


def test_a_public_problem_has_schedules_at_levels_0_and_1(declared: Declarations, public: Fields) -> None:
    problem = declared.op.parse({name: value for name, value in public.items() if name != "name"})
    (first,) = lower(problem, SM_90A, LEVEL_0).candidates
    candidates = lower(problem, SM_90A, Search(level=1, limit=16)).candidates
    assert first in candidates
    assert all(predict_uncompiled(candidate, SM_90A).us > 0.0 for candidate in candidates)


def test_a_level_is_inside_the_next(declared: Declarations, nested: Fields) -> None:
    problem = declared.parse(nested)
    one, two = (declared.op.space(problem, SM_90A, level) for level in (LEVEL_1, LEVEL_2))
    assert all(two.index_of(one.by_index(index)) is not None for index in range(one.size))
    assert one.size < two.size


def test_levels_try_what_is_worth_it(declared: Declarations, tried: tuple[Fields, set[str]]) -> None:
    candidates = lower(declared.parse(tried[0]), SM_90A, LEVEL_1).candidates
    assert {candidate.schedule.get("algorithm") for candidate in candidates} == tried[1]


def test_every_kind_of_problem_has_a_schedule_to_begin_with(
    declared: Declarations, begun: tuple[str, Fields, str]
) -> None:
    arch, fields, lacking = begun
    why_empty = lower(declared.parse(fields), target(arch), LEVEL_0).why_empty
    assert why_empty is None or (lacking and lacking in why_empty), why_empty


def test_searches_that_mean_nothing_are_refused(
    declared: Declarations, meaningless: tuple[Fields, Fields, str, str]
) -> None:
    fields, search, field, said = meaningless
    with pytest.raises(InvalidSearch) as refused:
        lower(declared.parse(fields), SM_90A, Search(**search))
    assert refused.value.field == field
    assert said in refused.value.message
