"""The ways to compile a set of kernels that `bench_compile` compares, all from the same rendered text and headers, with
as many compiler processes as there are cores. nvcc keeps its intermediate files in all of them.

- *alone*: one `.cu` per kernel, nvcc straight to a `.so`;
- *hidet's rule*: the same with groups (`hidet_groups`), whole `.so` each;
- *ours*: what a compile worker does: groups of `in_files`, both uniqueness assertions, a cubin, and a `.so` with launch
  code, which the others do not have;
- one CUTLASS kernel beside one of ours with the same tile, a file each, nvcc straight to a `.so`.
"""

import importlib.util
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.shapes import public_shape
from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.targets import Target
from codegen.text.cubin import code_digest_of, read_cubin
from codegen.text.render_group import render_device, symbols
from workers.compile.compile_file import FileCompiler
from workers.compile.compile_group import compile_group
from workers.compile.toolchain import DEVICE_FLAGS, Toolchain
from workers.offline.compile_ahead import in_files
from workers.processes.job_files import write_text
from workers.processes.processes import Finished, Limits, Processes

LIMITS = Limits(wall_seconds=600, cpu_seconds=600, memory_bytes=8 << 30, output_bytes=1 << 30)
HIDET_GROUP = 32  # kernels
# 128 x 128 x 32 tiles of fp16 in three stages, fp32 accumulators: a kernel as CUTLASS' own examples instantiate it.
CUTLASS = """\
#include <cutlass/gemm/device/gemm.h>
using Gemm = cutlass::gemm::device::Gemm<
    cutlass::half_t, cutlass::layout::RowMajor, cutlass::half_t, cutlass::layout::RowMajor, cutlass::half_t,
    cutlass::layout::RowMajor, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
    cutlass::gemm::GemmShape<128, 128, 32>, cutlass::gemm::GemmShape<64, 64, 32>, cutlass::gemm::GemmShape<16, 8, 16>,
    cutlass::epilogue::thread::LinearCombination<cutlass::half_t, 8, float, float>,
    cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>, 3>;
template __global__ void cutlass::Kernel<Gemm::GemmKernel>(Gemm::GemmKernel::Params);
"""
CUTLASS_SHAPE = "square/float16_1024"
SAME_TILE = {"tile_m": 128, "tile_n": 128, "tile_k": 32, "warps_m": 2, "warps_n": 2, "stages": 3}
CUTLASS_ROUNDS = 3


@dataclass(frozen=True)
class Compiled:
    """What one way took for a set: wall seconds of the whole, CPU seconds summed over the tools' process trees, the
    code digest of each kernel by id; of ours also wall seconds by phase, summed over the files. `files`: peak bytes of
    each file's largest tool."""

    wall: float
    cpu: float
    digests: Mapping[str, str]
    phases: Mapping[str, float] = field(default_factory=dict)
    files: Sequence[int] = ()


@dataclass(frozen=True)
class _File:
    cpu: float
    digests: Mapping[str, str]
    peak_bytes: int
    phases: Sequence[tuple[str, float]] = ()


def hidet_groups(count: int, workers: int) -> list[list[int]]:
    """Which of `count` kernels go together by the rule of hidet (hidet-org/hidet, pull request 426): as many groups for
    each worker as make none larger than 32 kernels, and one per kernel while there are no more kernels than workers.
    Kernels are assigned round-robin, so that neighbours, which take about equally long, are in different groups."""
    groups = count if count <= workers else math.ceil(count / (HIDET_GROUP * workers)) * workers
    return [list(range(first, count, groups)) for first in range(groups)]


class Ways:
    """All ways on one machine, for one target. Every kernel of a set must compile: a failure ends the benchmark."""

    def __init__(self, toolchain: Toolchain, sheet: Target, processes: Processes, cores: int) -> None:
        self._toolchain = toolchain
        self._target = sheet
        self._processes = processes
        self.cores = cores

    def alone(self, kernels: Sequence[Kernel]) -> Compiled:
        """A file for each of `kernels`, also where one comes twice."""
        return self._timed(self._whole_library, [(kernel,) for kernel in kernels])

    def hidet(self, kernels: Sequence[Kernel]) -> Compiled:
        parts = hidet_groups(len(kernels), self.cores)
        return self._timed(self._whole_library, [tuple(kernels[index] for index in part) for part in parts])

    def ours(self, kernels: Sequence[Kernel]) -> Compiled:
        """Repeated kernels count once, as in the service."""
        started = time.perf_counter()
        groups = in_files(kernels, self.cores)
        grouping = time.perf_counter() - started
        return self._timed(self._group, groups, grouping)

    def device_seconds(self, kernels: Sequence[Kernel]) -> float:
        """CPU seconds of nvcc's device pass over one group; mean over as many concurrent runs as there are cores."""
        return self._timed(self._device_pass, [tuple(kernels)] * self.cores).cpu / self.cores

    def _device_pass(self, kernels: tuple[Kernel, ...]) -> _File:
        rendered = render_device(kernels)
        with self._processes.private_folder() as folder:
            compiler = FileCompiler(folder, self._toolchain, self._processes, LIMITS)
            compiler.compile_device(rendered.text, self._target.name, rendered.symbols)
        return _File(compiler.cpu_seconds, {}, compiler.peak_memory_bytes)

    def _timed(
        self, compile_one: Callable[[tuple[Kernel, ...]], _File], work: Sequence[Any], before: float = 0.0
    ) -> Compiled:
        """`before`: wall seconds that were spent on this already."""
        started = time.perf_counter()
        with ThreadPoolExecutor(self.cores) as pool:
            files = list(pool.map(compile_one, work))
        wall = before + time.perf_counter() - started
        phases: dict[str, float] = {}
        for name, seconds in (phase for file in files for phase in file.phases):
            phases[name] = phases.get(name, 0.0) + seconds
        digests = {name: digest for file in files for name, digest in file.digests.items()}
        return Compiled(wall, sum(file.cpu for file in files), digests, phases, [file.peak_bytes for file in files])

    def library(self, text: str, folder: Path, include: Path | None = None) -> Finished:
        """One `.cu` of this text to `kernels.so` in `folder`, by nvcc alone, under the flags of ours."""
        name = self._target.name
        flags = [flag for flag in DEVICE_FLAGS if flag != "-cubin"]
        architecture = ["-gencode", f"arch={name.replace('sm_', 'compute_')},code={name}"]
        command = [str(self._toolchain.nvcc), "-ccbin", str(self._toolchain.host_compiler), *architecture, *flags]
        command += ["--keep", "--keep-dir", ".", "-shared", "-Xcompiler", "-fPIC", "-o", "kernels.so", "kernels.cu"]
        write_text(folder / "kernels.cu", text)
        more = [f"-I{include}"] if include is not None else []
        finished = self._processes.run([*command, *more], cwd=folder, limits=LIMITS)
        if not finished.ok or not (folder / "kernels.so").is_file():
            raise SystemExit(f"nvcc failed: {finished.text()[-2000:]}")
        return finished

    def _whole_library(self, kernels: tuple[Kernel, ...]) -> _File:
        with self._processes.private_folder() as folder:
            finished = self.library(render_device(kernels).text, folder)
            code = read_cubin((folder / "kernels.cubin").read_bytes()).kernels
        digests = {kernel.id: code_digest_of([code[symbol] for symbol in symbols(kernel)]) for kernel in kernels}
        return _File(finished.cpu_seconds, digests, finished.peak_memory_bytes)

    def _group(self, kernels: tuple[Kernel, ...]) -> _File:
        outcome = compile_group(kernels, self._target, self._toolchain, self._processes, LIMITS)
        digests: dict[str, str] = {}
        for name, kernel in outcome.outcomes.items():
            if kernel.code_digest is None:
                raise SystemExit(f"a kernel failed: {kernel.log[-2000:]}")
            digests[name] = kernel.code_digest
        made = outcome.artifact
        if made is None:
            raise SystemExit(f"a group failed: {outcome.why[-2000:]}")
        phases = [(phase.name, phase.seconds) for phase in outcome.phases]
        return _File(outcome.cpu_seconds, digests, made.peak_memory_bytes, phases)


def cutlass_headers(named: Path | None) -> Path | None:
    """The folder that holds cutlass/cutlass.h: the named one, of the wheel, of the system; None where there is none."""
    spec = importlib.util.find_spec("cutlass_library")
    of_wheel = [Path(place) / "source/include" for place in (spec.submodule_search_locations or [])] if spec else []
    places = [named] if named else [*of_wheel, Path("/usr/local/cuda/include"), Path("/usr/include")]
    return next((place for place in places if (place / "cutlass/cutlass.h").is_file()), None)


def our_kernel(sheet: Target) -> Kernel:
    """Ours with CUTLASS' tile."""
    op = operator("matmul")
    problem = op.parse(public_shape(CUTLASS_SHAPE))
    values = op.space(problem, sheet, Search(level=0)).by_index(0).as_dict()
    return op.candidate(problem, Schedule.of({**values, **SAME_TILE})).kernel


def cutlass_seconds(headers: Path, ways: Ways, processes: Processes, sheet: Target) -> dict[str, Any]:
    """Medians of three rounds, the two interleaved, one compiler at a time."""
    texts = {"cutlass": CUTLASS, "ours": render_device([our_kernel(sheet)]).text}
    runs: dict[str, list[Finished]] = {name: [] for name in texts}
    for _ in range(CUTLASS_ROUNDS):
        for name, text in texts.items():
            with processes.private_folder() as folder:
                runs[name].append(ways.library(text, folder, headers if name == "cutlass" else None))
    wall = {name: statistics.median(run.wall_seconds for run in own) for name, own in runs.items()}
    cpu = {name: statistics.median(run.cpu_seconds for run in own) for name, own in runs.items()}
    figures: dict[str, Any] = {f"{name}_s": round(seconds, 2) for name, seconds in wall.items()}
    figures |= {f"{name}_cpu_s": round(seconds, 2) for name, seconds in cpu.items()}
    return {**figures, "ratio_cpu": round(cpu["cutlass"] / cpu["ours"], 2), "version": cutlass_version(headers)}


def cutlass_version(headers: Path) -> str:
    text = (headers / "cutlass/version.h").read_text(encoding="utf-8")
    return ".".join(re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH)\s+(\d+)", text))
