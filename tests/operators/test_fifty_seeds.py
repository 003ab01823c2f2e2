"""No right kernel is refused, whatever the seed: kernels of every operator, dtype and algorithm under fifty of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.primitives import HOPPER_SUMS, TURING_SUMS
from tests.operators.harness.every_form import WITH_DECLARATIONS, forms
from tests.support.kernels.cpu_helpers import LIMITS, processes, toolchain
from workers.cpu.build import build_cpu
from workers.cpu.library import CpuLibrary
from workers.cpu.run import plan_test

# Of each module EACH kernels, evenly from its operators, dtypes and algorithms.
SEEDS, EACH, CPU_SECONDS = 50, 12, 60.0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sums", [TURING_SUMS, HOPPER_SUMS])
@pytest.mark.parametrize("module", WITH_DECLARATIONS, ids=lambda module: module.stem)
def test_right_kernels_pass_with_every_seed(module: Path, sums: int, tmp_path: Path) -> None:
    having = forms(module)
    kernels = having[:: -(-len(having) // EACH)]
    build = build_cpu(kernels, toolchain(), processes(), LIMITS, folder=tmp_path, sums=sums)
    assert not build.errors
    refused = []
    for path, held in build.libraries:
        library = CpuLibrary(path)
        for kernel in held:
            for seed in range(SEEDS):
                failure = plan_test(library, kernel, seed, CPU_SECONDS).failure()
                if failure is not None:
                    refused.append((kernel.to_json(), seed, failure.message))
    assert refused == []
