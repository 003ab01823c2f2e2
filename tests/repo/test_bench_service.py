"""What the benchmarks of the service make of its answers and of its compilers' times."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks import bench_lookup, bench_overhead


@dataclass
class Spans:
    """Stands in for the log of compilers, and for a client whose service starts nvcc as it is asked to."""

    started: list[float] = field(default_factory=list)
    starts_after: float = 0.0  # seconds after the request

    def spans(self, since: float, name: str | None = None) -> list[tuple[float, float]]:
        return sorted((at, at + 1.0) for at in self.started if at >= since)

    def submit(self, request: Any) -> object:
        self.started.append(time.time() + self.starts_after)
        time.sleep(0.001)
        return object()

    def wait(self, job: object) -> None:
        return None


def test_the_latency_to_nvcc_is_that_of_the_jobs_own_compiler() -> None:
    log: Any = Spans(started=[time.time() - 0.3], starts_after=0.05)  # of the job before, which has just ended
    (latency,) = bench_overhead.first_nvcc_ms(log, log, [{}])
    assert 30 <= latency <= 50


def test_an_nvcc_that_starts_before_the_answer_is_read_has_no_latency() -> None:
    log: Any = Spans()
    assert bench_overhead.first_nvcc_ms(log, log, [{}, {}]) == [0.0, 0.0]


def test_fewer_winners_than_are_looked_up_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_lookup", "--winners", "2999"])
    with pytest.raises(SystemExit) as ended:
        bench_lookup.main()
    assert ended.value.code == 2
    assert "--winners must be 3000 or more" in capsys.readouterr().err
