"""nvcc makes of every primitive the instruction that is meant, and nothing of those that a kernel does not call."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.gpu.primitive_checks import CHECKS
from tests.gpu.run_primitives import device_text, find_nvcc, runs_on

# Regular expressions, by check.
INSTRUCTIONS: dict[str, tuple[str, ...]] = {
    **{f"vectors {name}": ("ld.global.nc.v4", "st.global.v4", "st.shared.v4", "ld.shared.v4", "bar.sync \t0;")
       for name in ("float 4", "int 4", "Half 8", "BFloat16 8", "signed char 16", "unsigned char 16")},
    **{f"vectors {name}": ("ld.global.nc.v2", "st.global.v2", "st.shared.v2", "ld.shared.v2")
       for name in ("float 2", "int 2", "Half 4", "BFloat16 4", "signed char 8", "unsigned char 8")},
    **{f"vectors {name}": ("ld.global.nc.[bfsu]32", "st.global.[bfsu]32", "st.shared.[bfsu]32", "ld.shared.[bfsu]32")
       for name in ("float 1", "int 1", "Half 2", "BFloat16 2", "signed char 4", "unsigned char 4")},
    **{f"vectors {name}": ("ld.global.nc.[bu]16", "st.global.[bu]16", "st.shared.[bu]16", "ld.shared.[bu]16")
       for name in ("Half 1", "BFloat16 1", "signed char 2", "unsigned char 2")},
    **{f"vectors {name}": ("ld.global.nc.[bu]8", "st.global.[bu]8", "st.shared.[bu]8", "ld.shared.[bu]8")
       for name in ("signed char 1", "unsigned char 1")},
    "arithmetic": ("fma.rn.f32", "cvt.rn.f16.f32", "ex2.approx.ftz.f32", "max.f32"),
    "conversions": ("cvt.rn.f32.s32", "cvt.f32.f16", "cvt.rn.f16.f32"),
    "pairs": ("cvt.rn.f16x2.f32", "cvt.rn.bf16x2.f32", "cvt.rna.tf32.f32"),
    "bytes": ("prmt.b32",),
    "shuffles": ("shfl.sync.idx.b32", "shfl.sync.up.b32", "shfl.sync.down.b32", "shfl.sync.bfly.b32"),
    "votes": ("vote.sync.any.pred", "vote.sync.all.pred", "vote.sync.ballot.b32"),
    "warp": ("bar.warp.sync",),
    "block": ("bar.sync",),
    "some warps": ("bar.sync %r\\d+, %r\\d+;", "bar.arrive %r\\d+, %r\\d+;"),
    "additions": ("red.global.add.f32", "red.global.add.s32"),
    "copies": (
        "cp.async.cg.shared.global \\[%r\\d+\\], \\[%rd\\d+\\], 16, %r\\d+;",
        "cp.async.ca.shared.global \\[%r\\d+\\], \\[%rd\\d+\\], 8, %r\\d+;",
        "cp.async.ca.shared.global \\[%r\\d+\\], \\[%rd\\d+\\], 4, %r\\d+;",
        "cp.async.commit_group;", "cp.async.wait_group 1;", "cp.async.wait_group 0;",
    ),
    **{f"ldmatrix x{n}": (f"ldmatrix.sync.aligned.m8n8.x{n}.shared.b16",) for n in (1, 2, 4)},
    **{f"ldmatrix_trans x{n}": (f"ldmatrix.sync.aligned.m8n8.x{n}.trans.shared.b16",) for n in (1, 2, 4)},
    "m16n8k16_f16 numbers": ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",),
    "m16n8k16_bf16 numbers": ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",),
    "m16n8k16_f16_f16 numbers": ("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16",),
    "m16n8k8_f16 numbers": ("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32",),
    "m16n8k8_tf32 numbers": ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",),
    "m16n8k32_s8": ("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",),
    "m16n8k32_u8": ("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32",),
}  # fmt: skip
SPECIAL = ("mma.sync", "ldmatrix.sync", "cp.async", "red.global", "shfl.", "vote.", "bar.warp", "bar.arrive")


def meant(name: str) -> tuple[str, ...]:
    """Both checks of an mma have the same kernel."""
    return INSTRUCTIONS[name.replace("integers", "numbers")]


@pytest.fixture(scope="module", params=["sm_75", "sm_80", "sm_90a"])
def ptx(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """The architecture, and the PTX of each check's kernel that it has."""
    arch, folder = request.param, tmp_path_factory.mktemp("ptx")
    checks = [check for check in CHECKS if runs_on(check, arch)]
    (folder / "all.cu").write_text(device_text(checks))
    command = [find_nvcc(), "-ptx", f"-arch={arch.replace('sm_', 'compute_')}", "-std=c++17", "-O3", "all.cu"]
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0, finished.stderr
    bodies = re.split(r"^\.visible \.entry ", (folder / "all.ptx").read_text(), flags=re.MULTILINE)[1:]
    by_function = {body.split("(")[0]: body for body in bodies}
    return arch, {check.name: by_function[check.function] for check in checks}


def test_nvcc_makes_the_instructions_that_are_meant(ptx: tuple[str, dict[str, str]]) -> None:
    arch, bodies = ptx
    for name, body in bodies.items():
        for instruction in meant(name):
            assert re.search(instruction, body), f"{arch}, {name}: no {instruction} in\n{body}"


def test_vectors_move_in_one_access_each(ptx: tuple[str, dict[str, str]]) -> None:
    _, bodies = ptx
    for name, body in bodies.items():
        if name.startswith("vectors"):
            matches = re.findall(r"^\s*((?:ld|st)\.(?:global|shared|local))", body, re.MULTILINE)
            assert sorted(matches) == ["ld.global", "ld.shared", "st.global", "st.global", "st.shared"], name


def test_no_kernel_has_another_primitives_instruction(ptx: tuple[str, dict[str, str]]) -> None:
    """What is not called leaves nothing behind: so sm_75 can have the text of what only later GPUs execute."""
    _, bodies = ptx
    for name, body in bodies.items():
        own = " ".join(meant(name))
        assert {instruction for instruction in SPECIAL if instruction in body} == {
            instruction for instruction in SPECIAL if instruction in own
        }, name
