"""How far kernels are from float64, by dtype and length of the sum, with other ways to add the same products beside
(docs/accuracy.md).

`python -m benchmarks.bench_accuracy [--problem JSON [--tunables JSON] | --job JOB]`; `make bench-accuracy` keeps the
result. Ours is the kernel's own source, run on the CPU (`codegen/device/cpu`). Beside it, on the same inputs, where
they have the problem: `numpy` (matmul), `torch` on the CPU, `vendor` on a GPU, and `one product left out`, a wrong
kernel, exact but for the last product of each sum.

`max`: the largest |result - float64|; `rms`: its root mean square; both over the root mean square of the float64
results. `of_bound`: the most of its own bound that an element used, above 1 is called wrong. `integers_wrong`: the
share of outputs that differ where sums are exact, of as many products.
"""

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.keep_result import keep_result, options
from codegen.arrays import as_float64
from codegen.dtypes import dtype
from codegen.kernel import Candidate
from codegen.lower import lower
from codegen.operator import InputKind
from codegen.operators import operator
from codegen.operators.conv2d_wgrad.problem import Conv2dWgradProblem
from codegen.operators.convolution.problem import Convolution
from codegen.operators.matmul.problem import MatmulProblem
from codegen.plan.verification_plan import check_output
from codegen.problem import Problem
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.targets import target
from cukiln.client import Client
from cukiln.errors import CukilnError
from workers.compile.toolchain import find_toolchain
from workers.cpu.build import build_cpu
from workers.cpu.library import CpuLibrary
from workers.gpu.interface import DEFAULT_MODULE, GpuError, GpuMissing, list_devices, open_gpu
from workers.processes.processes import Limits, Processes

LIMITS = Limits(wall_seconds=600, cpu_seconds=600, memory_bytes=8 << 30, output_bytes=256 << 20)
TARGET, SEED, CPU_SECONDS = "sm_90a", 1, 600.0
LENGTHS = (576, 4_608, 25_088)  # c r s of two layers; n p q of a filter gradient at batch 8
TYPES: tuple[dict[str, Any], ...] = (
    {"dtype": "float32"},
    {"dtype": "float32", "allow_tf32": True},
    {"dtype": "float16", "out_dtype": "float32"},
    {"dtype": "bfloat16", "out_dtype": "float32"},
    {"dtype": "float16"},
    {"dtype": "bfloat16"},
)
WHOLE = {"split": ["none"]}
# Few channels are enough: each output is computed as with many. The image has its padding in it, so that every sum has
# every pixel.
GRADIENT: dict[str, Any] = {"operator": "conv2d_wgrad", "n": 8, "h": 58, "w": 58, "c": 16, "k": 16, "r": 3, "s": 3}

Inputs = Mapping[str, np.ndarray[Any, Any]]
Way = Callable[[Problem, Inputs], "np.ndarray[Any, Any] | None"]


def default_problems() -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Problems with the tunables that are asked for: the longest sums, which level 0 divides, also whole."""
    for fields in TYPES:
        gradient = {**GRADIENT, **fields}
        yield gradient, None
        if "allow_tf32" not in fields and "out_dtype" not in fields:
            yield gradient, WHOLE
        for length in LENGTHS:
            problem = {"operator": "matmul", "m": 64, "n": 64, "k": length, "layout": "tn", **fields}
            yield problem, None
            if length == LENGTHS[-1]:
                yield problem, WHOLE


def chosen(fields: Mapping[str, Any], tunables: Mapping[str, Any] | None) -> Candidate:
    """The schedule of level 0, or the first that has the tunables."""
    search = {"tunables": tunables, "limit": 400} if tunables else {"level": 0}
    problem = operator(str(fields["operator"])).parse(fields)
    lowered = lower(problem, target(TARGET), Search.model_validate(search))
    if not lowered.candidates:
        raise SystemExit(f"{fields} has no schedule with {tunables}: {lowered.why_empty}")
    return lowered.candidates[0]


class OnCpu:
    """A candidate's kernel, built for the CPU, on any extents."""

    def __init__(self, candidate: Candidate, library: Path) -> None:
        self._candidate = candidate
        self._library = CpuLibrary(library)

    def __call__(self, problem: Problem, inputs: Inputs) -> np.ndarray[Any, Any]:
        own, kernel = operator(problem.operator), self._candidate.kernel
        launch = own.launch_values(self._candidate.schedule)
        try:
            tensors = self._library.allocate(own.operands(problem))
            workspace = self._library.workspace(kernel.namespace, own.integers(problem), launch)
            for tensor in tensors:
                if tensor.operand.role == "in":
                    tensor.fill(inputs[tensor.operand.name])
            (out,) = (tensor for tensor in tensors if tensor.operand.role == "out")
            outcome = self._library.run(
                kernel.namespace, tensors, workspace, integers=own.integers(problem), launch=launch,
                scalars=own.scalars(problem), order="ascending", seed=SEED, exact=False, cpu_seconds=CPU_SECONDS,
            )  # fmt: skip
            if outcome.status != "ok":
                raise SystemExit(f"the kernel did not run: {outcome.message}")
            return as_float64(out.view.copy(), out.operand.dtype)
        finally:
            self._library.free()


def by_numpy(problem: Problem, inputs: Inputs) -> np.ndarray[Any, Any] | None:
    if not isinstance(problem, MatmulProblem) or problem.epilogue:
        return None
    a, b = _factors(problem, inputs, np.float32)
    return as_float64(np.matmul(a, b).astype(dtype(problem.out_dtype).numpy), problem.out_dtype)


def without_last_product(problem: Problem, inputs: Inputs) -> np.ndarray[Any, Any] | None:
    if isinstance(problem, Conv2dWgradProblem) and not problem.epilogue and problem.padded == (problem.h, problem.w):
        dy = inputs["dy"].copy()
        dy[(-1, -1, -1) if problem.channels_last else (-1, slice(None), -1, -1)] = 0  # the last pixel of the last image
        return operator(problem.operator).reference(problem, {**inputs, "dy": dy})[0]
    if not isinstance(problem, MatmulProblem) or problem.epilogue:
        return None
    a, b = _factors(problem, inputs, np.float64)
    return np.matmul(a[..., :-1], b[..., :-1, :])


def by_torch(problem: Problem, inputs: Inputs) -> np.ndarray[Any, Any] | None:
    p: Any = problem
    if importlib.util.find_spec("torch") is None or not isinstance(problem, (MatmulProblem, Convolution)):
        return None
    if p.epilogue or p.out_dtype not in (p.dtype, "float32"):
        return None
    import torch

    def tensor(values: np.ndarray[Any, Any]) -> Any:
        # PyTorch has no result wider than its inputs; widening them is exact.
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(getattr(torch, p.out_dtype))

    if isinstance(problem, MatmulProblem):
        made = torch.matmul(*map(tensor, _factors(problem, inputs, np.float32)))
    else:
        last = problem.layout == "nhwc"
        # Elements that no window reads are NaN.
        finite = {name: np.nan_to_num(values.astype(np.float32)) for name, values in inputs.items()}
        of = {name: tensor(values.transpose(0, 3, 1, 2) if last else values) for name, values in finite.items()}
        # Its own padding is equal on both sides.
        equal = all(before == behind for before, behind in p.padding)
        (top, bottom), (left, right) = ((0, 0), (0, 0)) if equal else p.padding
        options = {"stride": p.stride, "padding": p.corner if equal else 0, "dilation": p.dilation, "groups": p.groups}
        if "x" in of:
            of["x"] = torch.nn.functional.pad(of["x"], (left, right, top, bottom))
        if p.operator == "conv2d":
            made = torch.nn.functional.conv2d(of["x"], of["w"], **options)
        elif p.operator == "conv2d_dgrad":
            extents = (p.n, p.c, top + p.h + bottom, left + p.w + right)
            made = torch.nn.grad.conv2d_input(extents, of["w"], of["dy"], **options)
            made = made[:, :, top : top + p.h, left : left + p.w]
        else:
            made = torch.nn.grad.conv2d_weight(of["x"], (p.k, p.group_channels, p.r, p.s), of["dy"], **options)
        made = made.permute(0, 2, 3, 1) if last else made
    return made.to(getattr(torch, p.out_dtype)).to(torch.float64).numpy()


def by_vendor(problem: Problem, inputs: Inputs) -> np.ndarray[Any, Any] | None:
    """Raises GpuFault."""
    try:
        gpu = open_gpu(DEFAULT_MODULE, list_devices(DEFAULT_MODULE)[0].uuid)
    except GpuMissing:
        return None
    offered = gpu.vendor(problem, inputs, 1)
    if not offered:
        return None
    offered[0].run(0)
    gpu.synchronize()
    return np.asarray(gpu.to_host(offered[0].result(0)))


def _factors(problem: MatmulProblem, inputs: Inputs, kind: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    a, b = (inputs[name].astype(kind) for name in ("a", "b"))
    return (
        a.swapaxes(-1, -2) if problem.a_transposed else a,
        b.swapaxes(-1, -2) if problem.b_transposed else b,
    )


WAYS: dict[str, Way] = {
    "numpy": by_numpy,
    "torch": by_torch,
    "vendor": by_vendor,
    "one product left out": without_last_product,
}


def figures(problem: Problem, ways: Mapping[str, Way]) -> dict[str, dict[str, float]]:
    """Of every way that computes the problem."""
    own, errors = operator(problem.operator), {}
    kinds: tuple[InputKind, ...] = ("normal", "integer")
    cases = {kind: own.make_inputs(problem, kind, np.random.default_rng(SEED)) for kind in kinds}
    references = {kind: own.reference(problem, cases[kind]) for kind in kinds}
    expected, bound = references["normal"]
    size = float(np.sqrt(np.mean(expected**2)))
    for name, way in ways.items():
        out = way(problem, cases["normal"])
        whole = way(problem, cases["integer"])
        if out is None or whole is None:
            continue
        verdict = check_output(out, expected, bound, exact=False)
        errors[name] = {
            "max": verdict.max_error / size,
            "rms": float(np.sqrt(np.mean((out - expected) ** 2))) / size,
            "of_bound": verdict.max_ratio,
            "integers_wrong": check_output(whole, *references["integer"], exact=True).wrong / whole.size,
        }
    return errors


def winners(job: str, url: str | None) -> Iterator[tuple[str, Candidate, Problem]]:
    """The name of each problem of a job, its winner, and the problem of its verification with the longest sums."""
    with Client(url) as client:
        for report in client.job(job).problems:
            if report.winner is not None:
                own = operator(report.operator)
                candidate = own.candidate(own.parse(report.problem), Schedule.of(report.winner.schedule))
                longest = max(own.test_problems(candidate.kernel), key=lambda problem: problem.sum_length or 0)
                yield report.name, candidate, longest


def report(candidate: Candidate, problem: Problem, processes: Processes) -> dict[str, Any]:
    """The figures of the candidate's kernel on a problem that it computes."""
    toolchain = find_toolchain(processes)
    with processes.private_folder("accuracy") as folder:
        build = build_cpu([candidate.kernel], toolchain, processes, LIMITS, folder=folder)
        if build.errors:
            raise SystemExit(f"the kernel does not compile: {build.errors}")
        ((library, _),) = build.libraries
        errors = figures(problem, {"ours": OnCpu(candidate, library), **WAYS})
    schedule = candidate.schedule.as_dict()
    return {"problem": problem.canonical(), "sum_length": problem.sum_length, "schedule": schedule, "figures": errors}


def show(row: Mapping[str, Any]) -> None:
    p, schedule = row["problem"], row["schedule"]
    slices = f", {schedule['split_k']} slices" if schedule.get("split_k", 1) != 1 else ""
    tf32 = " as tf32" if p.get("allow_tf32") else ""
    name = f"{row['name']}: " if row["name"] else ""
    print(f"\n{name}{p['operator']} {p['dtype']}{tf32} to {p['out_dtype']}, sums of {row['sum_length']}{slices}")
    print(f"  {'':22}{'max':>10}{'rms':>10}{'of bound':>10}{'integers wrong':>16}")
    for name, errors in row["figures"].items():
        numbers = (
            f"{errors['max']:10.1e}{errors['rms']:10.1e}{errors['of_bound']:10.2g}{errors['integers_wrong']:16.1%}"
        )
        print(f"  {name:22}{numbers}", flush=True)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--problem", type=json.loads, help="a problem of any operator, as in a job request")
    parser.add_argument("--tunables", type=json.loads, help="lists of values by tunable, as in a search")
    parser.add_argument("--job", help="its winners instead, on reduced extents")
    parser.add_argument("--url", help="of the service that has the job; default: CUKILN_URL, else the local one")
    arguments = parser.parse_args()
    cases: Iterator[tuple[str, Candidate, Problem]]
    if arguments.job:
        cases = winners(arguments.job, arguments.url)
    else:
        problems = [(arguments.problem, arguments.tunables)] if arguments.problem else default_problems()
        cases = (("", candidate, candidate.problem) for candidate in (chosen(*problem) for problem in problems))
    rows = []
    with closing(Processes()) as processes:
        for name, candidate, problem in cases:
            rows.append({"name": name, **report(candidate, problem, processes)})
            show(rows[-1])
    keep = not (arguments.no_file or arguments.job)
    keep_result({"benchmark": "accuracy", "target": TARGET, "rows": rows}, keep=keep)


if __name__ == "__main__":
    try:
        main()
    except (GpuError, CukilnError) as error:
        raise SystemExit(str(error)) from error
