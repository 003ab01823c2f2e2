"""The cost of CPU verification: one-core CPU seconds of a candidate's whole verification plan; g++ is given apart. It
pins itself, and so all that it starts, to one core. The candidates are level-2 samples of public shapes, always the
same, each with a kernel of its own (`FAMILIES`).

- `seconds_per_candidate`: all that the processes which run kernels used, with the start of what forks them, divided by
  the candidates on tensor cores.
- `plan_s_*`: the verification plan of one candidate alone, without the start of the process, which a group shares.
- `ptx_seconds_per_winner`: the plan on a kernel's own PTX, g++ included; without nvcc, which a winner's build has run
  anyway, and without what runs PTX, which a process compiles once.
- `gpp_s_per_candidate`: g++ for the family in one group; `gpp_s_alone`: the peer, the same kernels, one g++ call each.
"""

import math
import os
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from benchmarks.keep_result import keep_result, options
from benchmarks.shapes import public_shape
from codegen.kernel import Kernel
from codegen.lower import lower
from codegen.operators import operator
from codegen.search.search import Search
from codegen.targets import target
from workers.compile.toolchain import Toolchain, find_toolchain
from workers.cpu.build import build_cpu
from workers.cpu.ptx import PtxBuilder, PtxRequest, verify_ptx
from workers.cpu.verify import CpuVerdict, verify_on_cpu
from workers.processes.processes import Limits, Processes

LIMITS = Limits(wall_seconds=600, cpu_seconds=600, memory_bytes=8 << 30, output_bytes=256 << 20)
LIMIT_SECONDS, SIMT_PLAN_LIMIT_SECONDS, PTX_LIMIT_SECONDS = 0.5, 0.25, 2.0
TARGET = "sm_90a"
ALONE = 4  # kernels of a family that g++ also compiles one at a time
WINNERS = 4  # that are run from their PTX
_BIAS_GELU = [{"op": "bias", "axis": "n"}, {"op": "gelu"}]
_FP32 = {"dtype": "float32", "out_dtype": "float32"}
_SPLITS = ("workspace", "atomic", "stream")


@dataclass(frozen=True)
class Family:
    """A public shape with `changes`; `splits`: the only values of the tunable `split`, where given."""

    shape: str
    changes: Mapping[str, Any]
    splits: tuple[str, ...] = ()
    tensor_cores: bool = True


FAMILIES = {
    "float16": Family("bert_base/ffn1", {"epilogue": _BIAS_GELU}, ("none",)),
    "bfloat16": Family("llama3_8b/qkv_m512", {}, ("none",)),
    "tf32": Family("square/float32_2048", {"allow_tf32": True}, ("none",)),
    "int8": Family("bert_base/ffn2", {"dtype": "int8", "acc_dtype": "int32", "out_dtype": "int32"}, ("none",)),
    "split": Family("llama3_8b/down_m16", {}, _SPLITS),
    "conv2d": Family("resnet18/b8/s1_3x3", {"dtype": "float16"}),
    "conv2d_wgrad": Family("resnet18/b8/s1_3x3/wgrad_fp16", {}),
    "attention": Family("bert_base/attn", {}),
    "float32": Family("bert_base/ffn1", {**_FP32, "epilogue": _BIAS_GELU}, tensor_cores=False),
}


@dataclass(frozen=True)
class Verified:
    """One family's verdicts, and CPU seconds of all of it: `children` are the processes that ran kernels, `gpp` g++."""

    verdicts: tuple[CpuVerdict, ...]
    children: float
    gpp: float

    @property
    def plans(self) -> list[float]:
        """CPU seconds of each candidate's verification plan alone."""
        return [verdict.cpu_seconds - verdict.details["build_seconds"]["cpu"] for verdict in self.verdicts]


def sample(family: Family, count: int) -> list[Kernel]:
    """Distinct kernels of the level-2 space, always the same ones, evenly from the ways to split k."""
    fields = {**public_shape(family.shape), **family.changes}
    own = operator(fields["operator"])
    lowered = lower(own.parse(fields), target(TARGET), Search(level=2, limit=40 * count, seed=1))
    kernels = list(dict.fromkeys(candidate.kernel for candidate in lowered.candidates))
    if not family.splits:
        return kernels[:count]
    by_split = {split: [k for k in kernels if k.tunables.get("split") == split] for split in family.splits}
    members = [kernels for kernels in by_split.values() if kernels]
    share = math.ceil(count / len(members))
    return [kernel for kernels in members for kernel in kernels[:share]][:count]


def verify(kernels: Sequence[Kernel], toolchain: Toolchain) -> Verified:
    """Build and verify them as a worker does, in processes of their own: what these used is known once they ended."""
    before = _children_seconds()
    with closing(Processes()) as processes:
        verdicts = verify_on_cpu(kernels, toolchain, processes, LIMITS, seed=1, sums=target(TARGET).tensor_sums)
    for verdict in verdicts:
        if verdict.verdict != "ok":  # a run that ends early is no measure of one that does not
            raise SystemExit(f"kernel {verdict.kernel_id} is {verdict.verdict}: {verdict.message}")
    gpp = sum(verdict.details["build_seconds"]["cpu"] for verdict in verdicts)
    return Verified(tuple(verdicts), _children_seconds() - before - gpp, gpp)


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def one_by_one(kernels: Sequence[Kernel], toolchain: Toolchain, processes: Processes) -> float:
    """CPU seconds of g++ per kernel where each has a file of its own."""
    spent = 0.0
    for kernel in kernels:
        with processes.private_folder() as folder:
            spent += build_cpu([kernel], toolchain, processes, LIMITS, folder=folder).cpu_seconds
    return spent / len(kernels)


def from_ptx(kernels: Sequence[Kernel], toolchain: Toolchain, processes: Processes) -> list[float]:
    """CPU seconds of each kernel's PTX, translated, built and run."""
    request = PtxRequest(TARGET, 1, target(TARGET).tensor_sums)
    with processes.private_folder() as folder:
        ptx = PtxBuilder(folder, toolchain, processes, LIMITS).ptx_of(kernels, target(TARGET).architecture)
    verify_ptx(kernels[:1], request, toolchain, processes, LIMITS, ptx=ptx)  # compiles what runs PTX
    verdicts = verify_ptx(kernels, request, toolchain, processes, LIMITS, ptx=ptx)
    for verdict in verdicts:
        if verdict.verdict != "ok":
            raise SystemExit(f"the PTX of kernel {verdict.kernel_id} is {verdict.verdict}: {verdict.message}")
    return [verdict.cpu_seconds for verdict in verdicts]


def figures(families: Sequence[Verified]) -> dict[str, Any]:
    """Over one family or several."""
    plans = sorted(seconds for family in families for seconds in family.plans)
    count = len(plans)
    return {
        "candidates": count,
        "seconds_per_candidate": round(sum(family.children for family in families) / count, 4),
        "plan_s_median": round(statistics.median(plans), 4),
        "plan_s_p90": round(plans[math.ceil(0.9 * count) - 1], 4),
        "plan_s_worst": round(plans[-1], 4),
        "gpp_s_per_candidate": round(sum(family.gpp for family in families) / count, 4),
    }


def measure(names: Sequence[str], count: int) -> dict[str, Any]:
    start = time.perf_counter()
    verified: dict[str, Verified] = {}
    families: dict[str, Any] = {}
    of_ptx: list[float] = []
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # of this process and those that it starts
    with closing(Processes()) as processes:
        toolchain = find_toolchain(processes)
        for name in names:
            kernels = sample(FAMILIES[name], count)
            verified[name] = verify(kernels, toolchain)
            alone = one_by_one(kernels[:ALONE], toolchain, processes)
            winners = from_ptx(kernels[:WINNERS], toolchain, processes)
            of_ptx += winners
            families[name] = {
                **figures([verified[name]]),
                "ptx_seconds_per_winner": round(statistics.mean(winners), 4),
                "gpp_s_alone": round(alone, 4),
            }
            print(f"{name}: {families[name]}", flush=True)
    tensor = [family for name, family in verified.items() if FAMILIES[name].tensor_cores]
    simt = [family for name, family in verified.items() if not FAMILIES[name].tensor_cores]
    return {
        "benchmark": "verify",
        **(figures(tensor) if tensor else {}),
        "ptx_seconds_per_winner": round(statistics.mean(of_ptx), 4),
        "ptx_s_worst": round(max(of_ptx), 4),
        "ptx_limit_seconds": PTX_LIMIT_SECONDS,
        "limit_seconds": LIMIT_SECONDS,
        "cuda_cores": {**figures(simt), "plan_s_limit": SIMT_PLAN_LIMIT_SECONDS} if simt else {},
        "families": families,
        "wall_s": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--kernels", type=int, default=16, help="candidates of each family")
    parser.add_argument("--family", action="append", choices=tuple(FAMILIES), help="may be repeated; default: all")
    arguments = parser.parse_args()
    keep_result(measure(arguments.family or list(FAMILIES), arguments.kernels), keep=not arguments.no_file)


if __name__ == "__main__":
    main()
