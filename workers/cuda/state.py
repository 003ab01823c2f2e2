"""What a measurement depends on, as NVIDIA's management library reports it; what it does not report is left out."""

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any

# nvml.h, nvmlClocksEventReasons: why the clocks are below what they could be. Idle clocks are in the list of reasons.
THROTTLE_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
# nvml.h, nvmlPerfPolicyType_t: for how long in all the clocks were held back, by the name of the reason.
POLICIES = {"sw_power_cap": 0, "sw_thermal_slowdown": 1, "sync_boost": 2, "board_limit": 3, "reliability": 5}
MISSING = "nvidia-ml-py is not installed; pip install --constraint constraints.txt nvidia-ml-py"


def throttle_reasons(bits: int) -> list[str]:
    """The names of a bit field; a bit without a name by its value."""
    names = [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
    rest = bits & ~sum(THROTTLE_REASONS)
    return [*names, *([f"0x{rest:x}"] if rest else [])]


def processes(running: Iterable[tuple[int, int | None]], own: int) -> dict[str, Any]:
    """Of (process id, bytes of device memory). Our own process can only be excluded where ids mean the same to us and
    to the library: not in a container with its own ids; there all are counted."""
    listed = list(running)
    others = [process for process in listed if process[0] != own]
    kind = "other_processes" if len(others) < len(listed) else "compute_processes"
    counted = others if kind == "other_processes" else listed
    memories = [memory for _, memory in counted if memory is not None]
    return {kind: len(counted), f"{kind}_memory_bytes": sum(memories)} if memories else {kind: len(counted)}


def read_state(uuid: str) -> dict[str, Any]:
    """Of the GPU with that UUID, now: clocks in MHz, temperature in °C, power in W, `throttle` reasons, utilisation in
    percent, processes. `{"nvml": why}` where the library cannot be asked at all."""
    try:
        import pynvml
    except ImportError:
        return {"nvml": MISSING}
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        if not uuid.startswith("MIG-"):
            return ask(pynvml, handle)
        # Clocks, power and throttling are of the whole GPU; a part has none of its own.
        whole = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    except pynvml.NVMLError as error:
        return {"nvml": str(error)}
    return {"part_of": "a GPU in parts (MIG): processes are those of all parts", **ask(pynvml, whole)}


def driver_version() -> str | None:
    """Of the kernel module, such as 580.159.04; None where nothing reports it."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except ImportError:
        return None
    except pynvml.NVMLError:
        return None


def violation(nvml: Any, handle: Any, policy: int) -> dict[str, int]:
    """`us`: for so long the clocks were held back, since the driver was loaded; `at_us`: when that was read."""
    time = nvml.nvmlDeviceGetViolationStatus(handle, policy)
    return {"us": int(time.violationTime) // 1000, "at_us": int(time.referenceTime)}  # of nanoseconds, microseconds


def ask(nvml: Any, handle: Any) -> dict[str, Any]:
    """The answers of `nvml`, which has pynvml's functions; a question that it refuses has no answer."""
    answers: dict[str, Any] = {}

    def add(answer: Callable[[], dict[str, Any]]) -> None:
        try:
            answers.update(answer())
        except nvml.NVMLError:
            return  # not supported by this device or driver

    add(lambda: {"sm_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)})
    add(lambda: {"sm_max_mhz": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)})
    add(lambda: {"memory_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)})
    add(lambda: {"memory_max_mhz": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)})
    add(lambda: {"temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)})
    add(lambda: {"power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000})
    add(lambda: {"power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000})
    # The older name of two: drivers before 535 have no other.
    add(lambda: {"throttle": throttle_reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))})
    held_back = {}
    for name, policy in POLICIES.items():
        with contextlib.suppress(nvml.NVMLError):  # not supported, as above
            held_back[name] = violation(nvml, handle, policy)
    answers |= {"held_back": held_back} if held_back else {}
    add(lambda: {"utilisation_percent": nvml.nvmlDeviceGetUtilizationRates(handle).gpu})
    add(lambda: {"memory_utilisation_percent": nvml.nvmlDeviceGetUtilizationRates(handle).memory})
    add(lambda: {"ecc": bool(nvml.nvmlDeviceGetEccMode(handle)[0])})
    add(lambda: {"persistence": bool(nvml.nvmlDeviceGetPersistenceMode(handle))})
    add(
        lambda: processes(
            ((process.pid, process.usedGpuMemory) for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
            os.getpid(),
        )
    )
    return answers
