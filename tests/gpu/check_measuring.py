"""Checks on a real GPU what measuring stands on: `make test-gpu`.

Copies, the timer, poison, the device's state, faults, the vendor's library against float64, and the ceilings; a line
for each. Needs what the server needs (pydantic, ml_dtypes, …) and the `gpu` group; compiles with NVRTC alone. Of a GPU
module that does not drive CuPy, checks that look into CuPy are not run, which is said.
Exit status: 0 all is as it should be, 1 something is not, 2 there is no GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from codegen.operators import operator
from codegen.operators.matmul.problem import MatmulProblem
from tests.gpu.run_check import NotRight, described, failure_of
from workers.gpu.interface import Gpu, GpuError, GpuFault, GpuMissing, choose_device, list_devices, open_gpu, warm_up
from workers.gpu.leftovers import belongings, leftover, thread_names

MODULE = "workers.cuda.cupy_gpu"
RIGHT, WRONG, NO_GPU = 0, 1, 2
Check = Callable[..., str]
CHECKS: dict[str, Check] = {}
OF_MODULE = {"device", "fault"}  # those that ask the GPU module itself
OF_CUPY = {"copies", "stream", "timer", "short timer", "poison", "fault", "ceilings"}
# How far ‖out - ref‖ / ‖ref‖ of the vendor may be: rounding of the output, of tf32, and of a product that is stored
# before the rest of the epilogue. int8 sums are exact.
NORMS = {"float32": 1e-5, "tf32": 2e-3, "float16": 2e-3, "bfloat16": 1.6e-2, "int32": 0.0}
BIAS, GELU, RELU = {"op": "bias", "axis": "n"}, {"op": "gelu"}, {"op": "relu"}
EPILOGUES: list[list[dict[str, Any]]] = [
    [BIAS],
    [BIAS, RELU],
    [{"op": "scale", "value": 0.5}, {"op": "residual"}, BIAS, RELU],
    [BIAS, GELU],
    [{"op": "bias", "axis": "m"}, {"op": "silu"}, {"op": "mask"}],
]


def check(name: str) -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return add


def require(condition: bool, words: str) -> None:
    if not condition:
        raise NotRight(words)


# --- the checks: each gets the opened GPU and says what it saw


@check("device")
def device(gpu: Any, module: str = MODULE) -> str:
    device = gpu.device
    require(device.uuid[:4] in ("GPU-", "MIG-") and len(device.uuid) == 40, f"the UUID is {device.uuid}")
    require(device.multiprocessors > 0 and device.l2_bytes > 0 and device.memory_bytes > 2**30, f"it is {device}")
    # Not opened again: a second stream would be CuPy's current one from then on.
    require(choose_device(list_devices(module), device.uuid) == device, "its UUID names another device")
    return f"{device.name}, {device.uuid}, driver {device.driver}, {device.multiprocessors} multiprocessors"


@check("copies")
def copies(gpu: Any) -> str:
    host = np.random.default_rng(1).integers(0, 2**32, 2**20, np.uint32)
    array = gpu.arrays.asarray(host)
    require(gpu.address(array) % 256 == 0, f"an array lies at {gpu.address(array):#x}")
    require(gpu.address(array[5:]) == gpu.address(array) + 20, "a view's address is not its first element's")
    require(np.array_equal(gpu.to_host(array + 1), host + 1), "what came back is not what was computed")
    return "4 MiB there and back, equal"


@check("stream")
def stream(gpu: Any) -> str:
    """CuPy's own kernels run on our stream too, whatever was done before: else in no order with launches."""
    cuda = gpu.arrays.cuda
    for name, work in (
        ("opening", lambda: None),
        ("poisoning shared memory", gpu.poison_shared),
        ("copying to the host", lambda: gpu.to_host(gpu.arrays.arange(64).reshape(8, 8).T)),
        ("CuPy's own copy", lambda: gpu.arrays.arange(64).reshape(8, 8).T.get()),
        ("recording", lambda: gpu.timer([gpu.poison_shared]).sample()),
        ("warming up", lambda: gpu.warm_up(lambda what: None)),
    ):
        work()
        current = int(cuda.get_current_stream().ptr)
        require(current == gpu.stream, f"after {name} CuPy's current stream is {current:#x}, not ours, {gpu.stream:#x}")
    return f"{gpu.stream:#x} stays CuPy's current one"


@check("threads")
def threads(gpu: Any) -> str:
    """What the driver and CuPy start by themselves is there after the warm-up: else a candidate is blamed for it."""
    warm_up(gpu, lambda what: None)
    before, names = belongings(), thread_names()
    gpu.poison_shared()
    gpu.timer([gpu.poison_shared] * 3).sample()
    gpu.state()
    words = leftover(before)
    require(words is None, f"after the warm-up something {words}; there were {', '.join(names)}")
    return ", ".join(names)


@check("timer")
def timer(gpu: Any) -> str:
    """A sum of arrays takes as long as the memory's bandwidth allows, however it is launched. Not a copy: what the
    driver makes of one in a graph differs from what it makes of it alone (H100: 2.4 and 3.0 TB/s)."""
    size = 2**29
    source = gpu.arrays.arange(size // 4, dtype=np.uint32)
    target = gpu.arrays.empty_like(source)

    def add() -> None:
        gpu.arrays.add(source, 1, target)

    add()
    gpu.synchronize()
    single, four = (gpu.timer([add] * count) for count in (1, 4))
    require(single.recorded and four.recorded, f"the calls were not recorded: {single.why or four.why}")
    times = [median(each.sample() for _ in range(15)) for each in (single, four)]
    plain = gpu.timer([add])
    plain._graph = None  # as where a call cannot be recorded
    times.append(median(plain.sample() for _ in range(15)))
    rate, peak = 2 * size / times[0] / 1000, peak_gb_s(gpu)
    require(0.3 * peak < rate < 1.05 * peak, f"a pass moves {rate:.0f} GB/s; the memory's peak is {peak:.0f} GB/s")
    require(abs(times[1] / times[0] / 4 - 1) < 0.05, f"four passes take {times[1]:.1f} µs, one takes {times[0]:.1f} µs")
    require(abs(times[2] / times[0] - 1) < 0.05, f"{times[2]:.1f} µs launched, {times[0]:.1f} µs replayed")
    return f"a pass over 512 MiB takes {times[0]:.1f} µs, {rate:.0f} of {peak:.0f} GB/s; launched {times[2]:.1f} µs"


@check("short timer")
def short_timer(gpu: Any) -> str:
    """The time of nearly nothing is near nothing, and the head start is found."""
    array = gpu.arrays.zeros(1, np.uint32)
    add = partial(gpu.arrays.add, array, 1, array)
    add()
    gpu.synchronize()
    each = [median(gpu.timer([add] * count).sample() for _ in range(25)) / count for count in (1, 50)]
    require(0.0 < each[1] < 20.0, f"one addition of 50 takes {each[1]:.2f} µs")
    require(each[0] < 30.0, f"one addition takes {each[0]:.2f} µs: the GPU waited for the host")
    return f"one addition takes {each[0]:.2f} µs, one of fifty {each[1]:.2f} µs"


@check("poison")
def poison(gpu: Any) -> str:
    """A kernel that reads unwritten shared memory gets the poison."""
    text = """
    extern "C" __global__ void look(unsigned words, unsigned* found) {
      extern __shared__ unsigned shared[];
      const volatile unsigned* const read = shared;
      unsigned count = 0;
      for (unsigned i = threadIdx.x; i < words; i += blockDim.x) count += read[i] == 0xffffffffu;
      atomicAdd(found + blockIdx.x, count);
    }
    """
    # As many bytes as the poison takes: with less the driver may divide L1 and shared memory anew, which empties both.
    size = gpu.shared_bytes
    look = gpu.kernel(text, "look", shared_bytes=size)
    result = gpu.arrays.zeros(gpu.device.multiprocessors, np.uint32)
    gpu.poison_shared()
    gpu.synchronize()
    look((gpu.device.multiprocessors,), (256,), (np.uint32(size // 4), np.uint64(gpu.address(result))))
    share = float(gpu.to_host(result).sum()) / (gpu.device.multiprocessors * size // 4)
    require(share > 0.5, f"only {share:.1%} of the words are poison")
    return f"{share:.1%} of the words are poison"


@check("state")
def state(gpu: Any) -> str:
    state = gpu.state()
    require("nvml" not in state, f"no state: {state.get('nvml')}")
    for name in ("sm_mhz", "memory_mhz", "temperature_c", "power_w", "throttle"):
        require(name in state, f"{name} is not reported; reported are {sorted(state)}")
    return ", ".join(f"{name} {value}" for name, value in state.items())


@check("fault")
def fault(gpu: Any, module: str = MODULE) -> str:
    """In a process of its own, whose context is lost: the fault is seen, and so at every later call."""
    command = [sys.executable, "-m", "tests.gpu.check_measuring", "--fault", gpu.device.uuid, "--gpu-module", module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    require(done.returncode == 0, (done.stdout + done.stderr).strip()[-500:])
    return done.stdout.strip()


def make_fault(module: str, uuid: str) -> int:
    gpu: Any = open_gpu(module, uuid)
    write = gpu.kernel('extern "C" __global__ void f(int* where) { *where = 1; }', "f")
    write((1,), (1,), (np.uint64(16),))
    words = []
    for call in (gpu.synchronize, lambda: gpu.to_host(gpu.arrays.zeros(4)), gpu.synchronize):
        try:
            call()
            print("a write to address 16 went unnoticed")
            return WRONG
        except GpuFault as error:
            words.append(str(error))
        except RuntimeError as error:  # an array made by CuPy itself
            words.append(str(error))
    print(f"{words[0]}")
    return RIGHT


@check("vendor")
def vendor(gpu: Any) -> str:
    """Every type, layout and kind of epilogue on small, tail and padded problems."""
    count, worst = 0, 0.0
    for fields in vendor_problems():
        problem = operator("matmul").parse({"operator": "matmul", **fields})
        assert isinstance(problem, MatmulProblem)
        count += 1
        worst = max(worst, vendor_error(gpu, problem))
    return f"{count} problems, at worst {worst:.0%} of what is allowed apart from float64"


def vendor_problems() -> Iterator[dict[str, Any]]:
    for dtype in ("float32", "float16", "bfloat16", "int8"):
        for layout in ("nn", "nt", "tn", "tt"):
            yield {"m": 96, "n": 64, "k": 128, "dtype": dtype, "layout": layout}
            yield {"m": 37, "n": 29, "k": 51, "dtype": dtype, "layout": layout, "batch": 3}
        for epilogue in EPILOGUES:
            out = {"out_dtype": "float16"} if dtype == "int8" else {}
            yield {"m": 96, "n": 64, "k": 128, "dtype": dtype, "epilogue": epilogue, **out}
            yield {"m": 33, "n": 20, "k": 24, "batch": 2, "ldc": 24, "dtype": dtype, "epilogue": epilogue, **out}
    yield {"m": 96, "n": 64, "k": 128, "dtype": "float32", "allow_tf32": True}
    yield {"m": 96, "n": 64, "k": 128, "dtype": "float16", "out_dtype": "float32", "epilogue": [BIAS]}
    yield {"m": 96, "n": 64, "k": 128, "dtype": "float16", "out_dtype": "bfloat16"}
    yield {"m": 5, "n": 7, "k": 11, "batch": 4, "stride_a": 0, "lda": 13, "ldb": 9, "ldc": 10}


def vendor_error(gpu: Gpu, problem: MatmulProblem) -> float:
    """The largest error of all algorithms that are offered, on both sets, as a share of what is allowed."""
    op, words = operator("matmul"), problem.model_dump_json(exclude_defaults=True)
    inputs = op.make_inputs(problem, "normal", np.random.default_rng(7))
    expected, _ = op.reference(problem, inputs)
    allowed = NORMS["tf32" if problem.allow_tf32 else problem.out_dtype]
    calls = gpu.vendor(problem, inputs, 2)
    require(bool(calls), f"nothing is offered for {words}")
    worst = 0.0
    for call in calls:
        for number in (1, 0):
            call.run(number)
            got = gpu.to_host(call.result(number))
            require(got.shape == expected.shape, f"the result has shape {got.shape} for {words}")
            error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
            described = f"{words} by {call.describe()}: off by {error:.1e}, allowed is {allowed:.1e}"
            require(error <= allowed, described)  # false for NaN too
            worst = max(worst, error / allowed if allowed else 0.0)
    return worst


@check("ceilings")
def ceilings(gpu: Any) -> str:
    ceilings = gpu.ceilings()
    peak = peak_gb_s(gpu)
    require(
        0.3 * peak < ceilings["copy_gb_s"] < 1.05 * peak, f"a copy moves {ceilings['copy_gb_s']:.0f} of {peak:.0f} GB/s"
    )
    for name in ("float16", "bfloat16", "tf32", "float32", "int8"):
        require(ceilings.get(f"tflops_{name}", 0.0) > 0.0, f"no rate of {name}: {ceilings}")
    require(
        ceilings["tflops_float16"] > ceilings["tflops_tf32"] > ceilings["tflops_float32"], f"the rates are {ceilings}"
    )
    return ", ".join(f"{name} {value:.0f}" for name, value in ceilings.items())


def peak_gb_s(gpu: Any) -> float:
    """The memory's, from its clock and width: two transfers in a clock (CUDA C++ Best Practices Guide, 8.2.1)."""
    runtime = gpu.arrays.cuda.runtime
    ordinal = runtime.getDevice()
    khz = runtime.deviceGetAttribute(runtime.cudaDevAttrMemoryClockRate, ordinal)
    bits = runtime.deviceGetAttribute(runtime.cudaDevAttrGlobalMemoryBusWidth, ordinal)
    return float(2 * khz * bits / 8 / 1e6)


# --- all of them


def run_checks(gpu: Any, checks: dict[str, Check]) -> int:
    wrong = 0
    for name, check in checks.items():
        error = failure_of(name, partial(check, gpu), sentences=(GpuError, subprocess.TimeoutExpired))
        wrong += error is not None
        if isinstance(error, GpuFault):
            print("the context is lost: the checks after this one were not run")
            break
    return WRONG if wrong else RIGHT


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="0", help="number or UUID")
    parser.add_argument("--gpu-module", default=MODULE, help="what drives the GPU")
    parser.add_argument("--only", action="append", choices=[*CHECKS], help="a check; may be given more than once")
    parser.add_argument("--fault", metavar="UUID", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.fault:
        return make_fault(chosen.gpu_module, chosen.fault)
    try:
        list_devices(chosen.gpu_module)
        gpu: Any = open_gpu(chosen.gpu_module, chosen.device)
    except GpuMissing as error:
        print(f"{error}; nothing was checked", file=sys.stderr)
        return NO_GPU
    except Exception as error:  # noqa: BLE001 - whatever CuPy and the driver raise
        print(f"opening the GPU: WRONG: {described(error, (GpuError,))}; nothing was checked", file=sys.stderr)
        return WRONG
    return run_checks(gpu, chosen_checks(gpu, chosen.gpu_module, chosen.only or [*CHECKS]))


def chosen_checks(gpu: Any, module: str, names: Sequence[str]) -> dict[str, Check]:
    """Those of the names that this GPU can run; says which of them it cannot."""
    left_out = [name for name in names if name in OF_CUPY and gpu.arrays.__name__ != "cupy"]
    for name in left_out:
        print(f"{name}: not run: {module} does not drive CuPy", flush=True)
    chosen = {name: CHECKS[name] for name in names if name not in left_out}
    return {name: partial(each, module=module) if name in OF_MODULE else each for name, each in chosen.items()}


if __name__ == "__main__":
    sys.exit(main())
