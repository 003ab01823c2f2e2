"""The nvcc of a machine on which nothing is installed, and CUDA's toolkits there. Needs Python alone."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

TOOLKIT = "/usr/local/cuda"


def toolkits() -> list[str]:
    """Where a toolkit may lie, the one that is named first."""
    return [folder for folder in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), TOOLKIT) if folder]


def find_nvcc() -> str:
    """The one that CUKILN_NVCC names, else that of the PyPI wheels, else the one in PATH, else a toolkit's. Raises
    FileNotFoundError."""
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


def in_wheels(pattern: str) -> list[Path]:
    """In the wheels of NVIDIA, the newest first."""
    spec = importlib.util.find_spec("nvidia")
    places = (spec.submodule_search_locations or []) if spec else []
    return [path for place in places for path in sorted(Path(place).glob(pattern), reverse=True)]
