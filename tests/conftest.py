"""Fixtures of `tests/support` for all tests, made once in each process of the run."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.support.shared_statements import share_statements

TESTS = Path(__file__).parent
# Each after those that it imports.
pytest_plugins = [
    "tests.support.fixtures_storage",
    "tests.support.fixtures_queue",
    "tests.support.fixtures_compile",
    "tests.support.fixtures_api",
    "tests.support.fixtures_client",
    "tests.support.fixtures_elsewhere",
    "tests.support.fixtures_gpu",
    "tests.support.fixtures_gpu_line",
    "tests.support.fixtures_library",
    "tests.support.fixtures_primitives",
]


# The longest first: the last files that the processes of a run are given are then short.
ORDER = ("integration", "of_workers", "operators", "of_storage", "of_service")

share_statements()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _place(item.path))


def _place(path: Path) -> int:
    folder = path.relative_to(TESTS).parts[0]
    return ORDER.index(folder) if folder in ORDER else len(ORDER)


def pytest_collection_finish() -> None:
    """What is imported by now stays: collecting it again and again took a sixth of the tests' own time."""
    gc.collect()
    gc.freeze()
