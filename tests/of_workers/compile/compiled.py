"""Kernels compiled with small limits, and compilers that are scripts."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path

from codegen.kernel import Kernel
from tests.support.fixtures.compile import LIMITS, SM_90A
from workers.compile.compile_group import GroupOutcome, compile_group
from workers.compile.toolchain import Toolchain
from workers.processes.processes import Limits, Processes


def compile_kernels(
    kernels: Sequence[Kernel], toolchain: Toolchain, processes: Processes, limits: Limits = LIMITS
) -> GroupOutcome:
    return compile_group(kernels, SM_90A, toolchain, processes, limits)


def statuses(outcome: GroupOutcome, kernels: Sequence[Kernel]) -> list[str]:
    return [outcome.outcomes[kernel.id].status for kernel in kernels]


def script(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


FAKE_NVCC = 'case "$1" in --version) echo "release 12.9, V12.9.41";; --list-gpu-code) printf "sm_80\\nsm_90\\n";; esac'
