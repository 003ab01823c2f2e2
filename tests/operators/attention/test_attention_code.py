"""What becomes of attention's kernels: accesses to shared memory in a CPU run, registers of all kernels of level 1."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from codegen.kernel import Kernel
from codegen.lower import lower
from codegen.operators.attention.problem import PAGE_SIZES
from codegen.plan.verification_plan import Part
from codegen.targets import target
from tests.operators.attention.claims import reads_values_transposed, touches_no_local_memory
from tests.operators.attention.kernels import CLASSES, attention, kernel
from tests.operators.harness.declarations import LEVEL_0, LEVEL_1
from tests.operators.harness.machine_code import ALIGNED, codes_of
from tests.support.kernels.cpu_helpers import processes, toolchain, verify
from tests.support.run.each_run import some_each_run

Q_IN = ("registers", "shared")


@pytest.mark.parametrize(("qk", "vo"), some_each_run([(64, 64), (96, 80), (128, 16), (48, 192)]))
def test_no_access_to_shared_memory_has_a_bank_conflict(qk: int, vo: int) -> None:
    # Each launch once: other runs are not race-checked.
    for verdict in verify([kernel(qk=qk, vo=vo, q_in=q_in) for q_in in Q_IN], part=Part(order="ascending")):
        accesses = verdict.details["shared_memory"]
        assert {access["kind"] for access in accesses} == {"ldmatrix", "cp_async", "read", "write"}
        assert [access for access in accesses if access["wavefronts"] != access["ideal"]] == []


@pytest.mark.parametrize("stages", some_each_run([1, 2]))
def test_a_kernel_has_the_same_code_alone_as_among_others(stages: int, tmp_path: Path) -> None:
    """A winner is built alone, and its verdict is that of the code which was verified."""
    kernels = [kernel(stages=stages, q_in=q_in, tile_q=64, warps=4) for q_in in Q_IN]
    together = bodies(kernels, tmp_path / "together")
    alone: dict[str, str] = {}
    for number, each in enumerate(kernels):
        alone |= bodies([each], tmp_path / f"{number}")
    assert alone == together


def test_partial_results_are_merged_by_16_bytes(tmp_path: Path) -> None:
    kernels = [kernel(split="workspace"), kernel("bfloat16", split="workspace", lse=True, qk=32, vo=96)]
    for own, code in codes_of(kernels, "sm_90a", tmp_path, toolchain(), processes(), "merge").items():
        assert code.count("ld.global.nc.v4") and code.count("st.global.v4") and code.count("ex2.approx.ftz.f32")
        assert code.count("ld.global.nc.v2") and not code.count("ld.local") + code.count("st.local")
        lse = [name for name in code.instructions if name.startswith("st.global") and "v4" not in name]
        assert bool(lse) == own.signature_dict["lse"]
        assert (code.resources.spill_bytes, code.resources.stack_bytes) == (0, 0)


def bodies(kernels: Sequence[Kernel], folder: Path) -> dict[str, str]:
    """The PTX of each, without the numbers of its labels."""
    folder.mkdir()
    codes = codes_of(kernels, "sm_90a", folder, toolchain(), processes())
    return {own.namespace: re.sub(r"L__BB\d+_", "L_", code.body.rsplit("}", 1)[0]) for own, code in codes.items()}


WIDE = {**CLASSES["decode"], "head_dim_qk": 256, "heads_q": 8, "heads_kv": 1, "dtype": "bfloat16", "lse": True}
UNEVEN: dict[str, dict[str, Any]] = {
    "Llama, ragged": {**CLASSES["Llama"], "lengths": "ragged"},
    **{
        f"{name}, pages of {size}": {**CLASSES.get(name, WIDE), "lengths": "paged", "page_size": size}
        for name in ("Llama", "decode", "Gemma", "decode, heads of 256")
        for size in PAGE_SIZES
    },
}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", [*CLASSES, *UNEVEN])
def test_every_kernel_of_levels_0_and_1_multiplies_on_tensor_cores_what_it_copies_by_16_bytes(
    name: str, arch: str, tmp_path: Path
) -> None:
    """And reads by ldmatrix, of values transposed, and has no local memory."""
    problem = attention(**{**CLASSES, **UNEVEN}[name])
    kernels = list({c.kernel for level in (LEVEL_0, LEVEL_1) for c in lower(problem, target(arch), level).candidates})
    assert {kernel.signature_dict["align"] for kernel in kernels} == {8}
    codes = codes_of(kernels, arch, tmp_path, toolchain(), processes())
    spilled = {k.tunables: (c.resources.spill_bytes, c.resources.stack_bytes) for k, c in codes.items()}
    assert set(spilled.values()) == {(0, 0)}, spilled
    for own, code in codes.items():
        for claim in (*ALIGNED, reads_values_transposed, touches_no_local_memory):
            claim(own, code)
