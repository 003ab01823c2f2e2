"""No right kernel is refused, whatever the seed: kernels of every operator, dtype and algorithm under fifty of them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from codegen.kernel import Kernel
from codegen.primitives import HOPPER_SUMS, TURING_SUMS
from tests.operators.test_every_operator import DECLARED
from tests.support.kernels.cpu_helpers import LIMITS, processes, toolchain
from workers.cpu.build import build_cpu
from workers.cpu.library import CpuLibrary
from workers.cpu.run import plan_test

SEEDS, EACH, CPU_SECONDS = 50, 8, 30.0


def various(kernels: list[Kernel]) -> list[Kernel]:
    """Of each dtype, function and algorithm one, as many as EACH in turn."""
    by_kind: dict[tuple[object, ...], Kernel] = {}
    for kernel in kernels:
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        by_kind.setdefault((s["dtype"], s.get("fn"), t.get("algorithm"), t.get("mma_k"), t.get("split")), kernel)
    chosen = list(by_kind.values())
    return list(islice(chosen, 0, None, max(1, len(chosen) // EACH)))[:EACH]


@pytest.mark.long
@pytest.mark.parametrize("sums", [TURING_SUMS, HOPPER_SUMS])
@pytest.mark.parametrize("name", [name for name, declared in DECLARED.items() if declared.proofs is not None])
def test_right_kernels_pass_with_every_seed(name: str, sums: int, tmp_path: Path) -> None:
    proofs = DECLARED[name].proofs
    assert proofs is not None
    kernels = various(list(proofs.kernels().values()))
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
