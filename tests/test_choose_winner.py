"""The Pareto front of a winner record."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cukiln.types import FrontEntry, Launch
from workers.choose_winner import merge_front, ranked_by


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
    front = merge_front([entry("slow", predicted_us=9.0)], entry("fast", predicted_us=5.0))
    assert [one.candidate for one in front] == ["fast"]


def test_a_slower_candidate_stays_where_it_needs_less_workspace() -> None:
    front = merge_front([entry("fast", predicted_us=5.0, workspace_bytes=64)], entry("lean", predicted_us=9.0))
    assert [one.candidate for one in front] == ["fast", "lean"]


def test_a_slower_candidate_stays_where_it_alone_is_deterministic() -> None:
    front = merge_front([entry("fast", predicted_us=5.0, deterministic=False)], entry("exact", predicted_us=9.0))
    assert [one.candidate for one in front] == ["fast", "exact"]


def test_a_prediction_never_replaces_a_measurement() -> None:
    measured = entry("measured", measured_us=100.0)
    front = merge_front([measured], entry("predicted", predicted_us=1.0))
    assert front == [measured]
    assert ranked_by(front) == "measured"


def test_a_measurement_replaces_predictions() -> None:
    front = merge_front([entry("predicted", predicted_us=1.0)], entry("measured", measured_us=100.0))
    assert [one.candidate for one in front] == ["measured"]


def test_a_prediction_of_a_measured_candidate_leaves_its_measurement() -> None:
    measured = entry("same", measured_us=100.0)
    assert merge_front([measured], entry("same", predicted_us=1.0)) == [measured]


def test_a_newer_entry_of_a_candidate_replaces_the_older() -> None:
    front = merge_front([entry("same", predicted_us=5.0)], entry("same", predicted_us=7.0))
    assert [one.predicted_us for one in front] == [7.0]


def test_of_equal_entries_the_smaller_candidate_wins_in_any_order() -> None:
    assert [one.candidate for one in merge_front([entry("b")], entry("a"))] == ["a"]
    assert [one.candidate for one in merge_front([entry("a")], entry("b"))] == ["a"]


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 4), st.integers(0, 3), st.booleans()), min_size=1)
)
def test_nothing_on_the_front_is_beaten_by_anything_on_it(points: list[tuple[str, int, int, bool]]) -> None:
    front: list[FrontEntry] = []
    for name, time, workspace, exact in points:
        front = merge_front(
            front, entry(name, predicted_us=float(time), workspace_bytes=workspace, deterministic=exact)
        )
    assert front == sorted(front, key=lambda one: (one.predicted_us, one.workspace_bytes, one.candidate))
    for one in front:
        for other in front:
            assert one is other or not (
                one.predicted_us <= other.predicted_us
                and one.workspace_bytes <= other.workspace_bytes
                and one.deterministic >= other.deterministic
            )
