"""A whole service of the checkout, as a process of its own: `make test-wheel` calls it from an environment that has the
client's wheel alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SERVER_PYTHON = "CUKILN_TEST_SERVER_PYTHON"
"""Of the environment that has the server, where the tests' own has not."""


@contextmanager
def running_service(data: Path) -> Iterator[str]:
    """Its URL; it ends with the block."""
    python = os.environ.get(SERVER_PYTHON, sys.executable)
    command = [python, "-P", "-m", "cukiln", "serve", "--port", "0", "--workers", "2", "--data", str(data)]
    environment = {**os.environ, "CUKILN_GPUS": "none"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if ready := re.match(r"ready: (\S+)", line):
                break
        else:
            raise AssertionError(f"the service did not start: {''.join(lines)}")
        try:
            yield ready[1]
        finally:
            process.terminate()
            process.communicate()


@contextmanager
def soon_running_service(request: pytest.FixtureRequest, data: Path) -> Iterator[str]:
    """The same; sooner, in this process, where the server is installed beside the tests."""
    if SERVER_PYTHON in os.environ:
        with running_service(data) as url:
            yield url
        return
    from storage.config.settings import load_settings

    settings = load_settings(data_dir=data, port=0, workers=1, gpus="none")
    with request.getfixturevalue("at_work")(settings) as running:
        yield running.url
