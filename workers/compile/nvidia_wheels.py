"""Where the `nvidia` wheels of this Python lie, and the compilers that they may hold."""

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path


def wheel_folders() -> list[Path]:
    """Folders of the `nvidia` namespace package that may hold the compiler wheels, of this interpreter."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return [*folders, *(Path(place) / "nvidia" for place in sys.path if place.endswith("site-packages"))]


def nvcc_in(folders: Iterable[Path]) -> Path | None:
    """Of the first folder that holds one; there, of the newest CUDA."""
    for folder in folders:
        for nvcc in sorted(folder.glob("cu*/bin/nvcc"), reverse=True):
            return nvcc
    return None


def nvrtc_in(folders: Iterable[Path]) -> tuple[Path, Path] | None:
    """NVRTC's library and ptxas of CUDA 12, of the first folder that holds both."""
    for folder in folders:
        library, ptxas = folder / "cuda_nvrtc/lib/libnvrtc.so.12", folder / "cuda_nvcc/bin/ptxas"
        if library.is_file() and ptxas.is_file():
            return library, ptxas
    return None
