"""The Pareto front of a winner record, and which of its candidates are compared."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cukiln.types import FrontEntry, Launch
from storage.entities.pareto_front import (
    MOST_CONTENDERS,
    NEAR,
    Point,
    contenders,
    merge_front,
    pareto,
    ranked_by,
    thinned,
)


def entry(candidate: str, **fields: Any) -> FrontEntry:
    values: dict[str, Any] = {
        "candidate": candidate,
        "schedule": {},
        "kernel": "k",
        "so_sha256": "s",
        "cubin_sha256": "c",
        "source_sha256": "t",
        "code_digest": "d",
        "toolchain": "t",
        "launch": Launch(operands=[], extents={}, launch={}, scalars=[], functions=[], workspace_bytes=0),
        "workspace_bytes": 0,
        "deterministic": True,
        "verified": "cpu-unconfirmed",
        "verdict": {},
        "resources": {},
        "predicted_us": 10.0,
        "prediction": None,
        "measured_us": None,
    }
    return FrontEntry(**{**values, **fields})


def test_the_faster_prediction_takes_the_place_of_the_slower() -> None:
    front = merge_front([entry("slow", predicted_us=9.0)], [entry("fast", predicted_us=5.0)])
    assert [member.candidate for member in front] == ["fast"]


def test_a_slower_candidate_stays_where_it_needs_less_workspace() -> None:
    front = merge_front([entry("fast", predicted_us=5.0, workspace_bytes=64)], [entry("lean", predicted_us=9.0)])
    assert [member.candidate for member in front] == ["fast", "lean"]


def test_a_slower_candidate_stays_where_it_alone_is_deterministic() -> None:
    front = merge_front([entry("fast", predicted_us=5.0, deterministic=False)], [entry("exact", predicted_us=9.0)])
    assert [member.candidate for member in front] == ["fast", "exact"]


def test_a_prediction_never_replaces_a_measurement() -> None:
    measured = entry("measured", measured_us=100.0)
    front = merge_front([measured], [entry("predicted", predicted_us=1.0)])
    assert front == [measured]
    assert ranked_by(front) == "measured"


def test_a_measurement_replaces_predictions() -> None:
    front = merge_front([entry("predicted", predicted_us=1.0)], [entry("measured", measured_us=100.0)])
    assert [member.candidate for member in front] == ["measured"]


def test_a_prediction_of_a_measured_candidate_leaves_its_measurement() -> None:
    measured = entry("same", measured_us=100.0)
    assert merge_front([measured], [entry("same", predicted_us=1.0)]) == [measured]


def test_a_newer_entry_of_a_candidate_replaces_the_older() -> None:
    front = merge_front([entry("same", predicted_us=5.0)], [entry("same", predicted_us=7.0)])
    assert [member.predicted_us for member in front] == [7.0]


def test_of_equal_entries_the_smaller_candidate_wins_in_any_order() -> None:
    assert [member.candidate for member in merge_front([entry("b")], [entry("a")])] == ["a"]
    assert [member.candidate for member in merge_front([entry("a")], [entry("b")])] == ["a"]


def test_all_points_of_a_search_are_merged_at_once() -> None:
    new = [
        entry("fast", predicted_us=1.0, workspace_bytes=64, deterministic=False),
        entry("equal", predicted_us=2.0, workspace_bytes=640),
        entry("lean", predicted_us=9.0),
        entry("worse", predicted_us=9.5, workspace_bytes=1),
    ]
    front = merge_front([entry("known", predicted_us=4.0, workspace_bytes=32)], new)
    assert [member.candidate for member in front] == ["fast", "equal", "known", "lean"]


def test_a_new_measurement_of_a_candidate_replaces_the_older_also_where_it_is_slower() -> None:
    front_before = [entry("same", measured_us=5.0), entry("lean", measured_us=9.0)]
    front = merge_front(front_before, [entry("same", measured_us=7.0)])
    assert [(member.candidate, member.measured_us) for member in front] == [("same", 7.0)]


def test_what_an_earlier_run_measured_stays_while_nothing_beats_it() -> None:
    front_before = [entry("fast", measured_us=5.0, workspace_bytes=64), entry("lean", measured_us=9.0)]
    front = merge_front(front_before, [entry("new", measured_us=7.0, workspace_bytes=32)])
    assert [member.candidate for member in front] == ["fast", "new", "lean"]
    front = merge_front(front, [entry("better", measured_us=4.0, workspace_bytes=32)])
    assert [member.candidate for member in front] == ["better", "lean"]


def test_of_two_that_tie_the_one_with_less_workspace_wins_and_keeps_its_own_time() -> None:
    new = [entry("quick", measured_us=5.0, workspace_bytes=64), entry("lean", measured_us=5.1)]
    assert [member.candidate for member in merge_front([], new)] == ["quick", "lean"]
    front = merge_front([], new, {"quick": 5.0, "lean": 5.0})
    assert [(member.candidate, member.measured_us) for member in front] == [("lean", 5.1)]


POINTS = st.lists(
    st.builds(Point, st.sampled_from("abcdefgh"), st.integers(1, 4).map(float), st.integers(0, 3), st.booleans()),
    min_size=1,
)


@given(POINTS)
def test_the_front_answers_every_request_as_all_points_would(points: list[Point]) -> None:
    front = pareto(points)
    assert front == sorted(front, key=lambda each: (each.us, each.workspace_bytes, each.candidate))
    assert not any(member is not other and member.as_good_as(other) for member in front for other in front)
    for limit in range(4):
        for deterministic in (False, True):
            of_all, of_front = (
                min(
                    (p.us for p in some if p.workspace_bytes <= limit and p.deterministic >= deterministic),
                    default=None,
                )
                for some in (points, front)
            )
            assert of_all == of_front


@given(POINTS, st.integers(1, 8))
def test_a_thinned_front_keeps_what_nothing_can_stand_for(points: list[Point], at_most: int) -> None:
    front = pareto(points)
    thin = thinned(front, at_most)
    assert len(thin) == min(len(front), at_most)
    assert thin[0] == front[0]
    assert thin == [point for point in front if point in thin]
    alone = [point for point in front if not any(o is not point and o.replaces(point) for o in front)]
    if at_most > len(alone):
        assert set(alone) <= set(thin)


def test_what_is_left_out_is_what_requests_miss_least() -> None:
    front = [
        Point("a", 1.0, 64, False), Point("b", 1.01, 32, False), Point("c", 2.0, 64, True), Point("d", 2.1, 16, True),
        Point("e", 8.0, 8, True), Point("f", 9.0, 0, True),
    ]  # fmt: skip
    assert pareto(front) == front
    assert [point.candidate for point in thinned(front, 6)] == list("abcdef")
    assert [point.candidate for point in thinned(front, 5)] == list("abdef")
    assert [point.candidate for point in thinned(front, 4)] == list("abdf")
    assert [point.candidate for point in thinned(front, 3)] == list("adf")
    assert [point.candidate for point in thinned(front, 1)] == ["a"]


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 4), st.integers(0, 3), st.booleans()), min_size=1)
)
def test_nothing_on_the_front_is_beaten_by_anything_on_it(points: list[tuple[str, int, int, bool]]) -> None:
    front: list[FrontEntry] = []
    for name, time, workspace, exact in points:
        front = merge_front(
            front, [entry(name, predicted_us=float(time), workspace_bytes=workspace, deterministic=exact)]
        )
    assert front == sorted(front, key=lambda each: (each.predicted_us, each.workspace_bytes, each.candidate))
    for member in front:
        for other in front:
            assert member is other or not (
                member.predicted_us <= other.predicted_us
                and member.workspace_bytes <= other.workspace_bytes
                and member.deterministic >= other.deterministic
            )


# ---- the finalists


def test_the_front_and_all_near_the_best_are_compared() -> None:
    points = [
        Point("best", 100.0, 64, True),
        Point("near", 104.9, 64, True),
        Point("far", 105.1, 64, True),
        Point("lean", 300.0, 0, True),
        Point("slow", 301.0, 0, True),
    ]
    assert [point.candidate for point in contenders(points)] == ["best", "near", "lean"]


def test_nothing_is_compared_where_nothing_was_measured() -> None:
    assert contenders([]) == []


def test_of_many_that_are_near_the_slower_are_left_out_before_any_point_of_the_front() -> None:
    near = [Point(f"near{n:02}", 100.0 + n / 10, 64, True) for n in range(20)]
    lean = [Point(f"lean{n}", 200.0 + n, 32 - n, True) for n in range(4)]
    assert [point.candidate for point in contenders([*near, *lean])] == [
        "near00", "near01", "near02", "near03", "lean0", "lean1", "lean2", "lean3"
    ]  # fmt: skip


@given(
    st.lists(
        st.builds(Point, st.sampled_from("abcdefghijkl"), st.floats(1, 2), st.integers(0, 3), st.booleans()),
        min_size=1,
        unique_by=lambda point: point.candidate,
    )
)
def test_finalists_are_few_and_each_has_its_reason(points: list[Point]) -> None:
    chosen = contenders(points)
    front = pareto(points)
    best = min(point.us for point in points)
    assert 0 < len(chosen) <= MOST_CONTENDERS
    assert min(point.us for point in chosen) == best
    assert all(point in front or point.us <= (1 + NEAR) * best for point in chosen)
    if len({*front, *(point for point in points if point.us <= (1 + NEAR) * best)}) <= MOST_CONTENDERS:
        assert set(front) <= set(chosen)
