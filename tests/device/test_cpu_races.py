"""Races on shared memory are found whatever the order of threads was, and what is ordered by barriers is none."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from codegen.plan.verification_plan import Order
from tests.support.kernels.small_kernels import Small, SmallKernels

OWN = "write(shared + 4 * thread, 1.0f);\n"
OTHER_HALF = "show(out + thread, read(shared + 4 * (thread ^ 32)));"
NEIGHBOUR = "show(out + thread, read(shared + 4 * (thread ^ 1)));"
BYTE = "store_shared<1>(reinterpret_cast<unsigned char*>(shared) + {at}, Vec<unsigned char, 1>{{{{3}}}});\n"
ROWS = """
unsigned words[4];
ldmatrix(words, shared + 16 * lane);
out[thread] = static_cast<float>(words[0] + words[1] + words[2] + words[3]);
"""

# No line of these is a race.
ORDERED = {
    "own": Small(OWN + "show(out + thread, read(shared + 4 * thread));\n" + OWN),
    "block_barrier": Small(OWN + "__syncthreads();\n" + OTHER_HALF + "\n__syncthreads();\n" + OWN),
    "warp_barrier_within_a_warp": Small(OWN + "warp_barrier();\n" + NEIGHBOUR + "\nwarp_barrier();\n" + OWN),
    "all_threads_read": Small("show(out + thread, read(shared));\n"),
    "all_but_one_read": Small(
        "if (thread == 5) write(shared, 1.0f);\n__syncthreads();\nshow(out + thread, read(shared));\n__syncthreads();\n"
        "if (thread == 40) write(shared, 2.0f);"
    ),
    "bytes_of_a_word": Small(
        BYTE.format(at="thread") + "__syncthreads();\nshow(out + thread, read(shared + 4 * (lane / 2)));"
    ),
    "halves_of_a_word": Small(
        "store_shared<1>(reinterpret_cast<unsigned short*>(shared) + thread, Vec<unsigned short, 1>{{7}});\n"
        "__syncthreads();\nshow(out + thread, read(shared + 4 * (thread / 2)));\n__syncthreads();\n" + OWN
    ),
    "wide_and_narrow": Small(
        "unsigned char* const bytes = reinterpret_cast<unsigned char*>(shared);\n"
        "if (thread == 0) store_shared<4>(reinterpret_cast<float*>(shared), Vec<float, 4>{{1, 2, 3, 4}});\n"
        "if (thread == 1) store_shared<2>(bytes + 16, Vec<unsigned char, 2>{{1, 2}});\n"
        "if (thread == 2) store_shared<2>(bytes + 18, Vec<unsigned char, 2>{{1, 2}});\n"
        "__syncthreads();\nif (thread == 3) show(out, read(shared + 16));"
    ),
    # The producer fills two buffers; the consumer signals when it is done.
    "named_pair": Small("""
        for (int i = 0; i < 6; ++i) {
          char* const buffer = shared + i % 2 * 128;
          if (warp == 0) {
            if (i >= 2) named_barrier(3 + i % 2, 64);
            write(buffer + 4 * lane, static_cast<float>(i));
            named_barrier_arrive(1 + i % 2, 64);
          } else {
            named_barrier(1 + i % 2, 64);
            show(out + lane, read(buffer + 4 * (31 - lane)));
            if (i < 4) named_barrier_arrive(3 + i % 2, 64);
          }
        }
    """),
    # Warp 0 to warp 1 to warp 2: the last one never met the first.
    "handed_on": Small("""
        if (warp == 0) write(shared + 4 * lane, 1.0f);
        if (warp < 2) named_barrier(1, 64);
        if (warp > 0) named_barrier(2, 64);
        if (warp == 2) show(out + lane, read(shared + 4 * (31 - lane)));
    """, threads=96),
    "rows_after_a_barrier": Small(OWN + "warp_barrier();\n" + ROWS, threads=32, shared=512),
    "rows_that_all_warps_read": Small(
        "store_shared<4>(reinterpret_cast<float*>(shared) + 4 * thread, Vec<float, 4>{{1, 2, 3, 4}});\n"
        "__syncthreads();" + ROWS
    ),
    "blocks_have_their_own": Small("if (thread == static_cast<int>(blockIdx.x)) write(shared, 1.0f);", blocks=4),
}  # fmt: skip

# The body, and what is said of the first race that ascending warps and lanes meet.
RACES: dict[str, tuple[Small, str]] = {
    "read_after_write": (
        Small(OWN + OTHER_HALF, threads=64),
        r"race on shared memory at offset 128 \(4 bytes\): thread 0 read at read_after_write.cuh:2, thread 32 wrote at "
        r"read_after_write.cuh:1, no barrier between \(block 0,0,0\)$",
    ),
    "write_after_read": (
        Small(OWN + "__syncthreads();\n" + OTHER_HALF + "\nwrite(shared + 4 * thread, 2.0f);"),
        r"thread 0 wrote at .*:4, thread 32 read at .*:3, no barrier between",
    ),
    "write_after_write": (
        Small("write(shared + 4 * lane, 1.0f);"),
        r"offset 0 \(4 bytes\): thread 0 wrote at write_after_write.cuh:1, thread 32 wrote at write_after_write.cuh:1",
    ),
    "lanes_in_step": (
        Small(OWN + NEIGHBOUR),
        r"offset 4 .*: thread 0 read at lanes_in_step.cuh:2, thread 1 wrote at lanes_in_step.cuh:1",
    ),
    "warp_barrier_between_warps": (
        Small(OWN + "warp_barrier();\n" + OTHER_HALF), r"thread 0 read at .*:3, thread 32 wrote at .*:1",
    ),
    "shuffle_orders_nothing": (
        Small(OWN + "shuffle_xor(1.0f, 1);\n" + NEIGHBOUR), r"thread 1 wrote at .*:1, thread 0 read at .*:3",
    ),
    "mma_orders_nothing": (
        Small(OWN + "float d[4] = {};\nconst unsigned a[4] = {}, b[2] = {};\nmma_m16n8k16_f16(d, a, b);\n" + NEIGHBOUR),
        r"thread 1 wrote at .*:1, thread 0 read at .*:5",
    ),
    "one_reader_of_many": (
        Small("show(out + thread, read(shared));\nif (thread == 17) write(shared, 1.0f);\n"),
        r"thread \d+ (read|wrote) at .*, thread \d+ (wrote|read) at .*, no barrier",
    ),
    "a_reader_that_was_first": (
        # The writer itself read last in its warp, after another lane of it.
        Small("if (lane == 3) show(out, read(shared));\nshuffle_xor(1, 1);\nif (lane == 4) {\n"
              "show(out, read(shared));\nwrite(shared, 1.0f);\n}", threads=32),
        r"thread 3 read at .*:1, thread 4 wrote at .*:5, no barrier",
    ),
    "same_byte": (
        Small(BYTE.format(at="5")), r"offset 5 \(1 byte\): thread 0 wrote at .*:1, thread 1 wrote at .*:1, no barrier",
    ),
    "byte_of_a_read_word": (
        Small("if (warp == 0) show(out, read(shared));\nelse if (lane == 0) " + BYTE.format(at="2")),
        r"offset 2 \(1 byte\): thread \d+ read at .*:1, thread 32 wrote at .*:2",
    ),
    "word_over_a_byte": (
        Small("if (thread == 7) " + BYTE.format(at="9") + "if (thread == 50) write(shared + 8, 1.0f);"),
        r"offset 9 \(1 byte\): thread 7 wrote at .*:1, thread 50 wrote at .*:2",
    ),
    "wide_store": (
        Small("if (thread == 2) store_shared<4>(reinterpret_cast<float*>(shared), Vec<float, 4>{{1, 2, 3, 4}});\n"
              "if (thread == 33) show(out, read(shared + 12));"),
        r"offset 12 \(4 bytes\): thread 2 wrote at .*:1, thread 33 read at .*:2",
    ),
    "arrive_does_not_wait": (
        # The one that only arrived goes on over what the other reads.
        Small("""
            if (warp == 0) write(shared + 4 * lane, 1.0f);
            if (warp == 0) named_barrier_arrive(1, 64);
            if (warp == 1) named_barrier(1, 64);
            if (warp == 1) show(out + lane, read(shared + 4 * lane));
            if (warp == 0) write(shared + 4 * lane, 2.0f);
        """),
        r"thread 0 wrote at .*:5, thread 32 read at .*:4",
    ),
    "arrive_orders_no_lanes": (
        Small(OWN + "if (warp == 1) return named_barrier(1, 64);\nnamed_barrier_arrive(1, 64);\n" + NEIGHBOUR),
        r"thread 1 wrote at .*:1, thread 0 read at .*:4",
    ),
    "the_third_was_not_asked": (
        Small("""
            if (warp == 0) write(shared + 4 * lane, 1.0f);
            if (warp < 2) named_barrier(1, 64);
            if (warp == 2) show(out + lane, read(shared + 4 * lane));
        """, threads=96),
        r"thread 0 wrote at .*:1, thread 64 read at .*:3",
    ),
    "row_of_another_lane": (
        Small(OWN + ROWS, threads=32, shared=512), r"offset 0 \(4 bytes\): thread 0 wrote at .*:1, warp 0 read at .*:4",
    ),
    "row_overwritten": (
        Small(ROWS.strip() + "\n" + OWN, threads=32, shared=512), r"warp 0 read at .*:2, thread 0 wrote at .*:4",
    ),
    "in_the_second_block": (
        Small("if (blockIdx.x == 1) write(shared, 1.0f);", blocks=3),
        r"thread 0 wrote .*thread 1 wrote .*\(block 1,0,0\)",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallKernels:
    kernels = {**ORDERED, **{name: kernel for name, (kernel, _) in RACES.items()}}
    return SmallKernels(kernels, tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("name", ORDERED)
def test_what_barriers_order_is_no_race(name: str, small: SmallKernels) -> None:
    for order in get_args(Order):
        for seed in range(3):
            outcome = small.run(name, order, watch=True, seed=seed)
            assert (outcome.outcome.status, outcome.message) == ("ok", "")


@pytest.mark.parametrize("name", RACES)
def test_a_race_is_found_in_every_order_and_names_both_places(name: str, small: SmallKernels) -> None:
    for order in get_args(Order):
        for seed in range(3):
            outcome = small.run(name, order, watch=True, seed=seed)
            assert outcome.outcome.status == "runtime_error"
            assert outcome.message.startswith("race on shared memory at offset ")
            assert not outcome.outcome.tainted
            if order == "ascending":
                assert re.search(RACES[name][1], outcome.message), outcome.message


@pytest.mark.parametrize("name", RACES)
def test_races_are_looked_for_in_race_checked_runs_only(name: str, small: SmallKernels) -> None:
    assert small.run(name).outcome.status == "ok"


def test_a_race_leaves_nothing_behind_for_the_next_run(small: SmallKernels) -> None:
    for name in RACES:
        small.run(name, watch=True)
        for other in ("own", "named_pair", "bytes_of_a_word"):
            assert small.run(other, watch=True).message == ""
