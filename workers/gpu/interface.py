"""The one interface to a GPU: what verifying and measuring need of one. Only a child process goes through it, never a
worker.

```
GpuError                 what was asked cannot be done
├── GpuMissing           no such device, no driver, no CuPy: nothing can be measured here
│   └── DriverTooOld     for the compiler's release of CUDA: it would load none of the kernels
├── LaunchRefused        the library's launch code refused the call; the process is unharmed
├── LoadFailed           this machine cannot load a library's kernels now: no verdict on them
└── GpuFault             the device reports an error of the last launches: the context is lost, the process must end
```
`workers.cuda.cupy_gpu` drives a real one. The tests' simulated GPU has the same functions; the settings name the
module.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

if TYPE_CHECKING:
    from codegen.kernel import Kernel
    from codegen.problem import Problem

DEFAULT_MODULE = "workers.cuda.cupy_gpu"  # of CUKILN_GPU_MODULE
FIRST_DRIVERS = {12: "525", 13: "580"}
"""The first driver of each release (CUDA Compatibility, "Minor Version Compatibility"): it loads what any compiler of
the same major release makes, and nothing of a newer one. A newer GPU's own first driver may be later."""
# An array of `Gpu.arrays`: in the device's memory.
DeviceArray = Any


class GpuError(Exception):
    """What was asked of the GPU cannot be done."""


class GpuMissing(GpuError):
    """There is no such GPU, or nothing to drive it with; the message says what to do."""


class DriverTooOld(GpuMissing):
    """The driver is for an older major release of CUDA than the kernels are compiled by."""


class LaunchRefused(GpuError):
    """The library's own launch code refused the call; nothing was launched. The message is the library's."""


class LoadFailed(GpuError):
    """This machine cannot load the library's kernels: no memory, a driver too old for them, no code for its GPU. Says
    nothing of the kernels."""


class GpuFault(GpuError):
    """The device reports an error (an illegal access, a failed launch): every later call of this process fails too."""


# What Python raises where code about a library that ours are compared with is wrong, its own or ours, or a part of it
# cannot be opened: no refusal, but none of the candidates' errors either.
PEER_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


@dataclass(frozen=True)
class Device:
    """A GPU. `name` is the product's, which is the device class; `driver` the version of the kernel module, `cuda` the
    release of CUDA that it is for, as 1000 × major + 10 × minor; 0 where that is not known."""

    name: str
    uuid: str
    capability: tuple[int, int]
    driver: str
    multiprocessors: int
    l2_bytes: int
    memory_bytes: int
    cuda: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "capability": list(self.capability)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Device:
        return Device(**{**data, "capability": (data["capability"][0], data["capability"][1])})


class KernelLibrary(Protocol):
    """A group's loaded library, ready on the device. A kernel is named by its id."""

    def workspace_bytes(self, kernel: str, integers: Sequence[int], launch: Sequence[int]) -> int:
        """Of one call; negative where the kernel has none for these extents."""

    def launch(
        self,
        kernel: str,
        pointers: Sequence[int],
        integers: Sequence[int],
        launch: Sequence[int],
        scalars: Sequence[float],
        workspace: int,
    ) -> None:
        """Queue one call on the GPU's stream; `workspace` is an address, 0 for none. Raises LaunchRefused, GpuFault."""


class Timer(Protocol):
    """Calls that were recorded once and are replayed as often as wanted."""

    def sample(self) -> float:
        """Run all calls once; microseconds from the first event to the last. Raises GpuFault."""


class VendorCall(Protocol):
    """One way in which the vendor's library computes a problem."""

    def describe(self) -> dict[str, Any]:
        """`library`, `version`, `algorithm` (a sentence), `fused` (is the whole epilogue?), `workspace_bytes`."""

    def run(self, number: int) -> None:
        """Queue the call on the GPU's stream, with the operands of set `number`. Raises LaunchRefused, GpuFault."""

    def result(self, number: int) -> DeviceArray:
        """The output of set `number` as float64, of its logical shape."""


class Gpu(Protocol):
    """One device with its context, current in this process until its end."""

    device: Device
    arrays: Any
    """The namespace of its arrays, as the array API standard has it: cupy, or numpy for a simulated GPU."""

    def address(self, array: DeviceArray) -> int:
        """Where the array's first byte lies."""

    def to_host(self, array: DeviceArray) -> npt.NDArray[Any]:
        """A copy in this process's memory, once everything queued before has ended. Raises GpuFault."""

    def load(self, library: Path, kernels: Sequence[Kernel]) -> KernelLibrary:
        """Load a group's library and its kernels onto the device. Raises LaunchRefused where the library is no good,
        LoadFailed where the machine is not, GpuFault."""

    def synchronize(self) -> None:
        """Wait for everything queued. Raises GpuFault."""

    def poison_shared(self) -> None:
        """Fill the shared memory of every multiprocessor with NaN, as far as a kernel can."""

    def timer(self, calls: Sequence[Callable[[], None]]) -> Timer:
        """Record launches. Each call must have run once before: no module may be loaded while recording."""

    def vendor(
        self,
        problem: Problem,
        inputs: Mapping[str, npt.NDArray[Any]],
        sets: int,
        beat: Callable[[str], None] = lambda what: None,
    ) -> list[VendorCall]:
        """What the vendor's library offers for the problem, most promising first, with `sets` copies of the operands;
        none where it has nothing. `inputs` are host arrays as `Operator.make_inputs` gives them; `beat` gets what takes
        long."""

    def warm_up(self, beat: Callable[[str], None]) -> None:
        """Do one of everything that verifying and timing do, but with no candidate: what a driver starts and compiles
        when it is first needed is there before the first candidate, which it would be blamed on. `beat` gets what
        takes long. May be missing: then there is nothing to warm up. Raises GpuFault."""

    def state(self) -> dict[str, Any]:
        """What a measurement depends on, now: clocks, temperature, power, throttle reasons, other processes."""

    def ceilings(self) -> dict[str, float]:
        """Rates that this very device reaches, measured: `copy_gb_s`, and `tflops_<dtype>` of large products."""


def open_gpu(module: str, device: str) -> Gpu:
    """The GPU with that UUID, or number, by the module of that name. Raises GpuMissing."""
    opened: Gpu = _driver(module).open_gpu(device)
    return opened


def list_devices(module: str) -> list[Device]:
    """The GPUs that the module finds. Raises GpuMissing where it cannot look."""
    devices: list[Device] = _driver(module).list_devices()
    return devices


def choose_device(devices: Sequence[Device], name: str) -> Device:
    """The one with that UUID, or that number in the order of the driver. Raises GpuMissing."""
    for number, device in enumerate(devices):
        if name.lower() in (device.uuid.lower(), str(number)):
            return device
    there = ", ".join(f"{number} = {device.name} {device.uuid}" for number, device in enumerate(devices)) or "none"
    raise GpuMissing(f"there is no GPU {name} on this machine: it has {there}")


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


def warm_up(gpu: Gpu, beat: Callable[[str], None]) -> None:
    """As far as the module's GPU has anything to warm up."""
    if callable(work := getattr(gpu, "warm_up", None)):
        work(beat)


def _driver(name: str) -> ModuleType:
    try:
        module = importlib.import_module(name)
    except (ImportError, SyntaxError, TypeError, ValueError) as error:  # the last two: for what is no module's name
        reason = f"cannot be imported: {error}"
    else:
        missing = [entry for entry in ("list_devices", "open_gpu") if not callable(getattr(module, entry, None))]
        if not missing:
            return module
        reason = f"has no function {missing[0]}"
    raise GpuMissing(f"CUKILN_GPU_MODULE names {name!r}, which {reason}; leave it out for {DEFAULT_MODULE}")
