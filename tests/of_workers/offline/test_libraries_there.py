"""What of a machine's own libraries is there: what is needed of each is asked for, not its import alone."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu import run_primitives
from workers.compile import find_compilers
from workers.offline import libraries_there
from workers.offline.libraries_there import USED, look


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a test asks for is looked at: the others take seconds."""
    monkeypatch.setattr(libraries_there, "USED", {})


def asked(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(libraries_there, "USED", {name: USED[name]})
    return look()[name]


def test_cupy_compiles_with_nvrtc_and_the_headers_that_it_finds_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    version, _, folder = asked("NVRTC", monkeypatch)["is"].partition(", headers in ")
    assert version.split(".")[0].isdigit() and Path(folder, "cuda_fp16.h").is_file()


def test_a_machine_without_cudas_headers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(options: tuple[str, ...]) -> tuple[str, ...]:
        raise RuntimeError("Failed to find CUDA headers. Please install CUDA toolkit headers")

    monkeypatch.setitem(sys.modules, "cupy._core.core", SimpleNamespace(assemble_cupy_compiler_options=none))
    there = asked("NVRTC", monkeypatch)
    assert there["missing"].startswith("Failed to find CUDA headers") and "CuPy compiles" in there["needed_for"]


def test_nvml_is_there_where_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimpleNamespace(nvmlInit=lambda: None, nvmlSystemGetNVMLVersion=lambda: "13.580.1")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert asked("NVML", monkeypatch) == {"is": "13.580.1"}

    def missing() -> None:
        raise OSError("NVML Shared Library Not Found")

    nvml.nvmlInit = missing
    assert asked("NVML", monkeypatch)["missing"] == "NVML Shared Library Not Found"


def test_a_pytorch_for_cpus_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(version=SimpleNamespace(cuda=None), __version__="2.13+cpu")
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert asked("PyTorch", monkeypatch)["missing"] == "PyTorch 2.13+cpu is not for CUDA"
    torch.version.cuda = "13.0"
    assert asked("PyTorch", monkeypatch) == {"is": "2.13+cpu"}


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH", ""])
def test_nvcc_is_found_in_a_toolkit_by_all_that_look_for_it(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(0o755)
    monkeypatch.setenv("PATH", "")
    for name in ("CUDA_HOME", "CUDA_PATH", "CUKILN_NVCC"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(find_compilers, "TOOLKIT", "/nowhere" if variable else str(tmp_path))
    monkeypatch.setattr(find_compilers, "in_wheels", lambda pattern: [])
    assert run_primitives.find_nvcc() == asked("nvcc", monkeypatch)["is"] == str(nvcc)
    nvcc.unlink()
    assert asked("nvcc", monkeypatch)["missing"].startswith("no nvcc: name one with CUKILN_NVCC; it was looked for")
    with pytest.raises(run_primitives.NoCompiler, match="in PATH, in bin of"):
        run_primitives.find_nvcc()


def test_the_nvcc_of_the_wheels_is_named_where_it_is_what_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.touch(0o755)
    for name in ("CUKILN_NVCC", "CUKILN_CUDA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(find_compilers, "in_wheels", lambda pattern: [nvcc])
    assert asked("nvcc", monkeypatch)["is"] == run_primitives.find_nvcc() == str(nvcc)
