"""Builds the kernels of primitive_kernels.cuh for the CPU and for the GPU, from the headers of codegen/device, and runs
them.

Needs Python, NumPy, g++ and nvcc; CuPy where there is a GPU.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from codegen.primitives import TURING_SUMS
from tests.gpu.primitive_checks import Check
from tests.gpu.primitive_inputs import Words
from workers.compile import find_compilers

DEVICE = Path(__file__).resolve().parents[2] / "codegen" / "device"
KERNELS = Path(__file__).with_name("primitive_kernels.cuh")
NVRTC = Path(__file__).resolve().parents[2] / "workers" / "compile" / "nvrtc" / "driver.py"
# Those of codegen/text/render_group.py and codegen/text/render_cpu.py without what is not of primitives, and their
# flags; tests/device/test_confirm_primitives.py compares them.
DEVICE_HEADERS = ("launch.h", "device.cuh", "convert.cuh", "warp.cuh", "async_copy.cuh", "matrix.cuh")
CPU_HEADERS = (
    "cpu/fiber.h", "cpu/memory.h", "cpu/scheduler.h", "cpu/counts.h", "cpu/sites.h", "cpu/race.h", "cpu/banks.h",
    "cpu/watch.h", "cpu/collective.h", "cpu/barriers.h", "launch.h", "cpu/emulation.h", "cpu/async_copy.h",
    "cpu/convert.h", "cpu/warp.h", "cpu/tensor_sums.h", "cpu/matrix.h", "cpu/grid.h", "cpu/harness.h",
)  # fmt: skip
CPU_FLAGS = (
    "-std=c++17", "-O1", "-ftree-vectorize", "-march=native", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden",
    "-fno-exceptions", "-fno-rtti", "-fno-asynchronous-unwind-tables", "-Wno-unknown-pragmas", "-shared",
)  # fmt: skip
DEVICE_FLAGS = ("-cubin", "-std=c++17", "-O3")
CPU_SECONDS = 60.0
_RUNTIME_ERROR = 1  # of codegen/device/cpu/scheduler.h; the other statuses: no memory, no time
# cudaError_t: assert, the device's exceptions, a failed launch. What is none of a kernel is the machine's.
_FAULTS_OF_KERNELS = {700, 710, *range(714, 720)}

_CPU_ENTRY = """
namespace cukiln {{
namespace confirm {{
{wrappers}
}}
}}
CUKILN_CPU_EXPORT int confirm_run(int function, const void* in, void* out, unsigned blocks, unsigned threads,
                                  unsigned shared, int order, double seconds) {{
  using namespace cukiln::confirm;
  using cukiln::cpu::call_kernel;
  const cukiln::cpu::Function functions[] = {{{entries}}};
  cukiln::cpu::Call call = {{}};
  call.order = order;
  call.seed = 1;
  call.cpu_seconds = seconds;
  call.watch = 1;
  const Arguments arguments = {{in, out}};
  const cukiln::Launch launch = {{function, {{blocks, 1, 1}}, {{threads, 1, 1}}, shared}};
  return cukiln::cpu::execute(call, &launch, 1, functions, {count}, &arguments);
}}
"""
ORDERS = ("ascending", "descending", "seeded")


class BuildFailed(Exception):
    """A compiler is missing or refused the kernels; the message holds its words."""


class NoCompiler(BuildFailed):
    """There is none to build the kernels with: that says nothing about any primitive."""


class RunFailed(Exception):
    """A kernel did not run to its end; the message says why. `is_verdict`: it is so of the kernel, and not of this
    machine, which has no memory or no time, or refuses the launch."""

    def __init__(self, why: str, *, is_verdict: bool = True) -> None:
        super().__init__(why)
        self.is_verdict = is_verdict


class ContextLost(RunFailed):
    """As RunFailed; no kernel runs in this process any more."""


class Gpu(Protocol):
    """A GPU that runs checks. `arch`: as nvcc names it; `description`: what the result file says of it."""

    arch: str
    description: dict[str, str]

    def run(self, check: Check, words: Words) -> Words:
        """The results of the check's kernel. Raises RunFailed."""


def _header(name: str, text: str) -> str:
    """As codegen/text/render_cpu.py: under its own name and lines."""
    lines = ["" if line.startswith(('#include "', "#pragma once")) else line for line in text.splitlines()]
    return f'#line 1 "{name}"\n' + "\n".join(lines) + "\n"


def texts_of(headers: Sequence[str]) -> str:
    return "".join(_header(name, (DEVICE / name).read_text(encoding="utf-8")) for name in headers)


def cpu_text(checks: Sequence[Check], kernels: Path = KERNELS, sums: int = TURING_SUMS) -> str:
    """The C++ of all checks for g++; `sums`: whose tensor cores add."""
    wrappers = "\n".join(
        f"void {check.function}(const Arguments arguments) {{ {check.kernel}(arguments); }}" for check in checks
    )
    entries = ", ".join(f"call_kernel<Arguments, {check.function}>" for check in checks)
    sums_of = f"#define CUKILN_TENSOR_SUMS {sums}\n"
    defines = (
        f"{sums_of}#define CUKILN_DEVICE 1\n#define CUKILN_HOST 1\n#define CUKILN_CPU 1\n#define CUKILN_RUNTIME 1\n"
    )
    entry = _CPU_ENTRY.format(wrappers=wrappers, entries=entries, count=len(checks))
    return defines + texts_of(CPU_HEADERS) + _header(kernels.name, kernels.read_text(encoding="utf-8")) + entry


def device_text(checks: Sequence[Check]) -> str:
    """The CUDA C++ of all checks for nvcc."""
    wrappers = "".join(
        f'extern "C" __global__ void {check.function}(const void* in, void* out) '
        f"{{ {check.kernel}(Arguments{{in, out}}); }}\n"
        for check in checks
    )
    text = (
        "#define CUKILN_DEVICE 1\n"
        + texts_of(DEVICE_HEADERS)
        + _header(KERNELS.name, KERNELS.read_text(encoding="utf-8"))
    )
    return f"{text}namespace cukiln {{\nnamespace confirm {{\n{wrappers}}}\n}}\n"


def compile_in(command: Sequence[str], folder: Path) -> None:
    try:
        finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    except OSError as error:
        raise NoCompiler(f"{command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildFailed(str(error)) from error
    if finished.returncode:
        raise BuildFailed(f"{' '.join(command)}\n{finished.stdout}{finished.stderr}")


class CpuEmulations:
    """All checks' kernels, built for the CPU in `folder`, run under the race detector. `sums`: whose tensor cores
    add."""

    def __init__(self, checks: Sequence[Check], folder: Path, kernels: Path = KERNELS, sums: int = TURING_SUMS) -> None:
        (folder / "primitives.cpp").write_text(cpu_text(checks, kernels, sums), encoding="utf-8")
        compile_in([os.environ.get("CUKILN_CXX", "g++"), *CPU_FLAGS, "primitives.cpp", "-o", "primitives.so"], folder)
        self._functions = {check.name: index for index, check in enumerate(checks)}
        self._library = ctypes.CDLL(str(folder / "primitives.so"))
        self._library.cukiln_allocate.restype = ctypes.c_void_p
        self._library.cukiln_message.restype = ctypes.c_char_p

    def run(self, check: Check, words: Words, order: str = "ascending") -> Words:
        """The results of the check's kernel, of one block per row of `words`. Raises RunFailed."""
        outputs = np.full((len(words), check.words_out), 0xFFFFFFFF, np.uint32)
        try:
            given, made = (self._allocate(name, array) for name, array in ((b"in", words), (b"out", outputs)))
            status = self._library.confirm_run(
                self._functions[check.name], given, made, len(words), check.threads, check.shared_bytes,
                ORDERS.index(order), ctypes.c_double(CPU_SECONDS),
            )  # fmt: skip
            ctypes.memmove(outputs.ctypes.data, made, outputs.nbytes)
        finally:
            self._library.cukiln_free_all()
        if status:
            words = self._library.cukiln_message().decode(errors="replace")
            raise RunFailed(words, is_verdict=status == _RUNTIME_ERROR)
        return outputs

    def _allocate(self, name: bytes, array: Words) -> ctypes.c_void_p:
        address = self._library.cukiln_allocate(
            name, ctypes.c_uint64(array.nbytes), ctypes.c_uint64(16), name == b"out"
        )
        if not address:
            raise RunFailed("out of memory", is_verdict=False)
        ctypes.memmove(address, np.ascontiguousarray(array).ctypes.data, array.nbytes)
        return ctypes.c_void_p(address)


def find_nvcc() -> str:
    """Raises NoCompiler."""
    try:
        return find_compilers.find_nvcc()
    except FileNotFoundError as error:
        raise NoCompiler(str(error)) from error


def find_ptxas() -> str | None:
    """Where CUDA 12 is asked for, no nvcc is named, and the wheels hold NVRTC with ptxas: that ptxas."""
    if not find_compilers.is_for_cuda_12() or os.environ.get("CUKILN_NVCC"):
        return None
    both = find_compilers.in_wheels("cuda_nvrtc/lib/libnvrtc.so.12"), find_compilers.in_wheels("cuda_nvcc/bin/ptxas")
    return str(both[1][0]) if all(both) else None


def device_command(arch: str, source: str, cubin: str) -> list[str]:
    """From a file to its cubin. Raises NoCompiler."""
    if ptxas := find_ptxas():
        head = [
            sys.executable,
            str(NVRTC),
            "--nvrtc",
            str(find_compilers.in_wheels("cuda_nvrtc/lib/libnvrtc.so.12")[0]),
        ]
        return [*head, "--ptxas", ptxas, "--target", arch, "--time", "phases.csv", "-o", cubin, source]
    code = f"arch={arch.replace('sm_', 'compute_')},code={arch}"
    return [find_nvcc(), "-gencode", code, *DEVICE_FLAGS, "-o", cubin, source]


def why_no_kernel_loads(driver: int, compiler: str) -> str | None:
    """Of a driver for that CUDA (1000 × major + 10 × minor) and a compiler's version; None where kernels load."""
    major = compiler.partition(".")[0]
    if not major.isdigit() or not 0 < driver < 1000 * int(major):
        return None
    here = f"the driver is for CUDA {driver // 1000}.{driver % 1000 // 10}, and kernels are compiled by CUDA {compiler}"
    return f"{here}: install a newer driver (580 or later for 13, 525 for 12), or give CUDA=12"


def build_cubin(checks: Sequence[Check], arch: str, folder: Path) -> Path:
    """nvcc's code for one architecture. Raises BuildFailed."""
    source, cubin = folder / "primitives.cu", folder / f"primitives_{arch}.cubin"
    source.write_text(device_text(checks), encoding="utf-8")
    compile_in(device_command(arch, source.name, cubin.name), folder)
    return cubin


def nvcc_version() -> str:
    """Raises NoCompiler."""
    command = [find_ptxas() or find_nvcc(), "--version"]
    try:
        words = subprocess.run(command, capture_output=True, text=True, timeout=240).stdout
    except OSError as error:
        raise NoCompiler(f"{command[0]}: {error.strerror}") from error
    return words.split(" V")[-1].split()[0] if " V" in words else "unknown"


def runs_on(check: Check, arch: str) -> bool:
    """Whether GPUs of this architecture have the check's instructions."""
    return int("".join(digit for digit in arch if digit.isdigit())) >= check.capability


class CupyGpu:
    """The GPU of that number, by CuPy. Raises RunFailed where there is none."""

    def __init__(self, ordinal: int = 0) -> None:
        try:
            import cupy
        except ImportError as error:
            raise RunFailed(f"no GPU can be used: CuPy is not installed ({error})") from error
        try:
            properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
            cupy.cuda.Device(ordinal).use()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise RunFailed(f"no GPU: {error}") from error
        self._cupy = cupy
        self._module: Any = None
        self.arch = f"sm_{properties['major']}{properties['minor']}"
        driver = self.cuda = int(cupy.cuda.runtime.driverGetVersion())
        self.description = {
            "device": properties["name"].decode(),
            "driver": f"{driver // 1000}.{driver % 1000 // 10}",
            "arch": self.arch,
        }

    def load(self, cubin: Path) -> None:
        self._module = self._cupy.RawModule(path=str(cubin))

    def run(self, check: Check, words: Words) -> Words:
        cupy = self._cupy
        try:
            given = cupy.asarray(words)
            made = cupy.full((len(words), check.words_out), 0xFFFFFFFF, cupy.uint32)
            kernel = self._module.get_function(check.function)
            kernel((len(words),), (check.threads,), (given, made), shared_mem=check.shared_bytes)
            outputs: Words = cupy.asnumpy(made)
        except (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError) as error:
            kind = ContextLost if self._is_lost() else RunFailed
            raise kind(str(error), is_verdict=error.status in _FAULTS_OF_KERNELS) from error
        return outputs

    def _is_lost(self) -> bool:
        try:
            self._cupy.cuda.runtime.deviceSynchronize()
        except self._cupy.cuda.runtime.CUDARuntimeError:
            return True
        return False
