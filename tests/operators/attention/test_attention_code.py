"""What becomes of attention's kernels: accesses to shared memory in a CPU run, registers of all kernels of level 1."""

from __future__ import annotations

from itertools import product

import pytest

from codegen.lower import lower
from codegen.targets import target
from tests.operators.attention.kernels import CLASSES, attention, kernel
from tests.operators.harness.declarations import LEVEL_1
from tests.operators.harness.machine_code import codes_of
from tests.support.cpu_helpers import processes, toolchain, verify


def test_no_access_to_shared_memory_has_a_bank_conflict() -> None:
    columns = ((64, 64), (96, 80), (128, 16), (48, 192))
    kernels = [kernel(qk=qk, vo=vo, q_in=q_in) for (qk, vo), q_in in product(columns, ("registers", "shared"))]
    for verdict in verify(kernels):
        accesses = verdict.details["shared_memory"]
        assert {access["kind"] for access in accesses} == {"ldmatrix", "cp_async", "read", "write"}
        assert [access for access in accesses if access["wavefronts"] != access["ideal"]] == []


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_kernel_of_level_1_spills(arch: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name, fields in CLASSES.items():
        kernels = list({c.kernel for c in lower(attention(**fields), target(arch), LEVEL_1).candidates})
        codes = codes_of(kernels, arch, tmp_path_factory.mktemp("codes"), toolchain(), processes())
        spilled = {k.tunables: (c.resources.spill_bytes, c.resources.stack_bytes) for k, c in codes.items()}
        assert set(spilled.values()) == {(0, 0)}, (name, spilled)
