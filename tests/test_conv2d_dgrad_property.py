"""Gradients of images drawn over the whole domain, each with a random schedule that the rules accept: exact on integers
and within the bound on normals, on the CPU and on their own extents; and nvcc compiles them.

CUKILN_TEST_SEED repeats a run's draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import gcd
from pathlib import Path

import pytest

from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.operators.conv2d_dgrad.phases import phases
from codegen.operators.conv2d_dgrad.problem import Conv2dDgradProblem
from tests.drawn import SPREAD, prove, require_right, require_spread, seed_of_this_run
from tests.drawn_conv2d import draws
from tests.fixtures_compile import *  # noqa: F403
from tests.test_matmul_property import require_compiled
from workers.processes import Processes
from workers.toolchain import Toolchain

NAME = "conv2d_dgrad"
BATCH = 25  # kernels of one g++ file and one child


def what_was_drawn(drawn: Sequence[tuple[str, Candidate]]) -> Counter[str]:
    """How often each thing that a draw can be about came up."""
    counts: Counter[str] = Counter()
    for arch, candidate in drawn:
        p, t, s = candidate.problem, candidate.schedule.as_dict(), candidate.kernel.signature_dict
        assert isinstance(p, Conv2dDgradProblem)
        counts.update([f"target {arch}", f"layout {p.layout}", f"inputs {p.dtype}", f"out {p.out_dtype}"])
        counts[f"algorithm {t['algorithm']}"] += 1
        if t["algorithm"] == "implicit_gemm":
            counts.update(["tensor cores" if "mma_k" in t else "CUDA cores", f"split {t['split']}"])
            counts[f"copy {t.get('copy')}"] += 1
        counts[f"window {t.get('window')}"] += 1
        counts[
            "pointwise" if p.pointwise else "depthwise" if p.depthwise else "groups" if p.groups > 1 else "dense"
        ] += 1
        counts["stride" if max(p.stride) > 1 else "no stride"] += 1
        counts["dilation" if max(p.dilation) > 1 else "no dilation"] += 1
        counts["padding" if p.padded != (p.h, p.w) else "no padding"] += 1
        if any(before != behind for before, behind in p.padding):
            counts["padding of one side"] += 1
        counts["several images" if p.n > 1 else "one image"] += 1
        if p.groups > 1 and max(p.dilation) > 1:
            counts["dilation with groups"] += 1
        if p.groups == p.c < p.k:
            counts["a multiplier"] += 1
        counts.update({"strided tensor cores"} if p.strided and "mma_k" in t else ())
        every = [phase for _, phase in phases(p)]
        counts["phases without taps"] += any(phase.taps == 0 for phase in every)
        counts["phases of several lengths"] += len({phase.taps for phase in every if phase.taps}) > 1
        counts["a stride and a dilation with a divisor"] += any(gcd(p.stride[a], p.dilation[a]) > 1 for a in (0, 1))
        counts["dilation with groups and stride"] += p.groups > 1 and max(p.dilation) > 1 and p.strided
        if any((p.padded[a] - p.dilation[a] * (taps - 1) - 1) % p.stride[a] for a, taps in enumerate((p.r, p.s))):
            counts["a stride that leaves elements"] += 1
        counts.update(
            [f"align_x {s['align_x']}", f"align_out {s['align_out']}", f"{min(len(p.epilogue), 2)} or more nodes"]
        )
    return counts


# What must have come up, in percent of the draws: what their numbers decide nearly as often as it goes round, the rest
# at about a third of how often it comes up.
WANTED = {
    "target sm_80": 25, "target sm_90a": 25, "target sm_75": 10, "layout nhwc": 40, "layout nchw": 40,
    "inputs float32": 40, "inputs float16": 20, "inputs bfloat16": 20, "out float32": 10, "out float16": 8,
    "out bfloat16": 8, "algorithm implicit_gemm": 25, "algorithm direct": 15, "tensor cores": 15, "CUDA cores": 5,
    "split none": 5, "split workspace": 3, "split atomic": 2, "split stream": 1, "copy cp_async": 3,
    "copy registers": 8, "pointwise": 8, "depthwise": 8, "groups": 15, "dense": 15, "stride": 25, "no stride": 10,
    "dilation": 20, "no dilation": 15, "padding": 25, "no padding": 10, "several images": 20, "one image": 20,
    "dilation with groups": 8, "strided tensor cores": 6, "phases without taps": 10, "phases of several lengths": 5,
    "a stride and a dilation with a divisor": 3, "dilation with groups and stride": 5, "a multiplier": 5,
    "window 0": 6, "window 3": 2, "window 5": 2, "window 7": 2, "a stride that leaves elements": 8,
    "align_x 1": 15, "align_x 8": 1,
    "align_out 1": 10, "align_out 8": 1, "0 or more nodes": 10, "1 or more nodes": 10, "2 or more nodes": 30,
    "padding of one side": 12,
}  # fmt: skip


def test_draws_are_about_everything() -> None:
    require_spread(what_was_drawn(draws(SPREAD, 1, NAME)), WANTED, SPREAD)


def test_a_hundred_draws_are_right(tmp_path: Path) -> None:
    seed = seed_of_this_run()
    proofs = prove(draws(100, seed, NAME), tmp_path, seed=seed, batch=BATCH)
    require_right(proofs)


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
def test_five_thousand_draws_are_right(tmp_path: Path) -> None:
    seed = seed_of_this_run()
    drawn: list[tuple[str, Candidate]] = []
    for part in range(20):
        proofs = prove(draws(250, seed + part, NAME), tmp_path / str(part), seed=seed, batch=BATCH)
        require_right(proofs)
        drawn += [(proof.arch, proof.candidate) for proof in proofs]
    require_spread(what_was_drawn(drawn), WANTED, len(drawn))


def test_drawn_schedules_compile(toolchain: Toolchain, processes: Processes) -> None:
    require_compiled(draws(6, seed_of_this_run(), NAME), toolchain, processes)


def test_reduced_problems_have_the_kernel_of_what_was_drawn() -> None:
    op = operator(NAME)
    for _, candidate in draws(300, seed_of_this_run(), NAME):
        kernels = {op.candidate(one, candidate.schedule).kernel for one in op.test_problems(candidate.kernel)}
        assert kernels == {candidate.kernel}, candidate.problem


def test_a_seed_decides_the_draws() -> None:
    assert [one.id for _, one in draws(20, 5, NAME)] == [one.id for _, one in draws(20, 5, NAME)]
    assert [one.id for _, one in draws(20, 5, NAME)] != [one.id for _, one in draws(20, 6, NAME)]
