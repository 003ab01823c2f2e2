"""A simulated GPU for tests: `CUKILN_GPU_MODULE=tests.support.gpu.fake_gpu`. Arrays are NumPy's, times are made up.

A library that embeds a cubin runs as the CPU emulation of its kernels, built from the kernels that `load` is given and
kept by their text. Any other library runs directly, on host memory: that is what hostile ones are. Nothing here
claims to be a measurement: the product is called "Simulated GPU" and everything it says of itself says so too.

What it does is read from the JSON file that NVIDIA_SIMULATED_GPU names (variables with that prefix reach the child):

    too_old       why no GPU can be listed with this driver
    outside       why no GPU can be listed in a PID namespace of a process's own; the namespace that it is outside of
    devices       list of fields of Device, each over the defaults below
    times         {"KERNEL" or "KERNEL@LAUNCH": µs}: the first digits of a kernel's id, launch values joined by commas
    noise, seed   standard deviation of a time as a share of it; what decides the noise
    sample_us     µs that a sample takes beside its launches
    vendor_us     µs of each algorithm that the vendor offers; [] for none
    throttled     why the GPU is, each time that it is asked, and at last it is not
    vendor        "ok", "wrong" (an output of zeros), "fault", "crash"; an error of its Python: "raises",
                  "first raises" (in a run of the first algorithm), "result raises"; of the first algorithm's runs,
                  refused: "first refuses", "first faults"
    open          "ok", "missing", "fault", "silent", "crash", "bug": what opening the device comes to
    opens_well    how many times it opens well first; counted in FILE.opens
    load          what the driver answers when kernels are loaded, such as "out of memory (CUDA error 2)"; loads_well
                  libraries of a process load well first
    faulty        kernels (first digits) whose launch loses the context
    nudged        {KERNEL: number of an operand}: the last bit of its first float is another, where that was rounded
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from codegen.dtypes import dtype
from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.problem import Problem
from codegen.text.render_cpu import render_cpu
from workers.cpu.build import CPU_FLAGS
from workers.cpu.library import STATUSES, Call
from workers.cuda.library_entries import LibraryEntries, load_failure
from workers.gpu.interface import Device, DriverTooOld, GpuFault, GpuMissing, LaunchRefused

VARIABLE = "NVIDIA_SIMULATED_GPU"
NAME = "Simulated GPU"
UUID = "GPU-51011a7e-d000-0000-0000-000000000000"
AT_US = 1795829140534834  # as an H100's driver said it
DEFAULT_DEVICE: dict[str, Any] = {
    "name": NAME, "uuid": UUID, "capability": [9, 0], "driver": "simulated-1", "multiprocessors": 4,
    "l2_bytes": 64 << 10, "memory_bytes": 4 << 30,
}  # fmt: skip
# The emulation's own allocations are not what a task allocates: its buffers are announced.
_ANNOUNCE = """
CUKILN_CPU_EXPORT void fake_forget() { cukiln::cpu::buffer_count = 0; }
CUKILN_CPU_EXPORT void fake_announce(const char* name, void* begin, uint64_t bytes) {
  using namespace cukiln::cpu;
  Buffer& buffer = buffers[buffer_count++];
  snprintf(buffer.name, sizeof(buffer.name), "%s", name);
  buffer.mapped = static_cast<char*>(begin) - page_bytes();
  buffer.mapped_bytes = bytes + 2 * page_bytes();
  buffer.guard = page_bytes();
  buffer.begin = static_cast<char*>(begin);
  buffer.bytes = bytes;
  buffer.writable = true;
  forget_writes(buffer);
}
"""
_RUN_SECONDS = 60.0
_SM_FLOPS_PER_US = 1e5


def configure(path: Path, **fields: Any) -> str:
    """Write a configuration; the value for NVIDIA_SIMULATED_GPU."""
    path.write_text(json.dumps(fields), encoding="utf-8")
    return str(path)


def list_devices() -> list[Device]:
    if words := _configuration().get("too_old"):
        raise DriverTooOld(words)
    if Path("/proc/self").readlink().name != str(os.getpid()):
        raise GpuMissing("CUDA does not start in a PID namespace whose numbers /proc does not have")  # seen on an H100
    words, namespace = _configuration().get("outside", ("", ""))
    if words and str(Path("/proc/self/ns/pid").readlink()) != namespace:
        raise GpuMissing(words)
    return [Device.from_dict({**DEFAULT_DEVICE, **each}) for each in _configuration().get("devices", [{}])]


def open_gpu(device: str) -> FakeGpu:
    configuration = _configuration()
    for number, one in enumerate(list_devices()):
        if device in (one.uuid, str(number)):
            _open(configuration)
            return FakeGpu(one, configuration)
    raise GpuMissing(f"there is no simulated GPU {device}")


class FakePrimitives:
    """Runs the primitives' kernels as the CPU emulation has them. `load` gets the cubin, which nothing here runs."""

    def __init__(self, device: Device) -> None:
        self.arch, self.cuda = f"sm_{device.capability[0]}{device.capability[1]}", device.cuda
        self.description = {"device": device.name, "driver": device.driver, "arch": self.arch}

    def load(self, cubin: Path) -> None:
        from tests.gpu import confirm_primitives
        from tests.gpu.run_primitives import CpuEmulations

        folder = cubin.parent / "simulated"
        folder.mkdir()
        self._emulations = CpuEmulations(confirm_primitives.CHECKS, folder)

    def run(self, check: Any, words: Any) -> Any:
        return self._emulations.run(check, words)


def primitives_gpu(device: str) -> FakePrimitives:
    return FakePrimitives(next(each for each in list_devices() if each.uuid == device))


def simulated_us(kernel: Kernel, integers: Sequence[int], launch: Sequence[int], times: Mapping[str, float]) -> float:
    """What the table says, else something that depends on the work, the kernel and the launch."""
    values = ",".join(map(str, launch))
    for key, microseconds in times.items():
        digits, _, wanted = key.partition("@")
        if kernel.id.startswith(digits) and wanted in ("", values):
            return microseconds
    own = operator(kernel.operator)
    names = (*own.extent_names, *own.attribute_names)
    work = math.prod(value for name, value in zip(names, integers, strict=True) if name in ("batch", "m", "n", "k"))
    spread = int(hashlib.sha256(f"{kernel.id}@{values}".encode()).hexdigest()[:8], 16) / 2**32
    return (2.0 + 2.0 * work / _SM_FLOPS_PER_US) * (1.0 + spread)


def _configuration() -> dict[str, Any]:
    path = os.environ.get(VARIABLE)
    return json.loads(Path(path).read_text(encoding="utf-8")) if path else {}


def _open(configuration: Mapping[str, Any]) -> None:
    counter = Path(os.environ.get(VARIABLE, "")).with_suffix(".opens") if VARIABLE in os.environ else None
    opens = 0
    if counter is not None:
        opens = int(counter.read_text()) if counter.exists() else 0
        counter.write_text(str(opens + 1))
    if opens < configuration.get("opens_well", 0):
        return
    match configuration.get("open", "ok"):
        case "missing":
            raise GpuMissing("the simulated GPU has fallen off the bus")
        case "fault":
            raise GpuFault("the simulated GPU reports an uncorrectable error")
        case "silent":
            time.sleep(3600)
        case "crash":
            os.abort()
        case "bug":
            raise KeyError("an unforeseen error")


class FakeGpu:
    arrays = np

    def __init__(self, device: Device, configuration: Mapping[str, Any]) -> None:
        self.device = device
        self.configuration = configuration
        self.recording: list[Recorded] | None = None
        self.lost = False
        self._states = self._loads = 0
        self._bytes: dict[int, int] = {}
        self._noise = np.random.default_rng(configuration.get("seed", 1))

    def address(self, array: NDArray[Any]) -> int:
        self._bytes[array.ctypes.data] = array.nbytes
        return array.ctypes.data

    def bytes_at(self, address: int) -> int:
        if address not in self._bytes:
            raise GpuFault(f"an illegal memory access: {address:#x} is no buffer's beginning")
        return self._bytes[address]

    def to_host(self, array: NDArray[Any]) -> NDArray[Any]:
        self.synchronize()
        return array.copy()

    def load(self, library: Path, kernels: Sequence[Kernel]) -> FakeLibrary:
        self._loads += 1
        if (answer := self.configuration.get("load")) and self._loads > self.configuration.get("loads_well", 0):
            raise load_failure(f"RuntimeError: the kernels, made for sm_90a, cannot be loaded on cuda:0: {answer}")
        embedded = library.read_bytes().count(b"\x7fELF") > 1
        return EmulationLibrary(self, kernels) if embedded else DirectLibrary(self, library, kernels)

    def synchronize(self) -> None:
        if self.lost:
            raise GpuFault("an illegal memory access was encountered (simulated)")

    def poison_shared(self) -> None:
        """The emulation does it by itself before every block."""

    def timer(self, calls: Sequence[Callable[[], None]]) -> FakeTimer:
        recorded: list[Recorded] = []
        self.recording = recorded
        try:
            for call in calls:
                call()
        finally:
            self.recording = None
        return FakeTimer(self, recorded)

    def noisy(self, microseconds: float) -> float:
        deviation = self.configuration.get("noise", 0.002)
        return microseconds * float(np.exp(self._noise.normal(0.0, deviation))) if deviation else microseconds

    def vendor(
        self, problem: Problem, inputs: Mapping[str, NDArray[Any]], sets: int, beat: Callable[[str], None] = len
    ) -> list[FakeVendor]:
        match self.configuration.get("vendor", "ok"):
            case "crash":
                os.abort()
            case "fault":
                self.lost = True
                self.synchronize()
            case "raises":
                raise IndexError("tuple index out of range")
        beat("what NumPy offers")
        times = self.configuration.get("vendor_us", [12.0, 9.0])
        return [FakeVendor(self, problem, inputs, number, us) for number, us in enumerate(times)]

    def state(self) -> dict[str, Any]:
        self._states += 1
        throttled = self.configuration.get("throttled", [])
        throttle = throttled[self._states - 1] if self._states <= len(throttled) else []
        return {
            "simulated": True,
            "sm_mhz": 1000,
            "memory_mhz": 2000,
            "temperature_c": 40,
            "power_w": 300.0,
            "throttle": throttle,
            "held_back": {"sw_power_cap": {"us": 3379242, "at_us": AT_US}},
        }

    def ceilings(self) -> dict[str, float]:
        return {"simulated": 1.0, "copy_gb_s": 100.0, "tflops_float32": 1.0, "tflops_float16": 2.0}


class Recorded(NamedTuple):
    """A call of simulated `us`; `buffers`: what it works on."""

    us: float
    buffers: tuple[int, ...]
    run: Callable[[], None]


class FakeTimer:
    """Simulated time of the recorded calls. Those of libraries that run directly really run, on the same buffers once
    in a sample: the host takes far longer than what is simulated."""

    def __init__(self, gpu: FakeGpu, recorded: Sequence[Recorded]) -> None:
        self._gpu = gpu
        self._runs = list({call.buffers: call.run for call in recorded}.values())
        self._us = sum(call.us for call in recorded)

    def sample(self) -> float:
        for run in self._runs:
            run()
        self._gpu.synchronize()
        return self._gpu.noisy(self._us + self._gpu.configuration.get("sample_us", 0.0))


class FakeVendor:
    """NumPy, in float64, rounded to the output's type."""

    def __init__(
        self, gpu: FakeGpu, problem: Problem, inputs: Mapping[str, NDArray[Any]], number: int, microseconds: float
    ) -> None:
        self._gpu, self._problem, self._inputs = gpu, problem, inputs
        self._number, self._us = number, microseconds

    def describe(self) -> dict[str, Any]:
        return {
            "library": "NumPy", "version": np.__version__, "algorithm": f"simulated algorithm {self._number}",
            "fused": True, "workspace_bytes": 0,
        }  # fmt: skip

    def run(self, number: int) -> None:
        match self._gpu.configuration.get("vendor"), self._number:
            case "first raises", 0:
                raise KeyError("q")
            case ("first refuses" | "first faults") as how, 0:
                self._gpu.lost = how == "first faults"
                raise LaunchRefused("CUBLAS_STATUS_NOT_SUPPORTED")
        if self._gpu.recording is not None:
            self._gpu.recording.append(Recorded(self._us, (number,), lambda: None))

    @cached_property
    def _result(self) -> NDArray[np.float64]:
        own = operator(self._problem.operator)
        value, _ = own.reference(self._problem, self._inputs)
        (out,) = (operand for operand in own.operands(self._problem) if operand.role == "out")
        rounded = value.astype(dtype(out.dtype).numpy).astype(np.float64)
        return np.zeros_like(rounded) if self._gpu.configuration.get("vendor") == "wrong" else rounded

    def result(self, number: int) -> NDArray[np.float64]:
        if self._gpu.configuration.get("vendor") == "result raises":
            raise TypeError("no array")
        return self._result


class FakeLibrary:
    """What both kinds share: a launch is recorded, or it runs."""

    def __init__(self, gpu: FakeGpu, kernels: Sequence[Kernel]) -> None:
        self._gpu = gpu
        self._kernels = {kernel.id: kernel for kernel in kernels}

    def launch(
        self,
        kernel: str,
        pointers: Sequence[int],
        integers: Sequence[int],
        launch: Sequence[int],
        scalars: Sequence[float],
        workspace: int,
    ) -> None:
        self._gpu.synchronize()

        def run() -> None:
            self.run(self._kernels[kernel], pointers, integers, launch, scalars, workspace)

        if self._gpu.recording is None:
            run()
            return
        times = self._gpu.configuration.get("times", {})
        microseconds = simulated_us(self._kernels[kernel], integers, launch, times)
        self._gpu.recording.append(Recorded(microseconds, tuple(pointers), self.replay(run)))

    def replay(self, run: Callable[[], None]) -> Callable[[], None]:
        return run

    def run(self, kernel: Kernel, *call: Any) -> None:
        """`call`: pointers, integers, launch values, scalars and workspace, as `launch` has them."""
        raise NotImplementedError


class DirectLibrary(FakeLibrary):
    """A library whose entries compute on the host by themselves."""

    def __init__(self, gpu: FakeGpu, path: Path, kernels: Sequence[Kernel]) -> None:
        super().__init__(gpu, kernels)
        self._entries = LibraryEntries(path, kernels, stream=0, synchronize=gpu.synchronize)
        self._entries.prepare(0)

    def workspace_bytes(self, kernel: str, integers: Sequence[int], launch: Sequence[int]) -> int:
        return self._entries.workspace_bytes(kernel, integers, launch)

    def run(self, kernel: Kernel, *call: Any) -> None:
        self._entries.launch(kernel.id, *call)


class EmulationLibrary(FakeLibrary):
    """The kernels of a real library, on the CPU. They run when they are started, not when they are replayed: what they
    compute does not depend on how often."""

    def __init__(self, gpu: FakeGpu, kernels: Sequence[Kernel]) -> None:
        super().__init__(gpu, kernels)
        self._emulations = _build(list(self._kernels.values()))
        self._runs = 0

    def workspace_bytes(self, kernel: str, integers: Sequence[int], launch: Sequence[int]) -> int:
        ask = self._emulations[kernel][f"{self._kernels[kernel].namespace}_workspace_bytes"]
        ask.restype = ctypes.c_int64
        return int(ask(_array(ctypes.c_int64, integers), _array(ctypes.c_int32, launch)))

    def replay(self, run: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def run(
        self,
        kernel: Kernel,
        pointers: Sequence[int],
        integers: Sequence[int],
        launch: Sequence[int],
        scalars: Sequence[float],
        workspace: int,
    ) -> None:
        if any(kernel.id.startswith(digits) for digits in self._gpu.configuration.get("faulty", [])):
            self._gpu.lost = True
            return
        emulation = self._emulations[kernel.id]
        emulation.fake_forget()
        for number, pointer in enumerate([*pointers, *([workspace] if workspace else [])]):
            size = self._gpu.bytes_at(pointer)
            emulation.fake_announce(f"operand {number}".encode(), ctypes.c_void_p(pointer), ctypes.c_uint64(size))
        self._runs += 1
        call = Call(
            pointers=_array(ctypes.c_void_p, pointers),
            integers=_array(ctypes.c_int64, integers),
            launch=_array(ctypes.c_int32, launch),
            scalars=_array(ctypes.c_double, scalars),
            workspace=workspace or None,
            order=2,  # seeded
            exact=0,
            seed=self._runs,
            cpu_seconds=_RUN_SECONDS,
            watch=0,
        )
        status = emulation[f"{kernel.namespace}_run"](ctypes.byref(call))
        if status < 0:
            raise MemoryError("no memory for the simulated threads")
        if STATUSES[status] == "run_timeout":
            time.sleep(3600)  # as a kernel that never ends: another process has to end it
        if STATUSES[status] != "ok":
            self._gpu.lost = True
            raise GpuFault(f"{emulation.cukiln_message().decode('utf-8', 'replace')} (simulated)")
        for digits, operand in self._gpu.configuration.get("nudged", {}).items():
            first = ctypes.c_uint32.from_address(pointers[operand])
            if kernel.id.startswith(digits) and first.value & 7:  # whole numbers over a power of 2 end in zeros
                first.value ^= 1


def _array(kind: Any, values: Sequence[Any]) -> Any:
    return (kind * max(1, len(values)))(*values)


def _build(kernels: Sequence[Kernel]) -> dict[str, ctypes.CDLL]:
    """The CPU emulation of each kernel; those that no earlier process has built, by one g++."""
    folder = _cache_folder()
    made_by = " ".join(CPU_FLAGS) + _ANNOUNCE
    places = {kernel.id: folder / _digest(made_by + render_cpu([kernel])) for kernel in kernels}
    missing = [kernel for kernel in kernels if not places[kernel.id].exists()]
    if missing:
        text = render_cpu(missing) + _ANNOUNCE
        library = folder / f"{_digest(made_by + text)}.so"
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            source, made = Path(temporary, "emulation.cpp"), Path(temporary, "emulation.so")
            source.write_text(text, encoding="utf-8")
            command = ["g++", *CPU_FLAGS, "-o", str(made), str(source), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise LaunchRefused(f"the emulation does not compile: {done.stderr[:2000]}")
            made.rename(library)
            for kernel in missing:
                note = Path(temporary, kernel.id)
                note.write_text(library.name, encoding="utf-8")
                note.rename(places[kernel.id])
    return {kernel.id: _load(folder / places[kernel.id].read_text(encoding="utf-8")) for kernel in kernels}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.cukiln_message.restype = ctypes.c_char_p
    return library


def _cache_folder() -> Path:
    """One for all processes of this user: the same few kernels are wanted by many tests, and g++ takes seconds."""
    folder = Path(f"/tmp/cukiln-simulated-{os.getuid()}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
