"""Whatever happens in whatever order, and wherever a worker dies: every live problem has work that leads to its end, no
build is compiled twice at once or lost, no job waits long for others of its priority, and what is spent is charged to
the jobs that it was spent for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    run_state_machine_as_test,
)

from storage.queue import losses
from storage.transitions import end_jobs, groups, measure
from tests.of_storage.transitions.job_machine import (
    Jobs,
)
from tests.support.processes.played_workers import (
    AT_ONCE,
)


# A failing order is made short for up to five minutes, and then printed.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("orders", [3, pytest.param(60, marks=pytest.mark.long)])
def test_every_job_ends_whatever_happens(
    orders: int,
    migrated_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Jobs.template = migrated_file
    monkeypatch.setattr(end_jobs, "CLEARED_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(groups, "VERDICTS_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(measure, "VERDICTS_AT_ONCE", AT_ONCE)
    # Few enough that all of it happens in few steps.
    for name, most in (("TOGETHER", 1), ("ALONE", 1), ("MOST", 2)):
        monkeypatch.setattr(losses, name, most)
    examples = int(os.environ.get("CUKILN_TEST_JOB_ORDERS", orders))
    quiet = list(HealthCheck)
    chosen = settings(max_examples=examples, stateful_step_count=40, suppress_health_check=quiet, database=None)
    run_state_machine_as_test(Jobs, settings=chosen)
