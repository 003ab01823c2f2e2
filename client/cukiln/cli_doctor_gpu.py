"""The part of `cukiln doctor` about GPUs: what measuring on one needs, and who has it now."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cukiln.cli_findings import Finding
from cukiln.cli_server import server_module
from cukiln.errors import ServerMissing

DRIVER = "libcuda.so.1"
# The release of the first driver for a CUDA major version (CUDA Compatibility, "Minor Version Compatibility").
FIRST_DRIVERS = {12: "525", 13: "580"}
_INSTALL = "install it: pip install --constraint constraints.txt --group gpu"


def gpu_findings(settings: Any, library: str = DRIVER) -> Iterator[Finding]:
    """The GPUs; where there is one, also what drives and watches it and who has it."""
    found = gpu(library)
    yield found
    if found.state != "found":
        return
    if settings.gpus == "none":
        yield Finding("measuring", "optional", "CUKILN_GPUS is none: no GPU is used", "unset it to measure on them")
        return
    yield driver(_nvcc_major(settings), library)
    yield package("cupy", r"cupy(-cuda\d+x)?", "without it nothing is measured on the GPU")
    watched = "without it clocks, temperature and throttling are not recorded"
    yield package("nvidia-ml-py", "nvidia-ml-py", watched)
    yield leases(settings.gpu_lock_dir)


def gpu(library: str = DRIVER) -> Finding:
    """The CUDA driver's own word: nvidia-smi is not in every container that has a GPU."""
    without = "kernels are then verified on the CPU and ranked by prediction"
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return Finding("gpu", "optional", f"no CUDA driver ({library}); {without}")
    count = ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code != 0 or count.value == 0:
        return Finding("gpu", "optional", f"a CUDA driver, but no usable GPU (code {code}); {without}")
    name = ctypes.create_string_buffer(128)
    names = []
    for number in range(count.value):
        driver.cuDeviceGetName(name, len(name), number)
        names.append(name.value.decode(errors="replace"))
    return Finding("gpu", "found", ", ".join(names))


def driver(needed: int | None, library: str = DRIVER) -> Finding:
    """Its CUDA release has to be of nvcc's major version, `needed`, or later: older ones do not load its cubins."""
    version = ctypes.c_int(0)
    ask = getattr(ctypes.CDLL(library), "cuDriverGetVersion", None)
    if ask is None or ask(ctypes.byref(version)) != 0 or not version.value:
        return Finding("driver", "found", "it does not say its version")
    major, minor = version.value // 1000, version.value % 1000 // 10  # cuda.h: 1000 × major + 10 × minor
    words = " ".join(filter(None, [_kernel_module(), f"for CUDA {major}.{minor}"]))
    if needed is None or major >= needed:
        return Finding("driver", "found", words)
    release = f"release {FIRST_DRIVERS[needed]}" if needed in FIRST_DRIVERS else "a release"
    todo = f"install a driver for CUDA {needed} ({release} or later), or name an nvcc of CUDA {major} with CUKILN_NVCC"
    return Finding(
        "driver", "optional", f"{words}; it cannot load what nvcc {needed} makes, so nothing is measured", todo
    )


def package(name: str, pattern: str, without: str) -> Finding:
    """A Python package, found by its distribution: importing CuPy takes a second."""
    for distribution in importlib.metadata.distributions():
        found = distribution.metadata["Name"] or ""
        if re.fullmatch(pattern, found, re.IGNORECASE):
            return Finding(name, "found", f"{found} {distribution.version}")
    return Finding(name, "optional", f"not installed; {without}", _INSTALL)


def leases(folder: Path) -> Finding:
    """Who has a GPU now, of all services that share the folder."""
    try:
        lease = server_module("workers.gpu.lease")
        files = sorted(folder.glob("*.lock"))
        held = [f"{file.stem} has {_holder(file)}" for file in files if lease.is_leased(file)]
    except (OSError, ServerMissing) as error:
        todo = "make it readable, or set CUKILN_GPU_LOCKS to another folder, the same for all services of this machine"
        return Finding("gpu leases", "optional", f"{folder} cannot be read: {error}", todo)
    return Finding("gpu leases", "found", "; ".join(held) or f"{folder}: no GPU is in use")


def _holder(file: Path) -> str:
    """What the lease says of its holder: its process, then what it does."""
    process, _, purpose = file.read_text(errors="replace")[:500].strip().partition("\n")
    return (
        f"process {process}" + (f": {purpose}" if purpose else "")
        if process
        else "a process that does not say who it is"
    )


def _kernel_module() -> str | None:
    try:
        version: str | None = server_module("workers.gpu.state").driver_version()
    except ServerMissing:
        return None
    return version


def _nvcc_major(settings: Any) -> int | None:
    """Of the nvcc that would be used; None where there is none, which has a finding of its own."""
    try:
        toolchain = server_module("workers.toolchain")
        found = toolchain.find_toolchain(nvcc=settings.nvcc, host_compiler=settings.host_compiler)
    except ServerMissing:
        return None
    except toolchain.ToolchainMissing:
        return None
    return int(dict(found.versions)["nvcc"].partition(".")[0])
