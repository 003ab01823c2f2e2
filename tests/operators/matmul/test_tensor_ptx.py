"""What nvcc makes of the tensor-core kernels: mma.sync of the right type, ldmatrix, 16-byte cp.async, no spills; and
what the CPU's race-checked run counts of their main loop: no bank conflicts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators import operator
from codegen.plan.verification_plan import Part
from codegen.search.search import Search
from codegen.targets import target
from codegen.text.render_group import render_device
from tests.operators.harness.machine_code import Code, codes_of
from tests.support.fixtures.codegen import default_candidate, matmul
from tests.support.kernels.cpu_helpers import TILE_K, tensor_kernel, verify
from tests.support.kernels.random_cases import seed_of_this_run
from tests.support.kernels.spills import require_no_spills
from tests.support.run.each_run import SOME_ROWS, rows_using, some_each_run
from workers.compile.toolchain import Toolchain
from workers.processes.processes import Processes

DTYPES = ("float16", "bfloat16", "float32", "int8")
LAYOUTS = ("nn", "nt", "tn", "tt")
CUBE = {"m": 1024, "n": 1024, "k": 1024}
MMA = {
    "float16": "m16n8k16.row.col.f32.f16.f16.f32",
    "bfloat16": "m16n8k16.row.col.f32.bf16.bf16.f32",
    "float32": "m16n8k8.row.col.f32.tf32.tf32.f32",
    "int8": "m16n8k32.row.col.s32.s8.s8.s32",
}
# Every aligned kind of Config with the targets that it is compiled for; sm_75 has tensor cores for fp16 alone.
EVERY_KIND = [*product(("sm_80", "sm_90a"), DTYPES, LAYOUTS), *product(("sm_75",), ("float16",), LAYOUTS)]
# The text does not depend on the target: of sm_80 each type is compiled in one layout.
KINDS = [kind for kind in EVERY_KIND if kind[0] != "sm_80" or kind[1:] in zip(DTYPES, LAYOUTS, strict=True)]
# Each run has every type and every layout on sm_90a, by its seed in another order, and one type elsewhere.
_TURN = seed_of_this_run() % 4
EACH_RUN = [
    *(("sm_90a", dtype, LAYOUTS[(_TURN + number) % 4]) for number, dtype in enumerate(DTYPES)),
    ("sm_80", DTYPES[_TURN], LAYOUTS[_TURN]),
    ("sm_75", "float16", LAYOUTS[_TURN]),
]
ROWS = [pytest.param(*kind, marks=() if SOME_ROWS and kind in EACH_RUN else pytest.mark.long) for kind in KINDS]


def cube(dtype: str, layout: str, **fields: Any) -> Any:
    return matmul(**{**CUBE, "dtype": dtype, "layout": layout, "allow_tf32": True, **fields})


@pytest.fixture(scope="module")
def codes(
    request: pytest.FixtureRequest, toolchain: Toolchain, processes: Processes,
    tmp_path_factory: pytest.TempPathFactory,
) -> Mapping[tuple[str, str, str], Code]:  # fmt: skip
    """The level-0 kernel of every kind that this run's tests ask for: one nvcc call per target."""
    by_name: dict[tuple[str, str, str], Code] = {}
    selected = [(row["arch"], row["dtype"], row["layout"]) for row in rows_using("codes", request)]
    for arch in dict.fromkeys(arch for arch, _, _ in KINDS):
        of_target = {kind: candidate_of(*kind).kernel for kind in KINDS if kind[0] == arch and kind in selected}
        if not of_target:
            continue
        compiled = codes_of(list(of_target.values()), arch, tmp_path_factory.mktemp(arch), toolchain, processes)
        by_name |= {kind: compiled[kernel] for kind, kernel in of_target.items()}
    return by_name


@cache
def candidate_of(arch: str, dtype: str, layout: str) -> Candidate:
    return default_candidate(cube(dtype, layout), arch)


def test_the_text_does_not_depend_on_the_target() -> None:
    kernels = dict.fromkeys(candidate_of(*kind).kernel for kind in EVERY_KIND)
    assert "__CUDA_ARCH" not in render_device(list(kernels)).text


def turned(dtype: str, layout: str) -> list[bool]:
    """Whether A and B are stored along m or n, not along k as the fragments want them."""
    return [layout[0] == "t", layout[1] == "n"]


@pytest.mark.parametrize(("arch", "dtype", "layout"), ROWS)
def test_products_are_computed_by_mma_sync_of_their_type(
    arch: str, dtype: str, layout: str, codes: Mapping[tuple[str, str, str], Code]
) -> None:
    code, t = codes[arch, dtype, layout], candidate_of(arch, dtype, layout).schedule
    wanted = "m16n8k8.row.col.f32.f16.f16.f32" if arch == "sm_75" else MMA[dtype]
    assert {name for name in code.instructions if name.startswith(("mma", "wmma"))} == {f"mma.sync.aligned.{wanted}"}
    rows, columns = (int(t.get(f"tile_{axis}")) // int(t.get(f"warps_{axis}")) for axis in "mn")
    # A k-step of 32 bytes is one mma for each 16 x 8 outputs, two of those with half the k.
    per_step = rows // 16 * (columns // 8) * (2 if arch == "sm_75" else 1)
    assert code.count("mma") > 0
    assert code.count("mma") % per_step == 0
    assert code.count("fma") == 0


@pytest.mark.parametrize(("arch", "dtype", "layout"), ROWS)
def test_tiles_come_in_16_bytes_at_once(
    arch: str, dtype: str, layout: str, codes: Mapping[tuple[str, str, str], Code]
) -> None:
    code = codes[arch, dtype, layout]
    loads = {name for name in code.instructions if name.startswith("ld.global")}
    if arch == "sm_75" or (dtype == "int8" and layout != "nt"):
        # sm_75 has no cp.async, and bytes are turned on their way: by way of registers.
        assert code.count("cp.async") == 0
        assert {re.sub(r"[usbf]32$", "b32", name) for name in loads} == {"ld.global.nc.v4.b32"}
        return
    assert {name for name in code.instructions if name.startswith("cp.async.c") and "commit" not in name} == {
        "cp.async.cg.shared.global 16"
    }
    assert code.count("cp.async.commit_group") > 0
    assert code.count("cp.async.wait_group") > 0
    assert loads == set()


def test_unaligned_tiles_come_in_what_their_alignment_allows(
    tmp_path: Path, toolchain: Toolchain, processes: Processes
) -> None:
    asynchronous = {align: tensor_kernel("nn", "float16", (align, align, align), stages=3) for align in (4, 2)}
    single = tensor_kernel("nn", "float16", (1, 1, 1), stages=2, copy="registers")
    codes = codes_of([*asynchronous.values(), single], "sm_80", tmp_path, toolchain, processes)
    for align, kernel in asynchronous.items():
        copies = {name for name in codes[kernel].instructions if re.match(r"cp\.async\.c[ag]", name)}
        assert copies == {f"cp.async.ca.shared.global {2 * align}"}
    assert codes[single].count("cp.async") == 0
    assert {name for name in codes[single].instructions if name.startswith("ld.global")} == {"ld.global.nc.u16"}


@pytest.mark.parametrize(("arch", "dtype", "layout"), ROWS)
def test_fragments_are_read_by_ldmatrix(
    arch: str, dtype: str, layout: str, codes: Mapping[tuple[str, str, str], Code]
) -> None:
    """Those of 16-bit elements that lie along m or n by ldmatrix.trans. 32-bit ones, which it cannot turn, by single
    words: ld.shared.b32. Bytes lie along k in shared memory however they are stored."""
    code = codes[arch, dtype, layout]
    plain = code.count("ldmatrix.sync.aligned.m8n8.x4.shared.b16")
    turning = code.count("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16")
    assert code.count("ldmatrix") == plain + turning
    words = sum(number for name, number in code.instructions.items() if re.fullmatch(r"ld\.shared\.[ubf]32", name))
    how = [turned(dtype, layout)[i] and dtype != "int8" for i in range(2)]
    assert (plain > 0) == (not all(how))
    assert (turning > 0) == (any(how) and dtype != "float32")
    assert (words > 0) == (any(how) and dtype == "float32")


@pytest.mark.parametrize(("arch", "dtype", "layout"), ROWS)
def test_outputs_leave_in_16_bytes_at_once(
    arch: str, dtype: str, layout: str, codes: Mapping[tuple[str, str, str], Code]
) -> None:
    code = codes[arch, dtype, layout]
    stores = {re.sub(r"[usbf]32$", "b32", name) for name in code.instructions if name.startswith("st.global")}
    assert stores == {"st.global.v4.b32"}


@pytest.mark.parametrize(("arch", "dtype", "layout"), ROWS)
def test_level_0_neither_spills_nor_uses_local_memory(
    arch: str, dtype: str, layout: str, codes: Mapping[tuple[str, str, str], Code]
) -> None:
    code = codes[arch, dtype, layout]
    assert code.count("ld.local") + code.count("st.local") == 0
    resources = code.resources
    assert (resources.spill_bytes, resources.stack_bytes, resources.static_shared_bytes) == (0, 0, 0)


def kernels_of_search(problem: Any, arch: str, search: Search) -> list[Kernel]:
    return list(dict.fromkeys(candidate.kernel for candidate in lower(problem, target(arch), search).candidates))


@pytest.mark.parametrize(
    ("arch", "dtype", "layout", "epilogue"),
    some_each_run(
        [
            ("sm_90a", "float16", "nt", [{"op": "bias", "axis": "n"}, {"op": "gelu"}]),
            ("sm_80", "float32", "nn", []),
            ("sm_80", "int8", "tn", []),
            ("sm_75", "float16", "tt", [{"op": "residual"}]),
        ]
    ),
)
def test_a_sample_of_level_1_neither_spills_nor_uses_local_memory(
    arch: str, dtype: str, layout: str, epilogue: list[Any], tmp_path: Path, toolchain: Toolchain, processes: Processes
) -> None:
    # Schedules that differ only at launch share a kernel.
    kernels = kernels_of_search(cube(dtype, layout, epilogue=epilogue), arch, Search(level=1, limit=5, seed=3))
    assert len(kernels) >= 3
    require_no_spills(kernels, arch, tmp_path, toolchain, processes)


SHORT_K: list[tuple[str, str, str, dict[str, Any]]] = [
    ("sm_90a", "float16", "nt", {"batch": 96, "m": 128, "n": 128, "k": 64}),
    ("sm_80", "bfloat16", "tn", {"k": 52}),
    ("sm_80", "float32", "nn", {"k": 24}),
]


@pytest.mark.parametrize(("arch", "dtype", "layout", "fields"), some_each_run(SHORT_K))
def test_level_1_with_a_constant_short_k_neither_spills_nor_uses_local_memory(
    arch: str, dtype: str, layout: str, fields: dict[str, Any], tmp_path: Path, toolchain: Toolchain,
    processes: Processes,
) -> None:  # fmt: skip
    """With one or two steps loops are unrolled, and few tiles show what nvcc then makes of an array."""
    constant = with_constant_k(arch, dtype, layout, fields)
    require_no_spills(constant[::3], arch, tmp_path, toolchain, processes)


@pytest.mark.long
@pytest.mark.parametrize(("arch", "dtype", "layout", "fields"), SHORT_K)
def test_no_kernel_with_a_constant_short_k_spills(
    arch: str, dtype: str, layout: str, fields: dict[str, Any], tmp_path: Path, toolchain: Toolchain,
    processes: Processes,
) -> None:  # fmt: skip
    require_no_spills(with_constant_k(arch, dtype, layout, fields), arch, tmp_path, toolchain, processes)


def with_constant_k(arch: str, dtype: str, layout: str, fields: dict[str, Any]) -> list[Kernel]:
    kernels = kernels_of_search(cube(dtype, layout, **fields), arch, Search(level=1))
    constant = [kernel for kernel in kernels if kernel.tunables.get("static_k")]
    assert len(constant) >= 16
    return constant


# A cube, one that streams a weight matrix past a few rows, tail and unaligned ones.
PROBLEMS: tuple[dict[str, Any], ...] = (
    CUBE,
    {"m": 16, "n": 4096, "k": 4096},
    {"m": 512, "n": 3072, "k": 768, "epilogue": [{"op": "bias", "axis": "n"}, {"op": "gelu"}]},
    {"m": 1000, "n": 1001, "k": 333},
)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("arch", "dtype", "layout"), EVERY_KIND)
def test_no_kernel_of_level_1_spills(
    arch: str, dtype: str, layout: str, tmp_path: Path, toolchain: Toolchain, processes: Processes
) -> None:
    # Every type sees every problem on every target, in one layout each.
    fields = dict(PROBLEMS[(LAYOUTS.index(layout) + DTYPES.index(dtype)) % len(PROBLEMS)])
    if dtype == "int8" and fields.get("epilogue"):
        fields["out_dtype"] = "float16"
    kernels = kernels_of_search(cube(dtype, layout, **fields), arch, Search(level=1))
    assert len(kernels) >= 4
    require_no_spills(kernels, arch, tmp_path, toolchain, processes)


# ---- bank conflicts of the main loop, as the race-checked run on the CPU counts them


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("arch", "dtype", "layout"), EVERY_KIND)
def test_every_aligned_config_of_level_1_is_made_of_the_instructions_of_level_0(
    arch: str, dtype: str, layout: str, tmp_path: Path, toolchain: Toolchain, processes: Processes
) -> None:
    kernels = kernels_of_search(cube(dtype, layout), arch, Search(level=1))
    result = codes_of(kernels, arch, tmp_path, toolchain, processes)
    wanted = of_tensor_cores(result[candidate_of(arch, dtype, layout).kernel])
    assert {kernel.tunables: of_tensor_cores(code) for kernel, code in result.items()} == {
        kernel.tunables: wanted for kernel in kernels
    }


def of_tensor_cores(code: Code) -> set[str]:
    return {name for name in code.instructions if name.startswith(("mma", "cp.async.c", "ldmatrix"))}


def kinds_of_tiles() -> Iterator[tuple[str, Kernel]]:
    """The shapes that tiles can have in shared memory: rows along k by their bytes, the others by the tile's own
    extent; turned bytes, which are stored one way and lie the other, by both."""
    for dtype, depth in product(DTYPES, (32, 64, 128)):
        tile = {"tile_m": 64, "tile_n": 32, "warps_m": 2, "warps_n": 2, "tile_k": depth * TILE_K[dtype] // 64}
        for layout in LAYOUTS if dtype == "int8" else ("nt",):
            yield f"{dtype} {layout}, {depth} bytes of k", kernel_of(dtype, layout, tile)
    for dtype, extent in product(DTYPES, (16, 32, 64, 128, 256)):
        tile = {"tile_m": extent, "tile_n": extent, "warps_m": min(extent // 16, 2), "warps_n": min(extent // 16, 4)}
        yield f"{dtype} tn, {extent} rows and columns", kernel_of(dtype, "tn", tile)
    for dtype, layout in product(DTYPES, ("nn", "tt")):
        yield f"{dtype} {layout}", kernel_of(dtype, layout, {"tile_m": 32, "tile_n": 32})


def kernel_of(dtype: str, layout: str, tile: Mapping[str, Any]) -> Kernel:
    copy = "registers" if dtype == "int8" and layout != "nt" else "cp_async"
    return tensor_kernel(layout, dtype, copy=copy, **tile)


def main_loop(text: str) -> range:
    """Lines of tensor.cuh before the way out of the sums: the exchange of the epilogue is no part of the main loop."""
    lines = text.splitlines()
    end = next(number for number, line in enumerate(lines, 1) if "void write_direct(" in line)
    return range(1, end)


def conflicts(kernels: Mapping[str, Kernel]) -> dict[str, list[str]]:
    """Of each kernel, the places of its main loop that take more wavefronts than they must, with both numbers."""
    lines = main_loop(operator("matmul").kernel_texts["gemm/tensor.cuh"])
    by_name = {}
    # Each launch once: other runs are not race-checked.
    for name, verdict in zip(kernels, verify(list(kernels.values()), part=Part(order="ascending")), strict=True):
        assert (verdict.verdict, verdict.message) == ("ok", ""), name
        sites = [detail for detail in verdict.details["shared_memory"] if is_in(detail["site"], lines)]
        # Tiles are written and read at two places at least, or nothing was race-checked.
        assert len({site["site"] for site in sites}) >= 2 and all(site["warp_accesses"] > 0 for site in sites), name
        by_name[name] = [
            f"{site['kind']} of {site['bytes']} bytes at {site['site']}: {site['wavefronts']} for {site['ideal']}"
            for site in sites
            if site["wavefronts"] != site["ideal"]
        ]
    return by_name


def is_in(site: str, lines: range) -> bool:
    file, line = site.rsplit(":", 1)
    return file == "gemm/tensor.cuh" and int(line) in lines


def require_no_conflicts(kernels: Mapping[str, Kernel]) -> None:
    assert {name: sites for name, sites in conflicts(kernels).items() if sites} == {}


def test_the_main_loop_has_no_bank_conflicts() -> None:
    """Of each type in a shape of tiles, another by each run's seed."""
    rng = random.Random(seed_of_this_run())
    kinds = dict(kinds_of_tiles())
    some = [rng.choice([name for name in kinds if name.startswith(dtype)]) for dtype in DTYPES]
    require_no_conflicts({name: kinds[name] for name in some})


@pytest.mark.long
def test_the_main_loop_has_no_bank_conflicts_in_any_shape_of_tiles() -> None:
    require_no_conflicts(dict(kinds_of_tiles()))
