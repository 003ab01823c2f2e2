"""What the tests of the primitives share: the kernels of tests/gpu built on the CPU twins."""

from __future__ import annotations

import pytest

from tests.gpu.primitive_checks import CHECKS
from tests.gpu.run_primitives import CpuEmulations


@pytest.fixture(scope="session")
def emulations(tmp_path_factory: pytest.TempPathFactory) -> CpuEmulations:
    return CpuEmulations(CHECKS, tmp_path_factory.mktemp("twins"))
