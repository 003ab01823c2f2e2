"""The API keeps to its OpenAPI document: asked by schemathesis over a socket. `make test-faults` asks more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.contract import check_contract
from tests.support.fixtures.api import Api, publish


@pytest.mark.parametrize(("examples", "requests"), [pytest.param(3, 70), pytest.param(10, 200, marks=pytest.mark.long)])
def test_the_api_keeps_to_its_document(examples: int, requests: int, api: Api, tmp_path: Path) -> None:
    publish(api.database)
    contract = check_contract(api.url, tmp_path, examples=examples, seed=1, phases="examples,fuzzing,stateful")
    assert contract.mismatches == 0, contract.report
    assert contract.requests > requests
