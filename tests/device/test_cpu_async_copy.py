"""cp.async on the CPU: a copy lands at the wait that must complete it and never before, and its target is poison until
then."""

from __future__ import annotations

import re
from typing import Any, get_args

import numpy as np
import pytest

from codegen.plan.verification_plan import Order
from tests.support.kernels.small_kernels import ELEMENTS, Small, SmallKernels

NAN = float("nan")
# What each of 32 threads finds of the 32 floats that it copies: `in` holds 0, 1, 2, …
COPY = "cp_async<4>(shared + 4 * lane, in + 100 + lane, true);\n"
BEFORE = "write(shared + 4 * lane, 7.0f);\n"
SHOW = "\nshow(out + thread, read(shared + 4 * lane));"
LANES = np.arange(32.0)

# A body for one warp, and what it shows.
LANDED: dict[str, tuple[Small, Any]] = {
    "awaited": (Small(COPY + "cp_async_commit();\ncp_async_wait<0>();" + SHOW, threads=32), LANES + 100),
    "not_committed": (Small(BEFORE + COPY + "cp_async_wait<0>();" + SHOW, threads=32), NAN),
    "not_awaited": (Small(BEFORE + COPY + "cp_async_commit();" + SHOW, threads=32), NAN),
    "awaited_too_few": (Small(BEFORE + COPY + "cp_async_commit();\ncp_async_wait<1>();" + SHOW, threads=32), NAN),
    "poisoned_at_once": (Small(BEFORE + COPY + SHOW, threads=32), NAN),
    "empty_groups_count": (
        Small(BEFORE + COPY + "cp_async_commit();\ncp_async_commit();\ncp_async_wait<1>();" + SHOW, threads=32),
        LANES + 100,
    ),
    "committed_after_the_wait": (
        Small(BEFORE + COPY + "cp_async_wait<0>();\ncp_async_commit();" + SHOW, threads=32), NAN,
    ),
    "second_of_two_not_yet": (
        Small("""
            cp_async<4>(shared + 4 * lane, in + lane, true);
            cp_async_commit();
            cp_async<4>(shared + 128 + 4 * lane, in + 32 + lane, true);
            cp_async_commit();
            cp_async_wait<1>();
            show(out + lane, read(shared + 4 * lane));
            show(out + 32 + lane, read(shared + 128 + 4 * lane));
        """, threads=32),
        np.r_[LANES, np.full(32, np.nan)],
    ),
    "unwanted_are_zeros": (
        Small("""
            cp_async<4>(shared + 4 * lane, lane < 5 ? in + lane : nullptr, lane < 5);
            cp_async_commit();
            cp_async_wait<0>();
            show(out + lane, read(shared + 4 * lane));
        """, threads=32),
        np.where(LANES < 5, LANES, 0.0),
    ),
    "a_barrier_waits_for_no_copy": (Small(COPY + "cp_async_commit();\n__syncthreads();" + SHOW, threads=32), NAN),
    "groups_are_a_threads_own": (
        Small("""
            cp_async<4>(shared + 4 * lane, in + lane, true);
            if (lane < 16) cp_async_commit();
            cp_async_wait<0>();
            show(out + lane, read(shared + 4 * lane));
        """, threads=32),
        np.where(LANES < 16, LANES, NAN),
    ),
    "every_width": (
        Small("""
            cp_async<16>(shared + 16 * lane, in + 4 * lane, true);
            cp_async<8>(shared + 512 + 8 * lane, in + 2 * lane, true);
            cp_async_commit();
            cp_async_wait<0>();
            show(out + lane, read(shared + 16 * lane + 12) + 1000.0f * read(shared + 512 + 8 * lane + 4));
        """, threads=32),
        4 * LANES + 3 + 1000 * (2 * LANES + 1),
    ),
}  # fmt: skip
# A ring of three stages, copied two ahead: what a tensor-core kernel's main loop does. Each element is read by another
# warp than the one that copied it.
PIPELINE = """
    float sum = 0.0f;
    for (int step = 0; step < 2; ++step) {
      cp_async<4>(shared + step * 256 + 4 * thread, in + step * 64 + thread, true);
      cp_async_commit();
    }
    for (int step = 0; step < 8; ++step) {
      cp_async_wait<1>();
      __syncthreads();
      if (step + 2 < 8) cp_async<4>(shared + (step + 2) % 3 * 256 + 4 * thread, in + (step + 2) * 64 + thread, true);
      cp_async_commit();
      sum += read(shared + step % 3 * 256 + 4 * (63 - thread));
    }
    show(out + thread, sum);
"""
PIPELINE_SHOWS = sum(step * 64 + np.arange(63.0, -1.0, -1.0) for step in range(8))
# One change each that takes away what the pipeline needs.
BROKEN_PIPELINES = {
    "waits_for_one_too_few": (
        PIPELINE.replace("wait<1>", "wait<2>"), r"thread \d+ copies to it since .*:3 and has not waited",
    ),
    "forgets_the_last_commits": (
        PIPELINE.replace("      cp_async_commit();\n      s", "      if (step + 2 < 8) cp_async_commit();\n      s"),
        r"thread \d+ copies to it since .*:9 and has not waited",
    ),
    "no_barrier": (PIPELINE.replace("__syncthreads();", ""), r"no barrier between|has not waited"),
    "barrier_before_the_wait": (
        PIPELINE.replace("cp_async_wait<1>();\n      __syncthreads();", "__syncthreads();\n      cp_async_wait<1>();"),
        r"thread \d+ copied at .*, thread \d+ read at .*, no barrier between|thread \d+ copies to it since",
    ),
    "one_stage_short": (PIPELINE.replace("% 3", "% 2"), r"thread \d+ (copied|copies|read) .*"),
}  # fmt: skip
REFUSED = {
    "source_outside": (
        f"cp_async<16>(shared, in + {ELEMENTS - 3}, true);",
        r"source_outside.cuh:1: read of 16 bytes at offset 4084 of in",
    ),
    "target_outside": (
        "cp_async<8>(shared + 4096, in, true);",
        r"target_outside.cuh:1: cp_async of 8 bytes at offset 4096 of shared memory: outside of its 4096",
    ),
    "target_misaligned": (
        "cp_async<16>(shared + 8, in, true);", r"cp_async of 16 bytes at offset 8 of shared memory: misaligned",
    ),
    "source_misaligned": ("cp_async<16>(shared, in + 1, true);", r"read of 16 bytes at offset 4 of in .*: misaligned"),
}  # fmt: skip
# What a race-checked run says of the same and of further mistakes.
RACES = {
    "reads_its_own_copy": (
        COPY + "cp_async_commit();\nif (lane == 9) show(out, read(shared + 36));",
        r"race on shared memory at offset 36 \(4 bytes\): thread 9 copies to it since reads_its_own_copy.cuh:1 and has "
        r"not waited for that, thread 9 read at reads_its_own_copy.cuh:3 \(block 0,0,0\)",
    ),
    "writes_over_a_copy": (
        COPY + "write(shared + 4 * lane, 1.0f);",
        r"thread 0 copies to it since .*:1 and has not waited for that, thread 0 wrote at .*:2",
    ),
    "copies_twice": (
        COPY + COPY, r"thread 0 copies to it since .*:1 and has not waited for that, thread 0 copied at .*:2",
    ),
    "over_unfinished_reads": (
        "write(shared + 4 * lane, 1.0f);\nwarp_barrier();\nshow(out + lane, read(shared + 4 * (31 - lane)));\n" + COPY,
        r"thread \d+ copies to it since .*:4 .*, thread \d+ read at .*:3|"
        r"thread \d+ read at .*:3, thread \d+ copied at .*:4, no barrier",
    ),
    "no_barrier_after_the_wait": (
        COPY + "cp_async_commit();\ncp_async_wait<0>();\nshow(out + lane, read(shared + 4 * (31 - lane)));",
        r"copies to it since .*:1 .*, thread \d+ read at .*:4 |"
        r"copied at .*:1, .* read at .*:4, no barrier|read at .*:4, .* copied at .*:1, no barrier",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallKernels:
    kernels = {name: kernel for name, (kernel, _) in LANDED.items()}
    kernels |= {"pipeline": Small(PIPELINE)} | {name: Small(body) for name, (body, _) in BROKEN_PIPELINES.items()}
    kernels |= {name: Small(body, threads=32) for name, (body, _) in (REFUSED | RACES).items()}
    # More copies than any list starts with room for, landing one by one while others are issued.
    kernels["many"] = Small("""
        for (int i = 0; i < 200; ++i) {
          cp_async<4>(shared + 4 * i, in + i, true);
          cp_async_commit();
          if (i >= 90) {
            cp_async_wait<90>();
            show(out + i - 90, read(shared + 4 * (i - 90)));
          }
        }
        show(out + 199, read(shared + 4 * 150));
    """, threads=1)  # fmt: skip
    kernels["next_block"] = Small(
        "if (blockIdx.x == 0) cp_async<4>(shared + 4 * lane, in + lane, true);\n"
        "else write(shared + 4 * lane, 3.0f);\ncp_async_commit();\n"
        "if (blockIdx.x == 1) show(out + lane, read(shared + 4 * lane));",
        threads=32,
        blocks=2,
    )
    return SmallKernels(kernels, tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("order", get_args(Order))
@pytest.mark.parametrize("name", LANDED)
def test_a_copy_lands_at_the_wait_for_its_group_and_not_before(name: str, order: Order, small: SmallKernels) -> None:
    outcome = small.run(name, order)
    assert (outcome.outcome.status, outcome.message) == ("ok", "")
    shown = np.broadcast_to(LANDED[name][1], 32 if np.ndim(LANDED[name][1]) == 0 else np.shape(LANDED[name][1]))
    np.testing.assert_array_equal(outcome.out[: len(shown)], shown)


@pytest.mark.parametrize("order", get_args(Order))
@pytest.mark.parametrize("watch", [False, True])
def test_a_right_pipeline_is_right(watch: bool, order: Order, small: SmallKernels) -> None:
    outcome = small.run("pipeline", order, watch=watch)
    assert (outcome.outcome.status, outcome.message) == ("ok", "")
    np.testing.assert_array_equal(outcome.out[:64], PIPELINE_SHOWS)


@pytest.mark.parametrize("name", BROKEN_PIPELINES)
def test_a_broken_pipeline_shows_in_its_results_and_is_explained_when_race_checked(
    name: str, small: SmallKernels
) -> None:
    orders = [small.run(name, order).out[:64] for order in get_args(Order)]
    assert any(not np.array_equal(out, PIPELINE_SHOWS) for out in orders)
    for order in get_args(Order):
        watched = small.run(name, order, watch=True)
        assert watched.outcome.status == "runtime_error"
        assert re.search(BROKEN_PIPELINES[name][1], watched.message), watched.message


@pytest.mark.parametrize("name", REFUSED)
def test_a_copy_from_or_to_where_it_must_not_is_refused(name: str, small: SmallKernels) -> None:
    for watch in (False, True):
        outcome = small.run(name, watch=watch)
        assert outcome.outcome.status == "runtime_error"
        assert re.search(REFUSED[name][1], outcome.message), outcome.message


@pytest.mark.parametrize("order", get_args(Order))
@pytest.mark.parametrize("name", RACES)
def test_a_race_checked_run_names_the_copy_that_others_do_not_wait_for(
    name: str, order: Order, small: SmallKernels
) -> None:
    outcome = small.run(name, order, watch=True)
    assert outcome.outcome.status == "runtime_error"
    pattern = RACES[name][1].replace("thread 0 ", r"thread \d+ ")  # another order meets another thread first
    assert re.search(pattern, outcome.message), outcome.message


@pytest.mark.parametrize("watch", [False, True])
def test_any_number_of_copies_may_be_under_way(watch: bool, small: SmallKernels) -> None:
    outcome = small.run("many", watch=watch)
    if watch:
        assert "thread 0 copies to it since many.cuh:2 and has not waited" in outcome.message  # the last line's read
        return
    np.testing.assert_array_equal(outcome.out[:110], np.arange(110.0))
    assert np.isnan(outcome.out[199])


@pytest.mark.parametrize("watch", [False, True])
def test_what_a_block_did_not_wait_for_ends_with_it(watch: bool, small: SmallKernels) -> None:
    outcome = small.run("next_block", watch=watch)
    assert (outcome.outcome.status, outcome.message) == ("ok", "")
    np.testing.assert_array_equal(outcome.out[:32], np.full(32, 3.0))
