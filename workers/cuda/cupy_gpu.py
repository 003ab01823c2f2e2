"""A real NVIDIA GPU, driven through CuPy: `workers.gpu.interface.Gpu` for the child process that owns it.

CuPy is imported when a GPU is asked for, never with this module. Everything is queued on one stream of its own, which
is CuPy's current one too; memory is CuPy's pool over cudaMalloc.

The stream is entered once and never left. CuPy keeps a stack of the streams that were entered, and leaving one
(as CuPy itself does in `ndarray.get`) makes the top of the stack current: a stream that was only made current by `use`
would be forgotten there, and CuPy's own kernels would run on the null stream, in no order with ours.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from codegen.dtypes import dtype
from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.plan.verification_plan import check_output, differing
from codegen.problem import Problem
from workers.cuda import state as gpu_state
from workers.cuda.cupy_timer import GraphTimer
from workers.cuda.library_entries import LibraryEntries
from workers.gpu.interface import (
    FIRST_DRIVERS,
    Device,
    DeviceArray,
    DriverTooOld,
    GpuError,
    GpuFault,
    GpuMissing,
    KernelLibrary,
    VendorCall,
    choose_device,
)
from workers.gpu.tensors import Operands, on_device
from workers.vendor import attention as vendor_attention
from workers.vendor import convolution as vendor_convolution
from workers.vendor import reduction as vendor_reduction
from workers.vendor import vector_matmul
from workers.vendor.bench import Beat

# The vendor's library for each operator; what is not here has none.
VENDORS: Mapping[str, Callable[[Any, Problem, Mapping[str, npt.NDArray[Any]], int, Beat], Sequence[VendorCall]]] = {
    "matmul": vector_matmul.offers,
    "conv2d": vendor_convolution.offers,
    "conv2d_dgrad": vendor_convolution.offers,
    "conv2d_wgrad": vendor_convolution.offers,
    "reduce": vendor_reduction.offers,
    "attention": vendor_attention.offers,
}
INSTALL = "pip install --constraint constraints.txt --group gpu (for CUDA 12: gpu-cuda12)"
# The messages for what a machine without a usable GPU answers (CUDA runtime API, cudaError_t).
OLD_DRIVER = 35
NO_GPU = {
    35: "the NVIDIA driver is missing; install one (580 or later for CUDA 13, 525 or later for 12)",
    100: "this machine has no NVIDIA GPU, or CUDA_VISIBLE_DEVICES hides it",
    46: "the GPU is in exclusive use by another process",
}
KERNELS = """
// Each block takes all shared memory that a block may have, so a multiprocessor holds one. volatile: it is never read.
extern "C" __global__ void cukiln_poison_shared(unsigned words) {
  extern __shared__ unsigned poisoned[];
  volatile unsigned* const target = poisoned;
  for (unsigned i = threadIdx.x; i < words; i += blockDim.x) target[i] = 0xffffffffu;
}
extern "C" __global__ void cukiln_copy(const uint4* from, uint4* to, size_t count) {
  const size_t stride = (size_t)gridDim.x * blockDim.x;
  for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) to[i] = from[i];
}
// Ends after `ns` nanoseconds, at the latest after `rounds` rounds: %globaltimer need not be fine.
extern "C" __global__ void cukiln_wait(unsigned long long ns, unsigned long long rounds) {
  unsigned long long began, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - began < ns && --rounds != 0);
}
"""
# A warm-up makes CuPy load what verifying each element type needs.
WARM_UP_PROBLEMS: tuple[dict[str, Any], ...] = (
    {"dtype": "float32"},
    {"dtype": "float32", "allow_tf32": True},
    {"dtype": "float16", "epilogue": [{"op": "bias", "axis": "n"}, {"op": "gelu"}]},
    {"dtype": "bfloat16", "epilogue": [{"op": "silu"}, {"op": "mask"}]},
    {"dtype": "int8", "out_dtype": "float16", "epilogue": [{"op": "residual"}, {"op": "relu"}]},
)
POISON_BLOCKS = 4  # for each multiprocessor
POISON_THREADS = 1024
COPY_BYTES = 2**30
COPY_BLOCKS, COPY_THREADS = 16, 512  # blocks for each multiprocessor
CEILING_SAMPLES = 7
# Side of the square products that are timed for the ceilings.
CEILINGS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "float16": (8192, {"dtype": "float16"}),
    "bfloat16": (8192, {"dtype": "bfloat16"}),
    "tf32": (8192, {"dtype": "float32", "allow_tf32": True}),
    "float32": (4096, {"dtype": "float32"}),
    "int8": (8192, {"dtype": "int8"}),
}


def list_devices() -> list[Device]:
    """The GPUs that this process may use. Raises GpuMissing."""
    cupy = _import_cupy()
    with _missing(cupy):
        count = int(cupy.cuda.runtime.getDeviceCount())
    return [_describe(cupy, ordinal) for ordinal in range(count)]


def open_gpu(device: str) -> "CupyGpu":
    """The GPU with that UUID or number, as `list_devices` and CUDA_VISIBLE_DEVICES have them. Raises GpuMissing."""
    devices = list_devices()
    return CupyGpu(_import_cupy(), devices.index(choose_device(devices, device)), devices)


class CupyGpu:
    """`stream`: the handle that everything is queued on; `shared_bytes`: the most that a block may have."""

    def __init__(self, cupy: Any, ordinal: int, devices: Sequence[Device]) -> None:
        self.arrays: Any = cupy
        self.device = devices[ordinal]
        self._ordinal = ordinal
        with _missing(cupy):
            cupy.cuda.Device(ordinal).use()
            # Each sum of a new type would be compiled with CUB's templates, seconds of the first verification of each.
            cupy._core.set_reduction_accelerators([])
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._stream.__enter__()
            self.stream = int(self._stream.ptr)
            self.shared_bytes = int(
                cupy.cuda.runtime.deviceGetAttribute(cupy.cuda.runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal)
            )
        self._poison: Callable[..., None] | None = None
        self._wait: Callable[..., None] | None = None

    def address(self, array: DeviceArray) -> int:
        return int(array.data.ptr)

    def to_host(self, array: DeviceArray) -> npt.NDArray[Any]:
        with self.faults():
            host: npt.NDArray[Any] = self.arrays.asnumpy(array, stream=self._stream)
            self._stream.synchronize()
        return host

    def load(self, library: Path, kernels: Sequence[Kernel]) -> KernelLibrary:
        loaded = LibraryEntries(library, kernels, stream=self.stream, synchronize=self.synchronize)
        loaded.prepare(self._ordinal)
        return loaded

    def synchronize(self) -> None:
        with self.faults():
            # The device, not the stream alone: a fault anywhere is to be seen here.
            self.arrays.cuda.runtime.deviceSynchronize()

    def poison_shared(self) -> None:
        if self._poison is None:
            self._poison = self.kernel(KERNELS, "cukiln_poison_shared", shared_bytes=self.shared_bytes)
        blocks = POISON_BLOCKS * self.device.multiprocessors
        self._poison((blocks,), (POISON_THREADS,), (np.uint32(self.shared_bytes // 4),))

    def timer(self, calls: Sequence[Callable[[], None]]) -> GraphTimer:
        return GraphTimer(self.arrays, self._stream, calls, wait=self._keep_waiting, faults=self.faults)

    def vendor(
        self, problem: Problem, inputs: Mapping[str, npt.NDArray[Any]], sets: int, beat: Beat = lambda what: None
    ) -> list[VendorCall]:
        """Raises GpuError, with what to do, where the vendor's library is missing or has no room for its operands."""
        offers = VENDORS.get(problem.operator)
        return list(offers(self, problem, inputs, sets, beat)) if offers else []

    def warm_up(self, beat: Callable[[str], None]) -> None:
        """See `workers.gpu.interface.Gpu`: threads of the driver, kernels of CuPy, the handle of cuBLAS."""
        with with_headers():
            self._warm_up(beat)

    def _warm_up(self, beat: Callable[[str], None]) -> None:
        xp = self.arrays
        self._warm_up_checks(beat)
        self.poison_shared()
        self.synchronize()
        beat("warming up: products")
        square = xp.ones((64, 64), np.float64)
        stacked = xp.ones((2, 64, 64), np.float64)
        self.to_host(xp.matmul(square, square) + xp.matmul(stacked, stacked))
        beat("warming up: the timer")
        values = xp.zeros(64, np.float32)
        timer = self.timer([partial(xp.add, values, 1, values), partial(xp.multiply, values, 2, values)])
        for _ in range(2):
            timer.sample()
        self.state()
        self.synchronize()

    def _warm_up_checks(self, beat: Callable[[str], None]) -> None:
        """What every candidate's verification does with arrays."""
        own = operator("matmul")
        rng = np.random.default_rng(0)
        for fields in WARM_UP_PROBLEMS:
            beat(f"warming up: verifying {fields['dtype']}")
            problem = own.parse({"operator": "matmul", "m": 8, "n": 16, "k": 16, "ldc": 24, **fields})
            operands = own.operands(problem)
            for kind in ("integer", "normal"):
                # Each of these compiles some kernels where CuPy's cache has none: none may be silent for long.
                beat(f"warming up: {kind} inputs and references of {fields['dtype']}")
                inputs = on_device(self, own.make_inputs(problem, kind, rng), operands)
                expected, bound = own.reference(problem, inputs)
                self.synchronize()
                beat(f"warming up: reading {kind} results of {fields['dtype']}")
                tensors = Operands(self, operands, verifying=True)
                tensors.write(inputs)
                tensors.out.poison()
                self.synchronize()
                check_output(tensors.out.values(), expected, bound, exact=kind == "integer").sentence()
                beat(f"warming up: looking beside {fields['dtype']}")
                tensors.harm()
                tensors.restore()
                bits = tensors.out.bits()
                differing(bits, bits)

    def state(self) -> dict[str, Any]:
        return gpu_state.read_state(self.device.uuid)

    def ceilings(self) -> dict[str, float]:
        rates = {"copy_gb_s": self._copy_rate()}
        self._free()
        for name, (side, fields) in CEILINGS.items():
            try:
                rate = self._product_rate(side, fields)
            except GpuFault:
                raise
            except GpuError:
                continue  # no library, or no room on this device
            if rate:
                rates[f"tflops_{name}"] = rate
            self._free()
        return rates

    def kernel(self, text: str, name: str, shared_bytes: int = 0) -> Callable[..., None]:
        """By NVRTC, at once; called with grid, block and NumPy scalars. Raises GpuError."""
        try:
            with self.faults(), with_headers():
                compiled = self.arrays.RawKernel(text, name)
                compiled.compile()
                if shared_bytes:
                    compiled.max_dynamic_shared_size_bytes = shared_bytes
        except self.arrays.cuda.compiler.CompileException as error:
            raise GpuError(f"NVRTC refuses {name}: {error}") from error

        def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
            with self.faults():
                # On CuPy's current stream, which is ours.
                compiled(grid, block, arguments, shared_mem=shared_bytes)

        return launch

    @contextmanager
    def faults(self) -> Iterator[None]:
        """CUDA's errors in this block become GpuFault, with CUDA's messages."""
        cuda = self.arrays.cuda
        try:
            yield
        except (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError) as error:
            raise GpuFault(str(error)) from error

    def _keep_waiting(self, microseconds: float) -> None:
        if self._wait is None:
            self._wait = self.kernel(KERNELS, "cukiln_wait")
        # A round takes far more than a nanosecond, so the rounds end nothing early; they end a clock that stands still.
        ns = math.ceil(1000 * microseconds)
        self._wait((1,), (1,), (np.uint64(ns), np.uint64(ns)))

    def _copy_rate(self) -> float:
        """GB/s of a large copy within the device, bytes read and written: by a kernel, or by the driver's own."""
        with self.faults():
            free, _ = self.arrays.cuda.Device(self._ordinal).mem_info
            source = self.arrays.arange(min(COPY_BYTES, free // 8) // 4, dtype=np.uint32)
            target = self.arrays.empty_like(source)
        size = int(source.nbytes)
        copy = self.kernel(KERNELS, "cukiln_copy")
        grid = (COPY_BLOCKS * self.device.multiprocessors,)
        arguments = (np.uint64(self.address(source)), np.uint64(self.address(target)), np.uint64(size // 16))
        ways: list[Callable[[], None]] = [
            lambda: copy(grid, (COPY_THREADS,), arguments),
            lambda: target.data.copy_from_device_async(source.data, size, self._stream),
        ]
        return 2 * size / min(self._median_us([way]) for way in ways) / 1000

    def _product_rate(self, side: int, fields: Mapping[str, Any]) -> float:
        """TFLOP/s (of int8: TOP/s) of the best that the vendor's library offers; 0.0 where it offers nothing."""
        op = operator("matmul")
        problem = op.parse({"operator": "matmul", "m": side, "n": side, "k": side, "layout": "nt", **fields})
        calls = self.vendor(problem, large_inputs(side, str(fields["dtype"])), 1)
        times = [self._median_us([partial(call.run, 0)]) for call in calls]
        return 2.0 * side**3 / min(times) / 1e6 if times else 0.0

    def _median_us(self, calls: Sequence[Callable[[], None]]) -> float:
        timer = self.timer(calls)
        return median(timer.sample() for _ in range(CEILING_SAMPLES))

    def _free(self) -> None:
        with self.faults():
            self._stream.synchronize()
            self.arrays.get_default_memory_pool().free_all_blocks()


def large_inputs(side: int, name: str) -> dict[str, npt.NDArray[Any]]:
    """Random square operands. Some rows repeat: drawing all of them would take longer than all products."""
    rng = np.random.default_rng(0)
    element = dtype(name).numpy
    few = side * 128
    drawn = rng.integers(-128, 128, few) if name == "int8" else rng.standard_normal(few, dtype=np.float32)
    block = drawn.astype(element)
    return {operand: np.resize(np.roll(block, shift), (side, side)) for operand, shift in (("a", 0), ("b", side // 3))}


def format_uuid(data: bytes, *, of_a_part: bool = False) -> str:
    """16 bytes as nvidia-smi writes them, of a GPU or of a part of one (MIG)."""
    text = data.hex()
    return ("MIG-" if of_a_part else "GPU-") + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise GpuMissing(f"a GPU is driven through CuPy, which cannot be imported ({error}); {INSTALL}") from error
    return cupy


@contextmanager
def _missing(cupy: Any) -> Iterator[None]:
    """CUDA's errors in this block become GpuMissing, with what to do."""
    try:
        yield
    except cupy.cuda.runtime.CUDARuntimeError as error:
        driver, own = cupy.cuda.runtime.driverGetVersion(), cupy.cuda.runtime.runtimeGetVersion()
        if int(error.status) == OLD_DRIVER and driver > 0:  # 0: there is none
            raise DriverTooOld(
                f"the NVIDIA driver is for CUDA {driver // 1000}.{driver % 1000 // 10}, and CuPy is for CUDA "
                f"{own // 1000}: install a driver of release {FIRST_DRIVERS.get(own // 1000, 'for it')} or later, or "
                f"use CUDA=12 make serve, which takes 525 or later ({error})"
            ) from error
        raise GpuMissing(f"{NO_GPU.get(int(error.status), 'the GPU cannot be used')} ({error})") from error


@contextmanager
def with_headers() -> Iterator[None]:
    """CuPy compiles with CUDA's headers, which neither it nor a driver brings; it looks for them when it compiles."""
    try:
        yield
    except RuntimeError as error:
        if "CUDA headers" not in str(error):
            raise
        raise GpuMissing(f"CuPy finds no headers of CUDA to compile with ({error}); {INSTALL}") from error


def _describe(cupy: Any, ordinal: int) -> Device:
    with _missing(cupy):
        properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
        version = int(cupy.cuda.runtime.driverGetVersion())
    name = properties["name"].decode()
    return Device(
        name=name,
        # Of a part the driver reports the part's own UUID, and a product's name that ends so: "… MIG 1g.10gb".
        uuid=format_uuid(uuid_of(ordinal), of_a_part=" MIG " in name),
        capability=(int(properties["major"]), int(properties["minor"])),
        # Without NVIDIA's management library only the CUDA version that the driver is for is known.
        driver=gpu_state.driver_version() or f"CUDA {version // 1000}.{version % 1000 // 10}",
        multiprocessors=int(properties["multiProcessorCount"]),
        l2_bytes=int(properties["l2CacheSize"]),
        memory_bytes=int(properties["totalGlobalMem"]),
        cuda=version,
    )


def uuid_of(ordinal: int) -> bytes:
    """By the driver: CuPy's property ends at the first zero byte. Numbers are those of CUDA_VISIBLE_DEVICES in both."""
    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        steps = (
            driver.cuInit(0),
            driver.cuDeviceGet(ctypes.byref(device), ordinal),
            driver.cuDeviceGetUuid_v2(ctypes.byref(uuid), device),
        )
    except (OSError, AttributeError) as error:
        raise GpuMissing(f"the NVIDIA driver cannot report a GPU's UUID ({error}); {NO_GPU[35]}") from error
    if any(steps):
        raise GpuMissing(f"the NVIDIA driver does not report the UUID of GPU {ordinal} (CUDA error {max(steps)})")
    return bytes(uuid)
