"""Gradients of filters drawn over the whole domain, each with a random schedule that the rules accept: exact on
integers and within the bound on normals, on the CPU and on their own extents; and nvcc compiles them.

CUKILN_TEST_SEED repeats a run's draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.operators.conv2d_wgrad.problem import Conv2dWgradProblem
from tests import drawn_conv2d
from tests.drawn import SPREAD, prove, require_right, require_spread, seed_of_this_run
from tests.fixtures_compile import *  # noqa: F403
from tests.test_matmul_property import require_compiled
from workers.processes import Processes
from workers.toolchain import Toolchain

conv2d_wgrad = operator("conv2d_wgrad")
BATCH = 25  # kernels of one g++ file and one child
draws = partial(drawn_conv2d.draws, name="conv2d_wgrad")


def what_was_drawn(drawn: Sequence[tuple[str, Candidate]]) -> Counter[str]:
    """How often each thing that a draw can be about came up."""
    counts: Counter[str] = Counter()
    for arch, candidate in drawn:
        p, t, s = candidate.problem, candidate.schedule.as_dict(), candidate.kernel.signature_dict
        assert isinstance(p, Conv2dWgradProblem)
        counts.update([f"target {arch}", f"layout {p.layout}", f"inputs {p.dtype}", f"out {p.out_dtype}"])
        if p.dtype != "float32" == p.out_dtype:
            counts["float32 of halves"] += 1
        counts.update([f"algorithm {t['algorithm']}", f"split {t['split']}"])
        if t["algorithm"] == "implicit_gemm":
            counts.update(["tensor cores" if "mma_k" in t else "CUDA cores", f"copy {t.get('copy')}"])
        elif t["split"] != "none":
            counts["direct in slices"] += 1
        counts[
            "pointwise" if p.pointwise else "depthwise" if p.depthwise else "groups" if p.groups > 1 else "dense"
        ] += 1
        counts["stride" if max(p.stride) > 1 else "no stride"] += 1
        counts["dilation" if max(p.dilation) > 1 else "no dilation"] += 1
        counts["padding" if p.padded != (p.h, p.w) else "no padding"] += 1
        if any(before != behind for before, behind in p.padding):
            counts["padding of one side"] += 1
        counts["several images" if p.n > 1 else "one image"] += 1
        counts["dilation with groups"] += p.groups > 1 and max(p.dilation) > 1
        counts["a multiplier"] += p.groups == p.c < p.k
        counts["a stride that leaves elements"] += any(
            (p.padded[a] - p.dilation[a] * (taps - 1) - 1) % p.stride[a] for a, taps in enumerate((p.r, p.s))
        )
        counts.update([f"align_dy {s['align_dy']}", f"align_x {s['align_x']}", f"align_dw {s['align_dw']}"])
        counts[f"{min(len(p.epilogue), 2)} or more nodes"] += 1
    return counts


# What must have come up, in percent of the draws: what their numbers decide nearly as often as it goes round, the rest
# at about a third of how often it comes up.
WANTED = {
    "target sm_80": 25, "target sm_90a": 25, "target sm_75": 10, "layout nhwc": 40, "layout nchw": 40,
    "inputs float32": 40, "inputs float16": 20, "inputs bfloat16": 20, "out float32": 10, "out float16": 8,
    "out bfloat16": 8, "float32 of halves": 3, "algorithm implicit_gemm": 25, "algorithm direct": 8,
    "tensor cores": 15, "CUDA cores": 5, "split none": 10, "split workspace": 8, "split atomic": 4, "split stream": 1,
    "direct in slices": 2, "copy cp_async": 3, "copy registers": 8, "pointwise": 3, "depthwise": 8, "groups": 15,
    "dense": 15, "stride": 25, "no stride": 10, "dilation": 20, "no dilation": 15, "padding": 25, "no padding": 10,
    "several images": 20, "one image": 20, "dilation with groups": 8, "a multiplier": 5,
    "a stride that leaves elements": 8, "align_dy 1": 8, "align_dy 8": 3, "align_x 1": 25, "align_x 8": 1,
    "align_dw 1": 8, "align_dw 8": 1, "0 or more nodes": 10, "1 or more nodes": 10, "2 or more nodes": 30,
    "padding of one side": 12,
}  # fmt: skip


def test_draws_are_about_everything() -> None:
    require_spread(what_was_drawn(draws(SPREAD, 1)), WANTED, SPREAD)


def test_a_hundred_draws_are_right(tmp_path: Path) -> None:
    seed = seed_of_this_run()
    proofs = prove(draws(100, seed), tmp_path, seed=seed, batch=BATCH)
    require_right(proofs)


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
def test_five_thousand_draws_are_right(tmp_path: Path) -> None:
    seed = seed_of_this_run()
    drawn: list[tuple[str, Candidate]] = []
    for part in range(20):
        proofs = prove(draws(250, seed + part), tmp_path / str(part), seed=seed, batch=BATCH)
        require_right(proofs)
        drawn += [(proof.arch, proof.candidate) for proof in proofs]
    require_spread(what_was_drawn(drawn), WANTED, len(drawn))


def test_drawn_schedules_compile(toolchain: Toolchain, processes: Processes) -> None:
    require_compiled(draws(12, seed_of_this_run()), toolchain, processes)


def test_reduced_problems_have_the_kernel_of_what_was_drawn() -> None:
    seed = seed_of_this_run()
    for _, candidate in draws(300, seed):
        reduced = conv2d_wgrad.test_problems(candidate.kernel)
        kernels = {conv2d_wgrad.candidate(one, candidate.schedule).kernel for one in reduced}
        assert kernels == {candidate.kernel}, candidate.problem


def test_a_seed_decides_the_draws() -> None:
    assert [one.id for _, one in draws(20, 5)] == [one.id for _, one in draws(20, 5)]
    assert [one.id for _, one in draws(20, 5)] != [one.id for _, one in draws(20, 6)]
