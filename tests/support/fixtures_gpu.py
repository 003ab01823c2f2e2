"""The simulated GPU as a fixture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.config.own_modules import CHILD
from tests.support import fake_gpu
from tests.support.gpu_tasks import Gpu
from workers.gpu.measure_on_gpu import child_environment
from workers.processes.processes import Processes


@pytest.fixture(scope="session")
def gpu_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """As of a GPU worker: its children are forked from a process that has imported what they need."""
    made = Processes(root=tmp_path_factory.mktemp("private"))
    yield made
    made.close()


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_processes: Processes) -> Gpu:
    made = Gpu(tmp_path, gpu_processes)
    made.configure()
    monkeypatch.setenv(fake_gpu.VARIABLE, str(tmp_path / "gpu.json"))
    gpu_processes.keep_warm(CHILD, child_environment())
    return made
