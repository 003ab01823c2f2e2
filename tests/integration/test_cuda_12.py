"""A service that compiles for CUDA 12: its winners are verified, and stand apart from those of CUDA 13."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from codegen.identity import problem_digest, winner_key
from codegen.neighbours import stored_place
from cukiln.client import Client
from storage.config.settings import load_settings
from storage.database.session import Database
from storage.entities.winners import get_winners, neighbours_of
from tests.support.fixtures.service import Started

# What else compiles for it is in `tests/operators/test_both_compilers.py`.
PROBLEMS: list[dict[str, Any]] = [
    {"name": "product", "operator": "matmul", "m": 64, "n": 48, "k": 32, "layout": "nt"},
]
CLASS = "predicted:sm_80"


def test_a_job_ends_with_verified_winners_that_cuda_13_does_not_find(tmp_path: Path, at_work: Started) -> None:
    settings = load_settings(data_dir=tmp_path, port=0, workers=1, cuda=12)
    with at_work(settings) as running, Client(running.url, cache_dir=tmp_path / "client", lookup_budget=30.0) as client:
        job = client.tune(PROBLEMS, target="sm_80", search={"level": 0, "limit": 1})
        assert (job.state, [problem.verdicts for problem in job.problems]) == ("done", [{"ok": 1}]), job
        records = [result.record for result in client.lookup(PROBLEMS, target="sm_80")]
        (made_by,) = client.targets().toolchains
    versions = made_by["description"]["versions"]
    assert versions.get("nvrtc", versions.get("nvcc", "")).startswith("12.")
    database = Database(settings.database_url)
    for record in records:
        assert record is not None and record.cuda == 12
        assert (record.front[0].verified, record.front[0].toolchain) == ("cpu-unconfirmed", made_by["digest"])
        with database.read() as session:
            of_13, of_12 = (winner_key(problem_digest(record.problem), "sm_80", CLASS, cuda) for cuda in (13, 12))
            assert list(get_winners(session, [of_13, of_12])) == [of_12] == [record.key]
            place = stored_place(record.operator, record.problem)
            assert place is not None
            found = [[each.key for each in neighbours_of(session, place, "sm_80", 8, cuda)] for cuda in (13, 12)]
            assert found == [[], [record.key]]
    database.dispose()
