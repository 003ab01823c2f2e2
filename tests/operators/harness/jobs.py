"""Problems of each operator the whole way over HTTP, in one job: operators share calls of the compilers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from cukiln.client import Client
from cukiln.types import Job
from storage.config.settings import load_settings
from tests.operators.harness.declarations import Declarations
from workers.supervisor.serve import embedded


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    data = tmp_path_factory.mktemp("jobs")
    settings = load_settings(data_dir=data, port=0, workers=2)
    with embedded(settings) as running, Client(running.url, cache_dir=data / "client") as client:
        yield client


SEARCH = {"level": 1, "limit": 1}


def problems_of(declared: Declarations) -> list[dict[str, Any]]:
    """Of the operator's job, each under a name that no other operator has."""
    assert declared.job is not None
    fields = {"operator": declared.operator, "search": SEARCH}
    return [{**fields, **own, "name": f"{declared.operator}: {name}"} for name, own in declared.job.problems.items()]


def require_winners(client: Client, answer: Job, problems: Sequence[Mapping[str, Any]]) -> None:
    """Verified winners of these problems of a job, as many as each tried, which are found again."""
    reports = {problem.name: problem for problem in answer.problems}
    ended = {p["name"]: (reports[p["name"]].state, reports[p["name"]].verdicts) for p in problems}
    assert ended == {p["name"]: ("done", {"ok": p["search"]["limit"]}) for p in problems}
    assert client.tune(list(problems), target="sm_90a").cached


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
