"""Collectives on the CPU: all 32 lanes, or a report of where each lane is, in any order of warps and lanes."""

from __future__ import annotations

import re
import threading
from typing import get_args

import numpy as np
import pytest

from codegen.plan.verification_plan import Order
from tests.support.kernels.small_kernels import Small, SmallKernels

RIGHT = {
    # Every lane adds all lanes of its warp, in five steps.
    "sum_by_shuffles": Small("""
        float sum = load_global<1>(in + thread).data[0];
        for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
        show(out + thread, sum);
    """, threads=128),
    # One warp of two meets.
    "one_warp_alone": Small("""
        float value = 1.0f;
        if (warp == 1) value = vote_all(true) ? shuffle_idx(2.0f, 0) : 0.0f;
        __syncthreads();
        show(out + thread, value);
    """),
    # Warps meet differently often, and the block's barrier comes in between.
    "different_counts": Small("""
        float sum = 0.0f;
        for (int i = 0; i <= warp; ++i) sum += shuffle_up(1.0f, 1);
        __syncthreads();
        for (int i = 0; i < 3 - warp; ++i) sum += shuffle_down(1.0f, 1);
        show(out + thread, sum);
    """, threads=96),
    # Warp 1 prepares, warps 0 and 2 wait for it; warp 2 then lets warp 0 go on for the second time.
    "named_chain": Small("""
        if (warp == 1) {
          write(shared + 4 * lane, 5.0f);
          named_barrier_arrive(3, 96);
        } else {
          named_barrier(3, 96);
          const float first = read(shared + 4 * lane);
          if (warp == 2) write(shared + 512 + 4 * lane, first + 1.0f);
          named_barrier(4, 64);
          show(out + thread, first + read(shared + 512 + 4 * (31 - lane)));
        }
    """, threads=96),
    "many_phases": Small("""
        float sum = 0.0f;
        for (int i = 0; i < 5; ++i) {
          if (warp == 0) write(shared + 4 * lane, static_cast<float>(i));
          named_barrier(1, 64);
          if (warp == 1) sum += read(shared + 4 * (31 - lane));
          named_barrier(2, 64);
        }
        if (warp == 1) show(out + thread, sum);
    """),
}  # fmt: skip
EXPECTED = {
    "sum_by_shuffles": np.repeat([496.0, 1520.0, 2544.0, 3568.0], 32),
    "one_warp_alone": np.repeat([1.0, 2.0], 32),
    "different_counts": np.repeat([4.0, 4.0, 4.0], 32),
    "named_chain": np.r_[np.full(32, 11.0), np.full(32, np.nan), np.full(32, 11.0)],
    "many_phases": np.r_[np.full(32, np.nan), np.full(32, 10.0)],
}

# A body, the threads of its block, and the message.
WRONG: dict[str, tuple[Small, str]] = {
    "other_collective": (
        Small("""
            if (thread < 32 || lane < 16)
              shuffle_xor(1.0f, 1);
            else
              vote_any(true);
        """),
        r"divergent collective in warp 1 of block 0,0,0: threads 32-47 wait at other_collective.cuh:2 in shuffle_xor; "
        r"threads 48-63 wait at other_collective.cuh:4 in vote_any$",
    ),
    "other_place": (
        Small("""
            if (lane != 7)
              warp_barrier();
            else
              warp_barrier();
        """),
        r"warp 0 of .*: threads 0-6, 8-31 wait at other_place.cuh:2 in warp_barrier; thread 7 waits at "
        r"other_place.cuh:4 in warp_barrier$",
    ),
    "every_second_lane": (
        Small("if (lane % 2 == 0) vote_any(true);\nwarp_barrier();"),
        r"warp 0 of .*: threads 0, 2, 4, 6 and 12 more wait at every_second_lane.cuh:1 in vote_any; "
        r"threads 1, 3, 5, 7 and 12 more wait at every_second_lane.cuh:2 in warp_barrier$",
    ),
    "in_turn": (
        Small("if (lane % 8 < 2) vote_any(true);\nif (lane % 8 > 2) warp_barrier();"),
        r"warp 0 of .*: threads 0-1, 8-9, 16-17, 24-25 wait at in_turn.cuh:1 in vote_any; threads 2, 10, 18, 26 have "
        r"exited; threads 3-7, 11-15, 19-23, 27-31 wait at in_turn.cuh:2 in warp_barrier$",
    ),
    "every_second_warp": (
        Small("if (warp % 2) __syncthreads();", threads=320),
        r"divergent barrier in block 0,0,0: threads 0-31, 64-95, 128-159, 192-223 and 32 more have exited; "
        r"threads 32-63, 96-127, 160-191, 224-255 and 32 more wait at every_second_warp.cuh:1$",
    ),
    "exited_lane": (
        Small("if (thread == 40) return;\nwarp_barrier();"),
        r"warp 1 of .*: threads 32-39, 41-63 wait at exited_lane.cuh:2 in warp_barrier; thread 40 has exited$",
    ),
    "at_the_barrier": (
        Small("if (lane >= 30) __syncthreads();\nshuffle_idx(1, 0);"),
        r"warp 0 of .*: threads 0-29 wait at at_the_barrier.cuh:2 in shuffle_idx; threads 30-31 wait at "
        r"at_the_barrier.cuh:1$",
    ),
    "once_too_often": (
        Small("for (int i = 0; i < 3 + (lane == 0); ++i) vote_ballot(true);"),
        r"warp 0 of .*: thread 0 waits at once_too_often.cuh:1 in vote_ballot; threads 1-31 have exited",
    ),
    "no_whole_warp": (
        Small("warp_barrier();", threads=40),
        r"warp 1 of .*: threads 32-39 wait at no_whole_warp.cuh:1 in warp_barrier; lanes 8-31 are not in this block of "
        r"40 threads",
    ),
    "row_outside": (
        Small("""
            unsigned words[1];
            ldmatrix(words, shared + lane * 16);
        """, shared=480),
        r"row_outside.cuh:2: ldmatrix of 16 bytes at offset 480 of shared memory: outside of its 480 bytes "
        r"\(block 0,0,0 thread 30,0,0",
    ),
    "no_other_thread_arrives": (
        Small("if (warp == 0) named_barrier(2, 64);"),
        r"divergent barrier in block 0,0,0: threads 0-31 wait at no_other_thread_arrives.cuh:1 in named_barrier; "
        r"threads 32-63 have exited; barrier 2: 32 of 64 threads have come",
    ),
    "two_barriers": (
        Small("named_barrier(warp + 1, 64);"),
        r"divergent barrier in block 0,0,0: threads 0-63 wait at two_barriers.cuh:1 in named_barrier; "
        r"barrier 1: 32 of 64 threads have come; barrier 2: 32 of 64",
    ),
    "named_and_block": (
        Small("if (warp == 1) named_barrier(1, 64);\n__syncthreads();"),
        r"divergent barrier in block 0,0,0: threads 0-31 wait at named_and_block.cuh:2; threads 32-63 wait at "
        r"named_and_block.cuh:1 in named_barrier; barrier 1: 32 of 64 threads",
    ),
    "counts_differ": (
        Small("if (warp == 0) named_barrier_arrive(5, 64);\nif (warp == 1) named_barrier(5, 96);", threads=96),
        r"counts_differ.cuh:2: named_barrier: barrier 5 of 96 threads, but at counts_differ.cuh:1 it is one of 64",
    ),
    "lanes_differ": (
        Small("named_barrier(lane < 9 ? 1 : 2, 64);"),
        r"lanes_differ.cuh:1: named_barrier: lane 9 comes to barrier 2 of 64 threads, lane 0 to barrier 1 of 64",
    ),
    "barrier_zero": (Small("named_barrier(0, 64);"), r"there is no barrier 0; 1 to 15 are allowed"),
    "barrier_sixteen": (Small("named_barrier(16, 64);"), r"there is no barrier 16; 1 to 15 are allowed"),
    "odd_count": (Small("named_barrier(1, 48);"), r"a barrier of 48 threads; a multiple of 32 up to the block's 64"),
    "more_than_the_block": (Small("named_barrier(1, 96);"), r"a barrier of 96 threads; a multiple of 32 up to"),
    "arrives_twice": (
        Small("if (warp == 0)\n  for (int i = 0; i < 2; ++i) named_barrier_arrive(1, 64);"),
        r"arrives_twice.cuh:2: named_barrier_arrive: warp 0 comes to barrier 1 again before the 64 threads",
    ),
    "half_a_warp_arrives": (
        Small("if (lane < 16) named_barrier(1, 64);"),
        r"divergent collective in warp 0 of block 0,0,0: threads 0-15 wait at half_a_warp_arrives.cuh:1 in "
        r"named_barrier; threads 16-31 have exited",
    ),
}  # fmt: skip
ENDLESS = {
    "endless_votes": Small("while (vote_any(true)) {}"),
    "endless_lane": Small("vote_any(true);\nfor (volatile int i = 0; lane == 3; i = i + 1) {}\nvote_any(true);"),
    "endless_barriers": Small("for (;;) named_barrier(1, 64);"),
    "endless_reads": Small("float sum = 0;\nwrite(shared, 0);\nfor (;;) show(out, sum += read(shared));", threads=1),
}  # fmt: skip


PRINTS = Small('if (warp == 1) printf("no newline, ");\nif (thread == 41) shuffle_xor(1, 1);')
PRINTS_RIGHT = Small(
    'if (lane == 3 && blockIdx.x == 1) printf("thread %d has %.1f\\n", thread, load_global<1>(in + thread).data[0]);',
    blocks=2,
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallKernels:
    wrong = {name: kernel for name, (kernel, _) in WRONG.items()}
    return SmallKernels(
        {**RIGHT, **wrong, **ENDLESS, "prints": PRINTS, "prints_right": PRINTS_RIGHT}, tmp_path_factory.mktemp("small")
    )


@pytest.mark.parametrize("order", get_args(Order))
@pytest.mark.parametrize("watch", [False, True])
@pytest.mark.parametrize("name", RIGHT)
def test_a_warp_that_comes_together_continues_together(
    name: str, watch: bool, order: Order, small: SmallKernels
) -> None:
    for seed in range(5):
        outcome = small.run(name, order, watch=watch, seed=seed)
        assert (outcome.outcome.status, outcome.message) == ("ok", "")
        np.testing.assert_array_equal(outcome.out[: RIGHT[name].threads], EXPECTED[name])


@pytest.mark.parametrize("order", get_args(Order))
@pytest.mark.parametrize("name", WRONG)
def test_lanes_that_never_come_together_are_reported(name: str, order: Order, small: SmallKernels) -> None:
    outcome = small.run(name, order)
    assert outcome.outcome.status == "runtime_error"
    if order == "ascending":  # another order may meet another warp first
        assert re.search(WRONG[name][1], outcome.message), outcome.message
    assert not outcome.outcome.tainted
    right = small.run("sum_by_shuffles", order)
    assert right.outcome.status == "ok"


@pytest.mark.parametrize("watch", [False, True])
@pytest.mark.parametrize("name", ENDLESS)
def test_the_time_limit_ends_what_never_comes_back_to_the_scheduler(
    name: str, watch: bool, small: SmallKernels
) -> None:
    outcome = small.run(name, watch=watch, cpu_seconds=0.1)
    assert outcome.outcome.status == "run_timeout"
    assert re.match(r"still running after 0.1 CPU seconds \(block 0,0,0 thread \d+,0,0", outcome.message)
    assert small.run("many_phases", watch=watch).outcome.status == "ok"


def test_the_time_limit_ends_a_kernel_beside_threads_that_are_busy(small: SmallKernels) -> None:
    """The timer's signal comes to the thread that was running."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            pass

    busy = [threading.Thread(target=work) for _ in range(3)]
    for thread in busy:
        thread.start()
    try:
        outcomes = [small.run(name, cpu_seconds=0.1).outcome.status for name in ("endless_votes", "endless_lane") * 5]
    finally:
        over.set()
        for thread in busy:
            thread.join()
    assert outcomes == ["run_timeout"] * 10


def test_what_a_kernel_prints_is_seen_even_where_the_run_fails(
    small: SmallKernels, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "divergent collective" in small.run("prints").message
    printed = capfd.readouterr().out
    assert printed.count("no newline, ") == 32
    small.run("prints_right")
    assert capfd.readouterr().out == "thread 3 has 3.0\nthread 35 has 35.0\n"
