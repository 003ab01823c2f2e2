"""NVIDIA's compilers on a machine: in the wheels of this Python, in PATH, in a toolkit. Needs Python alone."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

TOOLKIT = "/usr/local/cuda"


def wheel_folders() -> list[Path]:
    """Folders of the `nvidia` namespace package that may hold the compiler wheels, of this interpreter."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return [*folders, *(Path(place) / "nvidia" for place in sys.path if place.endswith("site-packages"))]


def in_wheels(pattern: str, folders: Iterable[Path] | None = None) -> list[Path]:
    """In the folders of NVIDIA's wheels, one after the other, the newest first."""
    places = wheel_folders() if folders is None else folders
    return [path for folder in places for path in sorted(folder.glob(pattern), reverse=True)]


def nvcc_in(folders: Iterable[Path]) -> Path | None:
    """Of the first folder that holds one; there, of the newest CUDA."""
    return next(iter(in_wheels("cu*/bin/nvcc", folders)), None)


def nvrtc_in(folders: Iterable[Path]) -> tuple[Path, Path] | None:
    """NVRTC's library and ptxas of CUDA 12, of the first folder that holds both."""
    for folder in folders:
        library, ptxas = folder / "cuda_nvrtc/lib/libnvrtc.so.12", folder / "cuda_nvcc/bin/ptxas"
        if library.is_file() and ptxas.is_file():
            return library, ptxas
    return None


def toolkits() -> list[str]:
    """Where a toolkit may lie, the one that is named first."""
    return [folder for folder in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), TOOLKIT) if folder]


def find_nvcc() -> str:
    """Where nothing is installed of ours: the one that CUKILN_NVCC names, else that of the wheels, else the one in
    PATH, else a toolkit's. Raises FileNotFoundError."""
    if named := os.environ.get("CUKILN_NVCC"):
        return named
    if not is_for_cuda_12() and (compilers := in_wheels("cu*/bin/nvcc")):
        return str(compilers[0])
    if found_in_path := shutil.which("nvcc"):
        return found_in_path
    for toolkit in toolkits():
        if of_toolkit := shutil.which(str(Path(toolkit, "bin", "nvcc"))):
            return of_toolkit
    places = f"in the wheels of {sys.prefix}, in PATH, in bin of {' or '.join(toolkits())}"
    raise FileNotFoundError(f"no nvcc: name one with CUKILN_NVCC; it was looked for {places}")


def is_for_cuda_12() -> bool:
    return os.environ.get("CUKILN_CUDA") == "12"
