"""A data folder that an older commit left when it was killed: its jobs end, its winners stay, nothing is lost."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.checks import damaged, in_database
from tests.faults.killed_service import KilledService, leave_environment, wait_until_ready
from tests.faults.older_folder import OlderJobs, unpack


@pytest.fixture
def folder() -> Iterator[Path]:
    # Short: the path of valkey's socket is in it.
    with tempfile.TemporaryDirectory(prefix="ck-") as place:
        yield Path(place)


def test_an_older_data_folder_continues(folder: Path) -> None:
    leave_environment()
    older = unpack(folder / "data")
    service = KilledService(folder, seed=0)
    try:
        wait_until_ready(service)
        _check(service, older)
        assert damaged(service.settings) == []
    finally:
        left = service.stop()
    assert left == []
    assert in_database(service.settings) == []


def _check(service: KilledService, older: OlderJobs) -> None:
    report = service.client.job(older.done)
    assert report.state == "done"
    assert {problem.name: problem.winner and problem.winner.candidate for problem in report.problems} == older.winners
    winners = service.client.lookup(older.request["problems"], target=older.request["target"])
    for problem, lookup in zip(report.problems, winners, strict=True):
        assert lookup.record is not None
        assert lookup.record.front[0].candidate == older.winners[problem.name]
        assert len(service.client.blob(lookup.record.front[0].so_sha256)) > 0
    for job in older.unfinished:
        ended = service.client.wait(job)
        assert ended.state == "done", [(problem.name, problem.error) for problem in ended.problems]
        assert all(problem.winner is not None for problem in ended.problems)
