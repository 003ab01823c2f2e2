"""A job of each operator, the whole way over HTTP, all by one service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cukiln.client import Client
from storage.config.settings import load_settings
from tests.operators.harness.declarations import Declarations
from workers.supervisor.serve import embedded


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    data = tmp_path_factory.mktemp("jobs")
    settings = load_settings(data_dir=data, port=0, workers=2)
    with embedded(settings) as running, Client(running.url, cache_dir=data / "client") as client:
        yield client


def require_winners(client: Client, declared: Declarations) -> None:
    """Verified winners, which are found again."""
    job = declared.job
    assert job is not None
    problems = [{"operator": declared.operator, **fields, "name": name} for name, fields in job.problems.items()]
    search = {"level": 1, "limit": 1}
    answer = client.tune(problems, target="sm_90a", search=search)
    assert answer.state == "done"
    assert {problem.name: problem.state for problem in answer.problems} == dict.fromkeys(job.problems, "done")
    verdicts = {problem.name: problem.verdicts for problem in answer.problems}
    assert verdicts == {name: {"ok": 1} for name in job.problems}
    assert client.tune(problems, target="sm_90a", search=search).cached


def require_failures(client: Client, declared: Declarations) -> None:
    """A search without a schedule says which rules rejected, and the numbers."""
    assert declared.job is not None
    for fields, search, rejected, said in declared.job.failing:
        asked = [{"operator": declared.operator, "name": "failing", **fields}]
        limit = {"workspace_limit_bytes": search["workspace_limit_bytes"]} if "workspace_limit_bytes" in search else {}
        given = {name: value for name, value in search.items() if name != "workspace_limit_bytes"}
        (problem,) = client.tune(asked, target="sm_90a", search=given, **limit).problems
        assert problem.state == "failed"
        numbers = {rule: number for rule, number in rejected.items() if number is not None}
        assert problem.rejected == numbers or (rejected != numbers and rejected.keys() <= problem.rejected.keys())
        assert said in (problem.error or "")
