"""Jobs of operators, the whole way over HTTP, all by one service."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from cukiln.client import Client
from storage.config.settings import load_settings
from tests.operators.harness.declarations import Declarations
from tests.support.fixtures.service import Started


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, at_work: Started) -> Iterator[Client]:
    data = tmp_path_factory.mktemp("jobs")
    settings = load_settings(data_dir=data, port=0, workers=1)
    with at_work(settings) as running, Client(running.url, cache_dir=data / "client") as client:
        yield client


def problems_of(declared: Declarations) -> dict[str, dict[str, Any]]:
    assert declared.job is not None
    return {
        name: {"operator": declared.operator, **fields, "name": f"{declared.operator}, {name}"}
        for name, fields in declared.job.problems.items()
    }


def problem_of_each_run(declared: Declarations) -> dict[str, Any]:
    assert declared.job is not None
    problems = problems_of(declared)
    return problems[declared.job.each_run or next(iter(problems))]


def require_winners(client: Client, asked: Iterable[dict[str, Any]]) -> None:
    """Verified winners, which are found again."""
    problems = list(asked)
    names, search = [problem["name"] for problem in problems], {"level": 1, "limit": 1}
    answer = client.tune(problems, target="sm_90a", search=search)
    assert answer.state == "done"
    assert {problem.name: problem.state for problem in answer.problems} == dict.fromkeys(names, "done")
    assert {problem.name: problem.verdicts for problem in answer.problems} == {name: {"ok": 1} for name in names}
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
