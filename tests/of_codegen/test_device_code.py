"""What nvcc makes of the kernels: no spills, and memory instructions as wide as the alignment class promises."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from codegen.kernel import Kernel
from codegen.lower import lower
from codegen.search.search import Search
from codegen.targets import target
from codegen.text.render_group import render_device
from tests.support.fixtures.codegen import default_candidate, matmul
from tests.support.fixtures.compile import LIMITS
from tests.support.kernels.spills import require_no_spills
from tests.support.run.each_run import some_each_run
from workers.compile.compile_file import PTX, FileCompiler
from workers.compile.toolchain import Toolchain
from workers.processes.processes import Processes

TARGETS = ("sm_75", "sm_80", "sm_90a")
CUBE = {"m": 1024, "n": 1024, "k": 1024}
EPILOGUE = [{"op": "bias", "axis": "n"}, {"op": "residual"}, {"op": "gelu"}]
_ACCESS = re.compile(r"^\s*(?:@%p\d+ )?((?:ld|st)\.(?:global|shared|local|param)\S*)", re.MULTILINE)


def kernels_of(problem: Any, arch: str, search: Search) -> list[Kernel]:
    return list(dict.fromkeys(candidate.kernel for candidate in lower(problem, target(arch), search).candidates))


@pytest.mark.parametrize("arch", some_each_run(TARGETS))
def test_the_default_schedule_neither_spills_nor_uses_local_memory(
    arch: str, tmp_path: Path, toolchain: Toolchain, processes: Processes
) -> None:
    """In two layouts, with 16-byte and with 4-byte accesses."""
    problems = [
        matmul(m=extent, n=extent, k=extent, layout=layout, epilogue=EPILOGUE)
        for layout, extent in product(("nn", "nt"), (1024, 1023))
    ]
    kernels = [default_candidate(problem, arch).kernel for problem in problems]
    assert len(set(kernels)) == 4
    require_no_spills(kernels, arch, tmp_path, toolchain, processes)


@pytest.mark.parametrize(("arch", "layout"), some_each_run([("sm_80", "nt"), ("sm_90a", "nn")]))
def test_level_1_neither_spills_nor_uses_local_memory(
    arch: str, layout: str, tmp_path: Path, toolchain: Toolchain, processes: Processes
) -> None:
    kernels = kernels_of(matmul(**CUBE, layout=layout), arch, Search(level=1, limit=6, seed=2))
    assert len(kernels) == 6
    require_no_spills(kernels, arch, tmp_path, toolchain, processes)


@pytest.mark.long
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_no_kernel_of_level_1_spills(
    arch: str, layout: str, tmp_path: Path, toolchain: Toolchain, processes: Processes
) -> None:
    kernels = kernels_of(matmul(**CUBE, layout=layout, epilogue=EPILOGUE[:2]), arch, Search(level=1))
    assert len(kernels) >= 64
    require_no_spills(kernels, arch, tmp_path, toolchain, processes)


def accesses(problem: Any, arch: str, folder: Path, toolchain: Toolchain, processes: Processes) -> Counter[str]:
    """How often each memory instruction stands in the PTX of the problem's default kernel."""
    group = render_device([default_candidate(problem, arch).kernel])
    FileCompiler(folder, toolchain, processes, LIMITS).compile_device(group.text, arch, group.symbols)
    text = (folder / PTX).read_text()
    assert re.search(r"^\.maxntid 64(, 1, 1)?$", text, re.MULTILINE), "__launch_bounds__ did not reach the PTX"
    return Counter(match[1] for match in _ACCESS.finditer(text))


@pytest.mark.parametrize("arch", some_each_run(["sm_80", "sm_90a"]))
def test_an_aligned_kernel_moves_16_bytes_at_once(
    arch: str, tmp_path: Path, toolchain: Toolchain, processes: Processes
) -> None:
    problem = matmul(**CUBE, layout="tn", epilogue=EPILOGUE)
    schedule = default_candidate(problem, arch).schedule.as_dict()
    result = accesses(problem, arch, tmp_path, toolchain, processes)
    memory = {name for name in result if not name.startswith("ld.param")}
    # Inputs through the read-only cache; tn is stored as shared memory wants it, so nothing moves less than 16 bytes.
    assert {re.sub(r"[uf]32$", "b32", name) for name in memory} == {
        "ld.global.nc.v4.b32", "st.global.v4.b32", "ld.shared.v4.b32", "st.shared.v4.b32",
    }  # fmt: skip
    outputs = int(schedule["thread_m"]) * int(schedule["thread_n"])
    assert result["st.global.v4.f32"] == outputs // 4


def test_an_unaligned_kernel_moves_one_element_at_once(
    tmp_path: Path, toolchain: Toolchain, processes: Processes
) -> None:
    problem = matmul(**CUBE, layout="tn", lda=1025, ldb=1025, ldc=1025, epilogue=EPILOGUE)
    result = accesses(problem, "sm_80", tmp_path, toolchain, processes)
    assert not any("global" in name and ".v" in name for name in result)
    assert any(name.startswith("ld.shared.v4") for name in result)
