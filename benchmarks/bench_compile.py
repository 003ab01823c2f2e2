"""Seconds to compile many kernels: one `.cu` per kernel, hidet's rule, and ours (`compile_ways`), beside the least that
is possible.

Of every operator that is present, the first kernels by index of level 2 of its named public shapes (`CASES`). The ways
are interleaved, round by round, and must produce the same machine code, kernel by kernel.

- `ratio_wall`, `ratio_cpu`, `ratio_hidet`: one file per kernel over ours, in wall and in CPU seconds of all processes;
  hidet's rule over ours. Of the medians over the rounds.
- `ratio_per_candidate`: one file per *candidate* over ours, of one model's problems (`Case.model`), one round.
- `floor_s`: CPU seconds that nvcc's device pass takes for one more kernel (the slope over three sizes of group;
  `floor.r2` says how straight the line is), times the kernels, over the cores.
- `over_floor`, `over_floor_cpu`: ours over it, in wall and in CPU seconds: on a shared machine ours waits for a core.
- `phases`: wall seconds of ours, summed over its files; `memory`: its largest compilers, as many as there are
  processes.
- `cutlass`, where its headers are found: one CUTLASS kernel and one of ours, a file each, nvcc straight to a `.so`.
"""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.compile_ways import Compiled, Ways, cutlass_headers, cutlass_seconds
from benchmarks.keep_result import keep_result, options
from benchmarks.shapes import public_shape, shape_sets
from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators import operator, operators
from codegen.predict.compile_cost import MAX_BYTES
from codegen.search.rules import Rejected
from codegen.search.search import Search
from codegen.targets import Target, target
from workers.compile.toolchain import find_toolchain
from workers.processes.processes import Processes

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


# An operator that does not exist is left out. Half of matmul's kernels run on the CUDA cores, half on tensor cores. The
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


@dataclass(frozen=True)
class Line:
    """A least-squares fit. `r2`: the share of the variance that it explains."""

    slope: float
    intercept: float
    r2: float


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """Through (x, y) with at least two different x."""
    xs, ys = zip(*points, strict=True)
    constant = len(set(ys)) == 1
    return Line(*statistics.linear_regression(xs, ys), r2=1.0 if constant else statistics.correlation(xs, ys) ** 2)


def floor_seconds(line: Line, kernels: int, cores: int) -> float:
    """Wall seconds that the kernels take where every core spends all of its time on the kernels themselves."""
    return line.slope * kernels / cores


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
    if case.model is None:
        return []
    problems = [problem for problem in shape_sets()[case.model] if problem["operator"] == case.operator]
    candidates: list[Candidate] = []
    for problem in problems:
        parsed = operator(case.operator).parse(public_shape(problem["name"]))
        candidates += lower(parsed, sheet, Search(level=LEVEL, limit=limit)).candidates
    return candidates


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
    wall = {name: statistics.median(compiled[name].wall for compiled in rounds) for name in rounds[0]}
    cpu = {name: statistics.median(compiled[name].cpu for compiled in rounds) for name in rounds[0]}
    line = fit_line(list(device.items()))
    floor = floor_seconds(line, kernels, cores)
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
            "cpu_s_per_kernel": round(line.slope, 4),
            "r2": round(line.r2, 4),
            "cpu_s_by_size": {str(size): round(seconds, 2) for size, seconds in device.items()},
        },
        "memory": {"peak_bytes": memory, "budget_bytes": MAX_BYTES},
        "rounds": [{name: round(way.wall, 2) for name, way in compiled.items()} for compiled in rounds],
    }


def per_candidate(ways: Ways, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """One file per candidate against ours, once."""
    kernels = [candidate.kernel for candidate in candidates]
    ours, alone = ways.ours(kernels), ways.alone(kernels)
    require_equal_code({"one file per candidate": alone, "ours": ours})
    return {
        "candidates": len(kernels),
        "kernels": len(set(kernels)),
        "baseline_s": round(alone.wall, 2),
        "ours_s": round(ours.wall, 2),
        "ratio_cpu": round(alone.cpu / ours.cpu, 2),
        "ratio": round(alone.wall / ours.wall, 2),
    }


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
    begins = tuple(arguments.only) or ("",)
    sheet, cores, processes = target(TARGET), len(os.sched_getaffinity(0)), Processes()
    results: dict[str, Any] = {}
    try:
        toolchain = find_toolchain(processes)
        ways = Ways(toolchain, sheet, processes, cores)
        for name, case in CASES.items():
            if case.operator not in operators() or not name.startswith(begins):
                continue
            case = replace(case, kernels=arguments.kernels or case.kernels)
            kernels, candidates = first_kernels(case, sheet)
            rounds = interleaved(ways, kernels, arguments.rounds, name)
            # One group of every fourth kernel, of every second, and of all.
            device = {len(kernels[::step]): ways.device_seconds(kernels[::step]) for step in (4, 2, 1)}
            results[name] = figures(rounds, device, len(kernels), candidates, cores)
            if several := model_candidates(case, sheet, arguments.limit) if arguments.limit else []:
                alone = per_candidate(ways, several)
                results[name] |= {"ratio_per_candidate": alone["ratio"], "per_candidate": alone}
            print(f"{name}: {results[name]}", flush=True)
        headers = cutlass_headers(arguments.cutlass)
        cutlass = cutlass_seconds(headers, ways, processes, sheet) if headers is not None else None
    finally:
        processes.close()
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
