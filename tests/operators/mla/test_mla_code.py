"""What becomes of the kernels of multi-head latent attention on sm_80, and of all of level 1."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.kernel import Kernel
from codegen.lower import lower
from codegen.targets import target
from tests.operators.harness.declarations import LEVEL_0, LEVEL_1
from tests.operators.harness.machine_code import codes_of, reads_tables_ahead_of_copies
from tests.operators.mla.claims import CLAIMS, CLASSES
from tests.operators.mla.kernels import OP, mla
from tests.support.kernels.cpu_helpers import processes, toolchain


def kernels_of(arch: str, level: int) -> list[Kernel]:
    search = LEVEL_0 if level == 0 else LEVEL_1
    candidates = (c for fields in CLASSES.values() for c in lower(mla(**fields), target(arch), search).candidates)
    return list(dict.fromkeys(candidate.kernel for candidate in candidates))


def require_claimed(kernels: list[Kernel], arch: str, folder: Path) -> None:
    for kernel, code in codes_of(kernels, arch, folder, toolchain(), processes()).items():
        for claim in CLAIMS:
            claim(kernel, code)


def test_kernels_of_level_0_and_the_largest_of_level_1_are_on_sm_80_what_is_claimed(tmp_path: Path) -> None:
    """16-byte cp.async, ldmatrix both ways, mma.sync, no local memory, page numbers ahead of the copies."""
    largest = max(kernels_of("sm_80", 1), key=OP.estimated_registers)
    require_claimed([*kernels_of("sm_80", 0), largest], "sm_80", tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_kernel_of_levels_0_and_1_is_what_is_claimed(arch: str, tmp_path: Path) -> None:
    require_claimed(list({*kernels_of(arch, 0), *kernels_of(arch, 1)}), arch, tmp_path)


def test_a_copy_that_waits_for_a_number_of_its_own_turn_is_noticed(tmp_path: Path) -> None:
    (kernel, *_) = kernels_of("sm_80", 0)
    (code,) = codes_of([kernel], "sm_80", tmp_path, toolchain(), processes()).values()
    reads_tables_ahead_of_copies(kernel, code)
    wait = "cp.async.wait_group"
    late = code.body.replace(wait, "ld.global.nc.u32 %r1, [%rd1];\n\t" + wait)
    object.__setattr__(code, "body", late)
    with pytest.raises(AssertionError):
        reads_tables_ahead_of_copies(kernel, code)
