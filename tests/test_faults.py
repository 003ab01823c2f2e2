"""Whatever is killed, every accepted job ends with the winners of a run in which nothing died, and nothing is left.
`make test-faults` kills more."""

from __future__ import annotations

import pytest

from tests.faults.random_kills import in_a_folder_of_its_own
from tests.postgres_server import binaries


@pytest.mark.parametrize("on_postgres", [False, pytest.param(True, id="postgres")])
def test_random_kills_change_nothing_of_what_comes_out(on_postgres: bool) -> None:
    if on_postgres and binaries() is None:
        pytest.skip("PostgreSQL is not installed. Debian, Ubuntu: apt install postgresql")
    outcome = in_a_folder_of_its_own(jobs=2, kills=12, seed=3, on_postgres=on_postgres)
    assert outcome.faults == []
    assert (outcome.done, outcome.wrong_winners, outcome.leftovers, outcome.mismatches) == (2, 0, 0, 0)
    assert sum(outcome.killed.values()) == 12
    assert outcome.requests > 0
