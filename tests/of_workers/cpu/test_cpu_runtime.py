"""What runs kernels on the CPU is compiled once by a process, under each set of flags, and is no part of a kernel."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from codegen.kernel import Kernel
from tests.support.kernels.cpu_helpers import LIMITS, matmul_kernel, processes, toolchain, verify
from workers.cpu import build as cpu_build
from workers.cpu.build import build_cpu
from workers.processes.processes import Finished, InfrastructureError, Limits, Processes

ONE, OTHER = matmul_kernel(), matmul_kernel("nt")


class Commands(Processes):
    """Runs all, and remembers what g++ was to make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def run(self, argv: Sequence[str], *, cwd: Path, limits: Limits, **options: Any) -> Finished:
        self.made.append(argv[argv.index("-o") + 1])
        return super().run(argv, cwd=cwd, limits=limits, **options)


@pytest.fixture(autouse=True)
def _another_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each test: this process has compiled it for none before."""
    text = f"{cpu_build.render_runtime()}// {tmp_path}\n"
    monkeypatch.setattr(cpu_build, "render_runtime", lambda: text)


@pytest.fixture
def commands() -> Iterator[Commands]:
    made = Commands()
    yield made
    made.close()


def test_it_is_compiled_once_for_all_files_of_one_text_and_the_same_flags(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linked where it belongs: a library that counts has an entry point more."""

    def counts(kernel: Kernel, counting: bool = False) -> bool:
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            build = build_cpu([kernel], toolchain(), commands, LIMITS, folder=Path(folder), counting=counting)
            ((path, _),) = build.libraries
            return hasattr(ctypes.CDLL(str(path)), "cukiln_count")

    assert [counts(ONE), counts(ONE, counting=True), counts(OTHER), counts(OTHER, counting=True)] == [False, True] * 2
    assert [name == "runtime.o" for name in commands.made] == [True, False, True, False, False, False]
    text = cpu_build.render_runtime()
    monkeypatch.setattr(cpu_build, "render_runtime", lambda: text + "// another\n")
    assert not counts(ONE)
    assert commands.made[-2:-1] == ["runtime.o"]


def test_where_it_is_refused_no_kernel_is_blamed(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_build, "render_runtime", lambda: "no C++")
    with pytest.raises(InfrastructureError, match=r"g\+\+ refused what runs kernels: .*error"):
        build_cpu([ONE], toolchain(), commands, LIMITS, folder=tmp_path)


def test_a_limit_that_ends_it_is_one_of_each_kernel() -> None:
    verdicts = verify([ONE, OTHER], limits=replace(LIMITS, cpu_seconds=0.01), runner=processes())
    assert [verdict.verdict for verdict in verdicts] == ["compile_error"] * 2
    assert [verdict.details["limit"] for verdict in verdicts] == [{"cpu": 0.01}] * 2
