"""`screening`: what it means for a search, who is chosen, and what people are told of those that are not."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console

from codegen.search import Search, covers
from cukiln.cli_candidates import fastest_first, print_candidates
from cukiln.cli_table import notes
from cukiln.types import CandidateReport, Job, ProblemDetail
from storage.candidates import StoredCandidate
from storage.searches import is_covered, search_entry
from tests.fixtures_api import MATMUL, Api, shared_api
from tests.fixtures_client import job_json
from tests.test_cli_candidates import candidate as report
from workers.choose_winner import Point, pareto
from workers.elsewhere.work import RequestError, work_of_request
from workers.steps.rank import Ranked
from workers.steps.refine import best_screened
from workers.toolchain import find_toolchain

__all__ = ["shared_api"]


# ---- the search


def test_it_is_off_by_default() -> None:
    assert Search().screening is None
    assert "screening" not in Search().canonical()


@pytest.mark.parametrize("screening", [0, -1, 1001, 1.5, "3", True])
def test_a_number_that_is_none_is_refused_at_its_field(screening: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        Search.model_validate({"level": 1, "screening": screening})
    assert {error["loc"][0] for error in refused.value.errors()} == {"screening"}


@pytest.mark.parametrize("screening", [0, 1001, "many"])
def test_the_service_names_the_field_and_what_is_allowed(screening: Any, shared_api: Api) -> None:
    for body in (
        {"problems": [MATMUL], "search": {"level": 1, "screening": screening}},
        {"problems": [{**MATMUL, "search": {"level": 1, "screening": screening}}]},
    ):
        answer = shared_api.client.post("/v1/jobs", json=body)
        detail = ProblemDetail.model_validate_json(answer.content)
        assert answer.status_code == 422
        assert str(detail.field).endswith("search.screening")
        assert "1" in str(detail.allowed), detail.allowed


def test_the_published_schema_has_it() -> None:
    described = Search.model_json_schema()["properties"]["screening"]
    assert {"type": "integer", "minimum": 1, "maximum": 1000} in described["anyOf"]
    assert described["default"] is None


@pytest.mark.parametrize(
    ("search", "canonical"),
    [
        ({"screening": 4.0}, {"level": 1, "screening": 4}),
        ({"level": 2, "limit": 9, "screening": 4}, {"level": 2, "limit": 9, "seed": 0, "screening": 4}),
        ({"level": 2, "keep": 9, "screening": 4}, {"level": 2, "keep": 9, "screening": 4}),
        # Where there cannot be more candidates than that, nothing is screened.
        ({"level": 0, "screening": 1}, {"level": 0}),
        ({"level": 2, "limit": 4, "screening": 4}, {"level": 2, "limit": 4, "seed": 0}),
        ({"level": 2, "keep": 4, "screening": 4}, {"level": 2, "keep": 4}),
        ({"level": 2, "limit": 4, "keep": 9, "screening": 5}, {"level": 2, "limit": 4, "seed": 0}),
        ({"schedules": [{"a": 1}, {"a": 2}, {"a": 1}], "screening": 2}, {"schedules": [{"a": 1}, {"a": 2}]}),
        ({"tunables": {"a": [1]}, "screening": 1}, {"tunables": {"a": [1]}, "screening": 1}),
    ],
)
def test_the_canonical_search_has_it_where_it_matters(search: Any, canonical: dict[str, Any]) -> None:
    assert Search.model_validate(search).canonical() == canonical


@pytest.mark.parametrize(
    ("done", "asked", "covered"),
    [
        ({"level": 1}, {"level": 1, "screening": 5}, True),
        ({"level": 2}, {"level": 1, "screening": 5}, True),
        ({"level": 1}, {"level": 2, "screening": 5}, False),
        ({"level": 1, "screening": 5}, {"level": 1}, False),
        ({"level": 1, "screening": 5}, {"level": 0}, False),
        ({"level": 1, "screening": 5}, {"level": 1, "screening": 5}, True),
        ({"level": 1, "screening": 5}, {"level": 1, "screening": 4}, True),
        ({"level": 1, "screening": 5}, {"level": 1, "screening": 6}, False),
        ({"level": 2, "screening": 5}, {"level": 1, "screening": 5}, False),
        ({"level": 2, "keep": 9, "screening": 5}, {"level": 2, "keep": 9, "screening": 3}, True),
        ({"level": 2, "keep": 9, "screening": 5}, {"level": 2, "keep": 8, "screening": 3}, False),
        ({"level": 2, "keep": 9, "screening": 5}, {"level": 2, "screening": 3}, False),
        ({"level": 2, "keep": 9}, {"level": 2, "keep": 8, "screening": 3}, True),
        ({"level": 2, "keep": 8}, {"level": 2, "screening": 3}, False),
        ({"level": 2, "limit": 9, "screening": 9}, {"level": 2, "limit": 8}, True),
        ({"schedules": [{"a": 1}, {"a": 2}], "screening": 1}, {"schedules": [{"a": 2}]}, False),
    ],
)
def test_what_covers_what(done: Any, asked: Any, covered: bool) -> None:
    assert covers(Search.model_validate(done), Search.model_validate(asked)) is covered


NUMBER = st.one_of(st.none(), st.integers(1, 8))
SEARCHES = st.builds(
    lambda kind, limit, keep, screening: Search.model_validate(
        {**kind, "limit": limit, "keep": keep, "screening": screening}
    ),
    st.sampled_from([{"level": 0}, {"level": 1}, {"level": 2}, {"schedules": [{"a": n} for n in range(4)]}]),
    NUMBER,
    NUMBER,
    NUMBER,
)


@settings(max_examples=400)
@given(SEARCHES, SEARCHES)
def test_what_screens_covers_no_more_than_what_does_not(done: Search, asked: Search) -> None:
    whole = done.model_copy(update={"screening": None})
    assert covers(done, done)
    assert covers(whole, done)
    assert Search.model_validate(done.canonical()).canonical() == done.canonical()
    if covers(done, asked):
        assert covers(whole, asked)
        if "screening" in done.canonical():
            assert asked.canonical().get("screening", 1001) <= done.canonical()["screening"]


@pytest.mark.parametrize(("done_limit", "asked_limit", "covered"), [(None, 1024, False), (1024, 1024, True)])
def test_another_policy_chooses_others(done_limit: int | None, asked_limit: int, covered: bool) -> None:
    search = {"level": 1, "screening": 5}
    done, asked = search_entry(search, "today", done_limit), search_entry(search, "today", asked_limit)
    assert is_covered([done], asked) is covered


# ---- the choice


def ranked(points: list[tuple[int, int, bool]]) -> list[Ranked]:
    """Fastest first: microseconds, workspace, determinism."""
    found = []
    for number, (us, workspace, deterministic) in enumerate(points):
        point = Point(f"{number:03}", us, workspace, deterministic)
        found.append(Ranked(stored(point.candidate), Named(point.candidate), None, point))  # type: ignore[arg-type]
    return sorted(found, key=lambda one: (one.point.us, one.point.candidate))


class Named:
    def __init__(self, id: str) -> None:
        self.id = id


def stored(name: str) -> StoredCandidate:
    fields = dict.fromkeys(StoredCandidate.__dataclass_fields__)
    return StoredCandidate(**{**fields, "candidate": name})  # type: ignore[arg-type]


POINTS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.booleans()), max_size=12)


@settings(max_examples=300)
@given(POINTS, st.integers(1, 14), st.integers(1, 14))
def test_the_front_is_chosen_first_and_a_smaller_choice_is_in_the_larger(
    points: list[tuple[int, int, bool]], few: int, many: int
) -> None:
    everyone = ranked(points)
    few, many = sorted((few, many))
    names = [[one.point.candidate for one in best_screened(everyone, count)] for count in (few, many)]
    assert [len(chosen) for chosen in names] == [min(count, len(everyone)) for count in (few, many)]
    assert set(names[0]) <= set(names[1])
    front = {point.candidate for point in pareto(one.point for one in everyone)}
    assert front <= set(names[1]) or set(names[1]) <= front
    order = [one.point.candidate for one in everyone]
    assert names[1] == [name for name in order if name in names[1]]


def test_the_fastest_is_always_chosen() -> None:
    everyone = ranked([(5, 0, True), (1, 9, False), (3, 4, True)])
    assert [one.point.us for one in best_screened(everyone, 1)] == [1]


# ---- what is told


def test_candidates_that_were_only_screened_say_so_and_come_after_those_that_may_win() -> None:
    full, fast = report("a", predicted_us=20.0), report("b", predicted_us=10.0, screening=True)
    wrong = report("c", verdict="incorrect", predicted_us=None)
    output = io.StringIO()
    shown = fastest_first([CandidateReport.model_validate(one) for one in (fast, wrong, full)])
    assert [one.candidate[0] for one in shown] == ["a", "b", "c"]
    print_candidates(Console(file=output, width=200), shown)
    words = output.getvalue()
    assert "screening" in words.splitlines()[1]
    assert "it cannot win" in words
    output = io.StringIO()
    print_candidates(Console(file=output, width=200), shown[:1])
    assert "screening" not in output.getvalue()


def test_a_table_of_winners_tells_how_many_were_only_screened() -> None:
    job = job_json("done")
    (one,) = job["problems"]
    assert not any("screened" in line for line in notes(Job.model_validate(job)))
    job["problems"] = [{**one, "screened": 62}]
    told = [line for line in notes(Job.model_validate(job)) if "screened" in line]
    assert told == ["62 more schedules were only screened: compiled fast, with less optimisation, and not chosen"]


# ---- elsewhere


def test_a_stand_alone_run_refuses_it_and_says_what_to_do() -> None:
    request = {"search": {"level": 1, "screening": 2}, "problems": [{**MATMUL, "name": "one"}]}
    with pytest.raises(RequestError, match=r"one: `search.screening` is for a service.*search.keep"):
        work_of_request(request, "sm_90a", find_toolchain())
