"""The data sheet of the GPU that a check runs on: of the target that a client with it names."""

from __future__ import annotations

from codegen.targets import Target, target
from cukiln.gpu import target_of
from workers.gpu.interface import Device


def sheet_of(device: Device) -> Target:
    """Raises UnknownTarget."""
    return target(target_of(device.capability))
