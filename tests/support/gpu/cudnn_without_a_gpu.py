"""cuDNN plans for a described device: no GPU, and a driver that has what it needs to be loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.run.places import ROOT

# An H100, in the messages of cuDNN 9 (CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION).
DEVICE = {
    "deviceName": "NVIDIA H100 80GB HBM3", "deviceVer": 900, "driverVer": 13020, "cudaDeviceId": 0, "pciDeviceId": 0,
    "multiProcessorCount": 132, "smCountOrigin": 0, "warpSize": 32, "maxGridSize": [2147483647, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64], "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "maxCtasPerSM": 32,
    "regsPerBlock": 65536, "maxRegistersPerSM": 65536, "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448, "reservedSharedMemoryPerBlock": 1024, "oversizedSharedMemoryPerBlock": 0,
    "totalGlobalMem": 85899345920, "l2CacheSize": 52428800, "smClockRateKHz": 1980000, "memClockRateKHz": 2619000,
    "memoryBusWidth": 5120, "isTccDriver": 0, "supportCoopLaunch": 1,
}  # fmt: skip
# What the library's parts ask of a driver when they are loaded, and when they load what they compiled. No other
# function is there to be called.
DRIVER = """
#define ABSENT(name) int name(void) { return 100; }
ABSENT(cuGetErrorString) ABSENT(cuModuleGetFunction) ABSENT(cuModuleLoadData) ABSENT(cuModuleUnload)
ABSENT(cuTensorMapEncodeIm2col) ABSENT(cuTensorMapEncodeTiled)
ABSENT(cuDeviceGetCount) ABSENT(cuDeviceGet) ABSENT(cuLibraryLoadFromFile) ABSENT(cuKernelGetAttribute)
ABSENT(cuOccupancyMaxPotentialClusterSize) ABSENT(cuLaunchKernel) ABSENT(cuLaunchCooperativeKernel)
ABSENT(cuLaunchKernelEx)
ABSENT(cuGetErrorName) ABSENT(cuCtxGetLimit) ABSENT(cuCtxPopCurrent) ABSENT(cuCtxPushCurrent) ABSENT(cuStreamGetCtx)
ABSENT(cuLinkCreate) ABSENT(cuLinkAddData) ABSENT(cuLinkComplete) ABSENT(cuLinkDestroy)
#define GIVEN(name) int name(void **out) { *out = (void *)1; return 0; }
GIVEN(cuLibraryLoadData) GIVEN(cuLibraryGetKernel) GIVEN(cuKernelGetFunction) GIVEN(cuCtxGetCurrent)
int cuLibraryUnload(void) { return 0; }
int cuKernelSetAttribute(void) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13020; return 0; }
"""


def planned_without_a_gpu(
    folder: Path, script: str, problems: Sequence[Mapping[str, Any]], **environment: str
) -> list[Any]:
    """What cuDNN plans for an H100 that is not there, in a process of its own. `script` reads the device and the
    problems as JSON, and writes its answers."""
    (folder / "driver.c").write_text(DRIVER)
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "driver.c"]
    subprocess.run(command, cwd=folder, check=True)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        input=json.dumps({"device": DEVICE, "problems": problems}),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout.splitlines()[-1]))
