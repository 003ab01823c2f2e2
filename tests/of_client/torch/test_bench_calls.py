"""`make bench-client` times calls of `cukiln.torch` by a dispatcher of its own, which is gone behind them."""

from __future__ import annotations

import pytest

from cukiln.torch import dispatch
from cukiln.types import WinnerRecord
from tests.support.fixtures.client import record_json


@pytest.mark.checkout
def test_every_call_is_timed_and_the_dispatcher_before_is_the_process_s_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import torch_calls

    monkeypatch.setattr(torch_calls, "HITS", 2)
    monkeypatch.setattr(torch_calls, "BATCH", 1)
    before = dispatch.current()
    figures = torch_calls.torch_calls(WinnerRecord.model_validate(record_json()))
    assert {"torch_call_us", "torch_call_grad_us", "torch_matmul_us"} < figures.keys()
    assert all(us is not None and us > 0 for us in figures.values())
    assert dispatch.current() is before
