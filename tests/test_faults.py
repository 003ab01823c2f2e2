"""Whatever is killed, every accepted job ends with the winners of a run in which nothing died, and nothing is left.
`make test-faults` kills more."""

from __future__ import annotations

from tests.faults.random_kills import in_a_folder_of_its_own


def test_random_kills_change_nothing_of_what_comes_out() -> None:
    outcome = in_a_folder_of_its_own(jobs=2, kills=12, seed=3)
    assert outcome.faults == []
    assert (outcome.done, outcome.wrong_winners, outcome.leftovers) == (2, 0, 0)
    assert sum(outcome.killed.values()) == 12
