"""The simulated GPU as a fixture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import fake_gpu
from tests.support.gpu_tasks import Gpu
from workers.processes.processes import Processes


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    (tmp_path / "private").mkdir()
    processes = Processes(root=tmp_path / "private")
    made = Gpu(tmp_path, processes)
    made.configure()
    monkeypatch.setenv(fake_gpu.VARIABLE, str(tmp_path / "gpu.json"))
    yield made
    processes.close()
