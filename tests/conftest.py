"""Fixtures of `tests/support` for all tests, made once in each process of the run."""

from __future__ import annotations

import os

# Before anything is imported that makes threads. These processes outnumber the cores, and a fork copies no threads:
# where MKL has some, the next parallel product in a fork hangs. From which size one is parallel depends on the CPU.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.run.each_run import mark_out_of_turn
from tests.support.run.schedule import ByFixtures, place_of
from tests.support.run.shared_statements import share_certificates, share_statements

pytest.register_assert_rewrite(
    "tests.integration.clusters",
    "tests.of_service.event_streams",
    "tests.of_storage.transitions.job_machine",
    "tests.operators.attention.claims",
    "tests.operators.mla.claims",
)
# Each after those that it imports.
pytest_plugins = [
    "tests.support.fixtures.storage",
    "tests.support.fixtures.queue",
    "tests.support.fixtures.compile",
    "tests.support.fixtures.api",
    "tests.support.fixtures.service",
    "tests.support.fixtures.client",
    "tests.support.fixtures.elsewhere",
    "tests.support.fixtures.gpu",
    "tests.support.fixtures.gpu_line",
    "tests.support.fixtures.library",
    "tests.support.fixtures.line",
    "tests.support.fixtures.primitives",
]


os.environ.setdefault("CUKILN_TARGET", "sm_80")  # of requests that name none, as most of the tests' do
# Before xdist's processes start: they have the same.
os.environ["CUKILN_TEST_SEED"] = os.environ.get("CUKILN_TEST_SEED") or str(random.SystemRandom().randrange(10**9))
gc.disable()  # until all tests are there: each process of the run makes all of them
share_statements()
share_certificates()
# However slow the machine is; and each example leaves a fixture of its test as it found it.
settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)  # before those that are long are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_out_of_turn(items)
    items.sort(key=lambda item: place_of(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFixtures | None:
    return ByFixtures(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"CUKILN_TEST_SEED={os.environ['CUKILN_TEST_SEED']} repeats this run's random cases")


def pytest_collection_finish() -> None:
    """What is imported by now stays: collecting it again and again took a sixth of the tests' own time."""
    gc.freeze()
    gc.enable()


STATUS = os.open("/proc/self/status", os.O_RDONLY)  # once: opening it takes ten times as long as reading it


def umask() -> int:
    return int(os.pread(STATUS, 200, 0).partition(b"Umask:")[2].split()[0], 8)


@pytest.fixture(autouse=True)
def _same_umask() -> Iterator[None]:
    """Where a test left another, later ones of its process would fail instead of it."""
    before = umask()
    yield
    assert umask() == before, "this test changed the umask of its process"
