"""Which driver the kernels need, by the CUDA of their compiler."""

from collections.abc import Sequence

from workers.gpu.interface import Device, DriverTooOld

FIRST_DRIVERS = {12: "525", 13: "580"}
"""The first driver of each release (CUDA Compatibility, "Minor Version Compatibility"): it loads what any compiler of
the same major release makes, and nothing of a newer one. A newer GPU's own first driver may be later."""


def require_driver(devices: Sequence[Device], cuda: int) -> None:
    """Raises DriverTooOld where kernels by a compiler of that CUDA would load on none of these GPUs."""
    for device in devices:
        if 0 < device.cuda < 1000 * cuda:
            other = "compile them by CUDA 12 (CUKILN_CUDA=12)" if device.cuda >= 12000 else "use another machine"
            raise DriverTooOld(
                f"the driver of {device.name} ({device.driver}) is for CUDA {device.cuda // 1000}."
                f"{device.cuda % 1000 // 10}, and kernels are compiled by CUDA {cuda}, which it cannot load: install a "
                f"driver of release {FIRST_DRIVERS.get(cuda, f'for CUDA {cuda}')} or later, or {other}; nothing is "
                "measured until then"
            )
