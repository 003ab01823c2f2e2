"""What runs kernels on the CPU is compiled once by a process, under each set of flags, and is no part of a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernels.cpu_helpers import LIMITS, matmul_kernel, processes, toolchain, verify
from workers.cpu import build as cpu_build
from workers.cpu.build import build_cpu
from workers.cpu.library import CpuLibrary
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


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Iterator[Commands]:
    """Of a process that has compiled none."""
    monkeypatch.setattr(cpu_build, "_runtimes", {})
    made = Commands()
    yield made
    made.close()


Build = Callable[..., list[Path]]


@pytest.fixture
def build(commands: Commands, tmp_path: Path) -> Build:
    def built(*kernels: Any, **flags: bool) -> list[Path]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        made = build_cpu(kernels, toolchain(), commands, LIMITS, folder=folder, **flags)
        assert not made.errors
        return [path for path, _ in made.libraries]

    return built


def test_it_is_compiled_once_for_all_files_of_the_same_flags(commands: Commands, build: Build) -> None:
    build(ONE)
    build(OTHER)
    build(ONE, counting=True)
    build(OTHER, counting=True)
    assert [name for name in commands.made if not name.startswith("group_")] == ["runtime.o", "runtime.o"]
    assert [bool(name.startswith("group_")) for name in commands.made] == [False, True, True, False, True, True]


def test_one_of_other_flags_is_not_linked(build: Build) -> None:
    """One that counts has an entry point more."""
    (plain,), (counting,), (again,) = build(ONE), build(ONE, counting=True), build(ONE)
    assert [hasattr(CpuLibrary(path)._library, "cukiln_count") for path in (plain, counting, again)] == [
        False, True, False
    ]  # fmt: skip


def test_another_text_is_compiled_anew(commands: Commands, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    build(ONE)
    text = cpu_build.render_runtime()
    monkeypatch.setattr(cpu_build, "render_runtime", lambda: text + "// another\n")
    build(ONE)
    assert commands.made.count("runtime.o") == 2


def test_where_it_is_refused_no_kernel_is_blamed(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_build, "render_runtime", lambda: "no C++")
    with pytest.raises(InfrastructureError, match=r"g\+\+ refused what runs kernels: .*error"):
        build(ONE)


def test_a_limit_that_ends_it_is_one_of_each_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_build, "_runtimes", {})
    verdicts = verify([ONE, OTHER], limits=replace(LIMITS, cpu_seconds=0.01), runner=processes())
    assert [verdict.verdict for verdict in verdicts] == ["compile_error"] * 2
    assert [verdict.details["limit"] for verdict in verdicts] == [{"cpu": 0.01}] * 2
