"""Seconds to compile many kernels: one `.cu` per kernel, hidet's rule, and ours, beside the least that is possible.

Of every operator the first kernels by index of level 2 of its named public shapes (`CASES`). The ways
are interleaved, round by round, and must produce the same machine code, kernel by kernel. All start from the same
rendered text and headers, with as many compiler processes as there are cores, and nvcc keeps its intermediate files:

- *alone*: one `.cu` per kernel, nvcc straight to a `.so`;
- *hidet's rule*: the same with groups (`hidet_groups`), whole `.so` each;
- *ours*: what compile workers do: the longest pending kernels as long as pays (`Pending`), both uniqueness assertions,
  a cubin, and a `.so` with launch code, which the others do not have.

Figures:

- `ratio_wall`, `ratio_cpu`, `ratio_hidet`: one file per kernel over ours, in wall and in CPU seconds of all processes;
  hidet's rule over ours. Of the medians over the rounds.
- `ratio_per_candidate`: one file per *candidate* over ours, of one model's problems (`Case.model`), interleaved too.
- `floor_s`: CPU seconds that nvcc's device pass takes for one more kernel (the slope over three sizes of group;
  `floor.r2` says how straight the line is), times the kernels, over the cores.
- `over_floor`, `over_floor_cpu`: ours over it, in wall and in CPU seconds: on a shared machine ours waits for a core.
- `phases`: wall seconds of ours, summed over its files; `memory`: its largest compilers, as many as there are
  processes.
- `cutlass`, where its headers are found: one CUTLASS kernel and one of ours, a file each, nvcc straight to a `.so`.
"""

import importlib.util
import math
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.keep_result import keep_result, options
from benchmarks.shapes import begins, public_shape, shape_sets
from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators import operator
from codegen.predict.compile_cost import (
    FIXED_SECONDS,
    MAX_BYTES,
    MAX_KERNELS,
    MAX_SECONDS,
    ROUNDING,
    file_seconds,
    kernel_seconds,
)
from codegen.search.rules import Rejected
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.targets import Target, target
from codegen.text.cubin import code_digest_of, read_cubin
from codegen.text.render_group import render_device, symbols
from workers.compile.compile_file import FileCompiler
from workers.compile.compile_group import compile_group
from workers.compile.toolchain import DEVICE_FLAGS, Toolchain, find_toolchain
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


class Pending:
    """Kernels, each once, that worker threads take as `storage.transitions.take_work` has them: the next file is made
    of what is left when a worker is free. An iterator of files."""

    def __init__(self, kernels: Iterable[Kernel], workers: int) -> None:
        self._longest_first = sorted(set(kernels), key=lambda kernel: (-kernel_seconds(kernel), kernel.id))
        self._workers = workers
        self._ends: dict[int, float] = {}  # of the files that are compiled now, by thread, as predicted
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[tuple[Kernel, ...]]:
        return self

    def __next__(self) -> tuple[Kernel, ...]:
        with self._lock:
            self._ends.pop(threading.get_ident(), None)
            if not self._longest_first:
                raise StopIteration
            pending = sum(map(kernel_seconds, self._longest_first))
            now = time.monotonic()
            busy = [max(0.0, end - now) for end in self._ends.values()]
            longest = min(MAX_SECONDS, file_seconds(pending, self._workers, busy))
            sums = accumulate(map(kernel_seconds, self._longest_first[:MAX_KERNELS]), initial=FIXED_SECONDS)
            count = max(1, sum(seconds <= longest + ROUNDING for seconds in sums) - 1)
            file, self._longest_first = tuple(self._longest_first[:count]), self._longest_first[count:]
            self._ends[threading.get_ident()] = now + FIXED_SECONDS + sum(map(kernel_seconds, file))
            return file


class Ways:
    """All ways on one machine, for one target. Every kernel of a set must compile: a failure ends the benchmark."""

    def __init__(self, toolchain: Toolchain, sheet: Target, processes: Processes, cores: int) -> None:
        self._toolchain = toolchain
        self._target = sheet
        self._processes = processes
        self.cores = cores

    def alone(self, kernels: Sequence[Kernel]) -> Compiled:
        """A file for each of `kernels`, also where one comes twice."""
        return self._timed(self._whole_library, lambda: [(kernel,) for kernel in kernels])

    def hidet(self, kernels: Sequence[Kernel]) -> Compiled:
        parts = hidet_groups(len(kernels), self.cores)
        return self._timed(self._whole_library, lambda: [tuple(kernels[index] for index in part) for part in parts])

    def ours(self, kernels: Sequence[Kernel]) -> Compiled:
        """Repeated kernels count once, as in the service."""
        return self._timed(self._group, lambda: Pending(kernels, self.cores))

    def device_seconds(self, kernels: Sequence[Kernel]) -> float:
        """CPU seconds of nvcc's device pass over one group; mean over as many concurrent runs as there are cores."""
        return self._timed(self._device_pass, lambda: [tuple(kernels)] * self.cores).cpu / self.cores

    def _device_pass(self, kernels: tuple[Kernel, ...]) -> _File:
        rendered = render_device(kernels)
        with self._processes.private_folder() as folder:
            compiler = FileCompiler(folder, self._toolchain, self._processes, LIMITS)
            compiler.compile_device(rendered.text, self._target.name, rendered.symbols)
        return _File(compiler.cpu_seconds, {}, compiler.peak_memory_bytes)

    def _timed(
        self, compile_one: Callable[[tuple[Kernel, ...]], _File], grouped: Callable[[], Iterable[tuple[Kernel, ...]]]
    ) -> Compiled:
        """Grouping counts; one worker for each core takes the next file."""
        started = time.perf_counter()
        waiting = iter(grouped())

        def work(_: int) -> list[_File]:
            return [compile_one(file) for file in waiting]

        with ThreadPoolExecutor(self.cores) as pool:
            files = [file for own in pool.map(work, range(self.cores)) for file in own]
        wall = time.perf_counter() - started
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
        nvcc, host_compiler = self._toolchain.device_compiler.path, self._toolchain.host_compiler
        command = [str(nvcc), "-ccbin", str(host_compiler), *architecture, *flags]
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


def cutlass_seconds(headers: Path, ways: Ways, processes: Processes, sheet: Target) -> dict[str, Any]:
    """Medians of three rounds, ours with CUTLASS' tile, the two interleaved, one compiler at a time."""
    op = operator("matmul")
    problem = op.parse(public_shape(CUTLASS_SHAPE))
    values = op.space(problem, sheet, Search(level=0)).by_index(0).as_dict()
    ours = op.candidate(problem, Schedule.of({**values, **SAME_TILE})).kernel
    texts = {"cutlass": CUTLASS, "ours": render_device([ours]).text}
    runs: dict[str, list[Finished]] = {name: [] for name in texts}
    for _ in range(CUTLASS_ROUNDS):
        for name, text in texts.items():
            with processes.private_folder() as folder:
                runs[name].append(ways.library(text, folder, headers if name == "cutlass" else None))
    wall = {name: statistics.median(run.wall_seconds for run in own) for name, own in runs.items()}
    cpu = {name: statistics.median(run.cpu_seconds for run in own) for name, own in runs.items()}
    figures: dict[str, Any] = {f"{name}_s": round(seconds, 2) for name, seconds in wall.items()}
    figures |= {f"{name}_cpu_s": round(seconds, 2) for name, seconds in cpu.items()}
    version = (headers / "cutlass/version.h").read_text(encoding="utf-8")
    numbers = re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH)\s+(\d+)", version)
    return {**figures, "ratio_cpu": round(cpu["cutlass"] / cpu["ours"], 2), "version": ".".join(numbers)}


TARGET = "sm_90a"
LEVEL = 2
CANDIDATES_PER_PROBLEM = 64


@dataclass(frozen=True)
class Case:
    """The first `kernels` of the named shapes together. `model`: its problems are compiled by candidate too."""

    operator: str
    shapes: tuple[str, ...]
    kernels: int
    model: str | None = None


# Half of matmul's kernels run on the CUDA cores, half on tensor cores. The
# latter are measured alone too: each takes nvcc twice as long, so the fixed cost of a file, which grouping saves, is a
# smaller part of theirs.
CASES = {
    "matmul": Case("matmul", ("square/float32_1024", "square/float16_1024"), 96, "bert_base_b8_s128"),
    "matmul/float16": Case("matmul", ("square/float16_1024",), 48),
    "conv2d": Case("conv2d", ("resnet18_cifar10/first", "resnet18/b8/s1_3x3"), 64, "resnet18_b8"),
    "conv2d_wgrad": Case("conv2d_wgrad", ("resnet18_cifar10/first/wgrad", "resnet18/b8/s1_3x3/wgrad"), 64),
    "conv2d_dgrad": Case("conv2d_dgrad", ("resnet18/b8/s1_down3x3/dgrad", "resnet18/b8/s1_3x3/dgrad"), 48),
    "reduce": Case("reduce", ("mnist/b100_conv1", "rowsum", "rowmax"), 48),
    "softmax": Case("softmax", ("bert_base/scores", "llama3_8b/vocabulary"), 24),
    "layer_norm": Case("layer_norm", ("bert_base/layer_norm",), 24),
    "rms_norm": Case("rms_norm", ("llama3_8b/rms_norm",), 24),
    "masked_activation": Case("masked_activation", ("partial/relu", "partial/gelu_bytes"), 24),
    "attention": Case("attention", ("bert_base/attn", "llama3_8b/prefill2048"), 24, "bert_base_b8_s128"),
}


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of the least-squares line through (x, y) with at least two different x: its slope, and R², the share of the
    variance that it explains."""
    xs, ys = zip(*points, strict=True)
    r2 = 1.0 if len(set(ys)) == 1 else statistics.correlation(xs, ys) ** 2
    return statistics.linear_regression(xs, ys).slope, r2


def first_kernels(case: Case, sheet: Target) -> tuple[list[Kernel], int]:
    """The case's kernels, shape by shape, and how many candidates stand before the next one."""
    op = operator(case.operator)
    kernels: dict[Kernel, None] = {}
    candidates = 0
    for number, name in enumerate(case.shapes):
        of_shape: set[Kernel] = set()
        problem = op.parse(public_shape(name))
        for schedule in op.space(problem, sheet, Search(level=LEVEL)):
            if isinstance(op.rules(problem, schedule, sheet), Rejected):
                continue
            kernel = op.candidate(problem, schedule).kernel
            if kernel not in of_shape and len(of_shape) == (case.kernels + number) // len(case.shapes):
                break
            of_shape.add(kernel)
            kernels[kernel] = None
            candidates += 1
    return list(kernels), candidates


def model_candidates(case: Case, sheet: Target, limit: int) -> list[Candidate]:
    """Of all problems of the case's model that are of its operator."""
    shapes = shape_sets()[case.model] if case.model is not None else []
    names = [problem["name"] for problem in shapes if problem["operator"] == case.operator]
    problems = (operator(case.operator).parse(public_shape(name)) for name in names)
    search = Search(level=LEVEL, limit=limit)
    return [candidate for problem in problems for candidate in lower(problem, sheet, search).candidates]


def require_equal_code(ways: Mapping[str, Compiled]) -> None:
    """Ends the benchmark where two ways produced different machine code for a kernel."""
    (first, expected), *others = ways.items()
    for name, way in others:
        differing = sorted(kernel for kernel, code in expected.digests.items() if way.digests.get(kernel) != code)
        if differing:
            raise SystemExit(
                f"the code of {len(differing)} kernels differs between {first} and {name}: {differing[:3]}"
            )


def interleaved(ways: Ways, kernels: Sequence[Kernel], rounds: int, case: str) -> list[dict[str, Compiled]]:
    """Every way, round by round."""
    results = []
    for number in range(rounds):
        compiled = {"baseline": ways.alone(kernels), "hidet_rule": ways.hidet(kernels), "ours": ways.ours(kernels)}
        require_equal_code(compiled)
        results.append(compiled)
        seconds = ", ".join(f"{name} {way.wall:.1f} s" for name, way in compiled.items())
        print(f"{case}, round {number + 1}: {seconds}", flush=True)
    return results


def figures(
    rounds: Sequence[Mapping[str, Compiled]], device: Mapping[int, float], kernels: int, candidates: int, cores: int
) -> dict[str, Any]:
    """Of one case, without candidates and CUTLASS. `device`: seconds of a group's device pass by its kernels."""
    wall, cpu = medians(rounds)
    slope, r2 = fit_line(list(device.items()))
    floor = slope * kernels / cores  # where every core spends all of its time on the kernels themselves
    middle = sorted(rounds, key=lambda compiled: compiled["ours"].wall)[len(rounds) // 2]["ours"]
    memory = max(sum(sorted(compiled["ours"].files)[-cores:]) for compiled in rounds)
    return {
        "kernels": kernels,
        "candidates": candidates,
        **{f"{name}_s": round(seconds, 2) for name, seconds in wall.items()},
        "ratio_wall": round(wall["baseline"] / wall["ours"], 2),
        "ratio_cpu": round(cpu["baseline"] / cpu["ours"], 2),
        "ratio_hidet": round(wall["hidet_rule"] / wall["ours"], 2),
        "floor_s": round(floor, 2),
        "over_floor": round(wall["ours"] / floor, 2),
        "over_floor_cpu": round(cpu["ours"] / cores / floor, 2),
        "phases": {name: round(seconds, 2) for name, seconds in sorted(middle.phases.items())},
        "cpu_s": {name: round(seconds, 2) for name, seconds in cpu.items()},
        "groups": len(middle.files),
        "floor": {
            "cpu_s_per_kernel": round(slope, 4),
            "r2": round(r2, 4),
            "cpu_s_by_size": {str(size): round(seconds, 2) for size, seconds in device.items()},
        },
        "memory": {"peak_bytes": memory, "budget_bytes": MAX_BYTES},
        "rounds": [{name: round(way.wall, 2) for name, way in compiled.items()} for compiled in rounds],
    }


def per_candidate(ways: Ways, candidates: Sequence[Candidate], rounds: int) -> dict[str, Any]:
    """One file per candidate against ours, round by round; medians."""
    kernels = [candidate.kernel for candidate in candidates]
    results = []
    for _ in range(rounds):
        compiled = {"ours": ways.ours(kernels), "one file per candidate": ways.alone(kernels)}
        require_equal_code(compiled)
        results.append(compiled)
    wall, cpu = medians(results)
    return {
        "candidates": len(kernels),
        "kernels": len(set(kernels)),
        "baseline_s": round(wall["one file per candidate"], 2),
        "ours_s": round(wall["ours"], 2),
        "ratio_cpu": round(cpu["one file per candidate"] / cpu["ours"], 2),
        "ratio": round(wall["one file per candidate"] / wall["ours"], 2),
        "rounds": [{name: round(way.wall, 2) for name, way in compiled.items()} for compiled in results],
    }


def medians(rounds: Sequence[Mapping[str, Compiled]]) -> tuple[dict[str, float], dict[str, float]]:
    """Wall and CPU seconds of each way over the rounds."""
    wall = {name: statistics.median(compiled[name].wall for compiled in rounds) for name in rounds[0]}
    return wall, {name: statistics.median(compiled[name].cpu for compiled in rounds) for name in rounds[0]}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each way compiles the set")
    parser.add_argument("--kernels", type=int, help="per case; default: as the cases say")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name begins so; default: all")
    parser.add_argument("--limit", type=int, default=CANDIDATES_PER_PROBLEM, help="candidates of each problem; 0: none")
    parser.add_argument(
        "--cutlass", type=Path, help="the folder that holds cutlass/cutlass.h; default: where it is found"
    )
    arguments = parser.parse_args()
    whole = arguments.kernels is None and arguments.limit == CANDIDATES_PER_PROBLEM
    sheet, cores = target(TARGET), len(os.sched_getaffinity(0))
    results: dict[str, Any] = {}
    with closing(Processes()) as processes:
        toolchain = find_toolchain(processes)
        ways = Ways(toolchain, sheet, processes, cores)
        for name, case in CASES.items():
            if not begins(name, arguments.only):
                continue
            case = replace(case, kernels=arguments.kernels or case.kernels)
            kernels, candidates = first_kernels(case, sheet)
            rounds = interleaved(ways, kernels, arguments.rounds, name)
            # One group of every fourth kernel, of every second, and of all.
            device = {len(kernels[::step]): ways.device_seconds(kernels[::step]) for step in (4, 2, 1)}
            results[name] = figures(rounds, device, len(kernels), candidates, cores)
            if several := model_candidates(case, sheet, arguments.limit) if arguments.limit else []:
                alone = per_candidate(ways, several, arguments.rounds)
                results[name] |= {"ratio_per_candidate": alone["ratio"], "per_candidate": alone}
            print(f"{name}: {results[name]}", flush=True)
        headers = cutlass_headers(arguments.cutlass)
        cutlass = cutlass_seconds(headers, ways, processes, sheet) if headers is not None else None
    result = {
        "benchmark": "-".join(["compile", *arguments.only]),
        "operators": results,
        **({"cutlass": cutlass} if cutlass else {}),
        "target": sheet.name,
        "processes": cores,
        "toolchain": dict(toolchain.versions),
    }
    keep_result(result, keep=whole and not arguments.no_file)


if __name__ == "__main__":
    main()
