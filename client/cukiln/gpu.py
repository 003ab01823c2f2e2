"""This machine's GPUs, by the CUDA driver: nvidia-smi is not in every container that has a GPU."""

import ctypes
import functools
from dataclasses import dataclass

DRIVER = "libcuda.so.1"
# GPUs that run the kernels of an earlier one of the same major number; those with a letter are of one alone (CUDA C++
# Programming Guide, "Binary Compatibility").
_RUNS = {(10, 3): "sm_100", (12, 1): "sm_120"}
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # cuda.h: CUdevice_attribute


@dataclass(frozen=True)
class Gpus:
    """`missing`: why there is none. `cuda`: the driver's CUDA release, such as (13, 0)."""

    names: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None  # of the first
    cuda: tuple[int, int] | None = None
    missing: str | None = None


@functools.cache
def find_gpus(library: str = DRIVER) -> Gpus:
    """Those that CUDA_VISIBLE_DEVICES leaves. Initialises the driver, no device."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return Gpus(missing=f"no CUDA driver ({library})")
    version = ctypes.c_int(0)
    ask = getattr(driver, "cuDriverGetVersion", None)
    has_version = ask is not None and ask(ctypes.byref(version)) == 0 and version.value > 0
    cuda = (version.value // 1000, version.value % 1000 // 10) if has_version else None  # 1000 × major + 10 × minor
    count = ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code != 0 or count.value == 0:
        return Gpus(cuda=cuda, missing=f"a CUDA driver, but no usable GPU (code {code})")
    name = ctypes.create_string_buffer(128)
    names = []
    for number in range(count.value):
        driver.cuDeviceGetName(name, len(name), number)
        names.append(name.value.decode(errors="replace"))
    return Gpus(tuple(names), _capability(driver), cuda)


def _capability(driver: ctypes.CDLL) -> tuple[int, int] | None:
    ask = getattr(driver, "cuDeviceGetAttribute", None)
    if ask is None:
        return None
    numbers = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        number = ctypes.c_int(0)
        if ask(ctypes.byref(number), attribute, 0) != 0:
            return None
        numbers.append(number.value)
    return numbers[0], numbers[1]


@functools.cache
def local_target() -> str | None:
    """The architecture of this machine's first GPU, such as `sm_90a`; None without one."""
    capability = find_gpus().capability
    return None if capability is None else target_of(capability)


def target_of(capability: tuple[int, int]) -> str:
    """The target of a GPU of this compute capability. Of a capability that no service has, its own name all the same:
    the service then lists what it has."""
    major, minor = capability
    return _RUNS.get(capability) or f"sm_{major}{minor}{'a' if major >= 9 else ''}"
