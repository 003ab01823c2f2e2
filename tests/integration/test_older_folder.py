"""A data folder that an older commit left when it was killed: its jobs end, its winners stay, nothing is lost."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cukiln import Client
from storage.config.settings import load_settings
from tests.faults.checks import damaged, in_database
from tests.faults.older_folder import OlderJobs, unpack
from tests.support.fixtures.queue import wait_for
from tests.support.fixtures.service import Started
from tests.support.run.each_run import one_each_run


@pytest.fixture
def folder() -> Iterator[Path]:
    # Short: the path of valkey's socket is in it.
    with tempfile.TemporaryDirectory(prefix="ck-") as place:
        yield Path(place)


@pytest.mark.parametrize("ends", [1, pytest.param(2, marks=pytest.mark.long)])
@one_each_run("what was killed continues", 1)
def test_an_older_data_folder_continues(ends: int, folder: Path, soon_embedded: Started) -> None:
    older = unpack(folder / "data")
    settings = load_settings(data_dir=folder / "data", port=0, workers=1, gpus="none")
    with soon_embedded(settings) as running, Client(running.url, cache_dir=folder / "client") as client:
        _check(client, older, ends)
        assert damaged(settings) == []
    assert in_database(settings) == []


def _check(client: Client, older: OlderJobs, ends: int) -> None:
    """Of the jobs that had not ended the others are planned, and cancelled."""
    for job in older.unfinished[ends:]:
        wait_for(lambda job=job: client.job(job).progress.lower.done == 2)  # type: ignore[misc]
        assert client.cancel(job).state == "cancelled"
    report = client.job(older.done)
    assert report.state == "done"
    assert {problem.name: problem.winner and problem.winner.candidate for problem in report.problems} == older.winners
    winners = client.lookup(older.request["problems"], target=older.request["target"])
    for problem, lookup in zip(report.problems, winners, strict=True):
        assert lookup.record is not None
        assert lookup.record.front[0].candidate == older.winners[problem.name]
        assert len(client.blob(lookup.record.front[0].so_sha256)) > 0
    for job in older.unfinished[:ends]:
        ended = client.wait(job)
        assert ended.state == "done", [(problem.name, problem.error) for problem in ended.problems]
        assert all(problem.winner is not None for problem in ended.problems)
