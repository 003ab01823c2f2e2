"""Every CPU emulation gives, lane by lane and register by register, what the PTX ISA manual says; those of mma are in
test_primitives_mma.py."""

from __future__ import annotations

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from codegen.primitives import DEVICE, EMULATION_HEADERS, PRIMITIVE_HEADERS, primitives
from tests.gpu import run_primitives
from tests.gpu.primitive_checks import CHECKS
from tests.gpu.primitive_inputs import Words
from tests.gpu.run_primitives import CpuEmulations, RunFailed
from tests.support.lane_tables import LANES, LDMATRIX, LDMATRIX_ROWS, LDMATRIX_TRANS, SHUFFLES

CHECK = {check.name: check for check in CHECKS}

# --- functions of floats

INF, NAN, SMALLEST = float("inf"), float("nan"), 2.0**-126
# Each is given as all three arguments of "arithmetic", of which thread i has the words from 3 i on.
POWERS = [(0.0, 1.0), (-0.0, 1.0), (2.0**-140, 1.0), (3.0, 8.0), (-126.0, SMALLEST), (-127.0, 0.0), (-256.0, 0.0)]
POWERS += [(-INF, 0.0), (INF, INF)]
GREATER = [(1.0, 2.0, 2.0), (2.0, 1.0, 2.0), (NAN, 1.0, 1.0), (1.0, NAN, 1.0), (-0.0, 0.0, 0.0), (0.0, -0.0, 0.0)]
GREATER += [(-INF, -3.0, -3.0), (-0.0, -0.0, -0.0)]


def arithmetic(emulations: CpuEmulations, given: list[tuple[float, float, float]]) -> NDArray[np.float32]:
    """Of each thread its 12 results."""
    words = np.zeros((1, 96), np.float32)
    words[0, : 3 * len(given)] = np.array(given, np.float32).ravel()
    return emulations.run(CHECK["arithmetic"], words.view(np.uint32)).view(np.float32).reshape(32, 12)


def test_a_power_of_2_is_exact_where_the_exponent_is_whole_and_flushes_what_is_subnormal(
    emulations: CpuEmulations,
) -> None:
    results = arithmetic(emulations, [(x, 0.0, 0.0) for x, _ in POWERS])
    assert results[: len(POWERS), 9].tolist() == [power for _, power in POWERS]
    assert np.isnan(arithmetic(emulations, [(NAN, 0.0, 0.0)])[0, 9])


def test_a_logarithm_to_the_base_2_is_exact_where_it_is_whole(emulations: CpuEmulations) -> None:
    results = arithmetic(emulations, [(2.0**k, 0.0, 0.0) for k in range(-10, 20)])
    assert results[:30, 10].tolist() == list(range(-10, 20))


def test_of_a_number_and_a_nan_the_number_is_the_greater_and_of_zeros_the_positive(emulations: CpuEmulations) -> None:
    results = arithmetic(emulations, [(a, b, 0.0) for a, b, _ in GREATER])[: len(GREATER), 11]
    expected = np.array([greater for *_, greater in GREATER], np.float32)
    assert results.view(np.uint32).tolist() == expected.view(np.uint32).tolist()
    assert np.isnan(arithmetic(emulations, [(NAN, NAN, 0.0)])[0, 11])


def test_a_pair_has_the_first_number_in_its_low_half(emulations: CpuEmulations) -> None:
    words = np.tile(np.array([1.0 + 2.0**-9, -70000.0], np.float32), (1, 32)).view(np.uint32)
    results = emulations.run(CHECK["pairs"], words).view(np.float32).reshape(32, 5)
    assert results[5, :4].tolist() == [1.0 + 2.0**-9, -INF, 1.0, -70144.0]


def test_a_number_is_rounded_to_the_nearest_of_tf32_and_from_between_two_away_from_zero(
    emulations: CpuEmulations,
) -> None:
    ulp, quantum = 2.0**-23, 2.0**-10
    expected = {
        1.0: 1.0, 1.0 + quantum / 2 - ulp: 1.0, 1.0 + quantum / 2: 1.0 + quantum,
        1.0 + quantum * 1.5: 1.0 + 2 * quantum, -1.0 - quantum / 2: -1.0 - quantum, 2.0 - ulp: 2.0,
        1.0 - quantum / 4: 1.0, 0.0: 0.0, INF: INF, -INF: -INF,
        float(np.finfo(np.float32).max): INF, 2.0**-149 * 4095: 0.0, 2.0**-149 * 4096: 2.0**-136,
    }  # fmt: skip
    numbers = np.zeros((32, 2), np.float32)
    numbers[: len(expected), 0] = list(expected)
    numbers[-2:, 0] = NAN, -0.0
    rounded = emulations.run(CHECK["pairs"], numbers.reshape(1, 64).view(np.uint32)).view(np.float32).reshape(32, 5)
    assert rounded[: len(expected), 4].tolist() == list(expected.values())
    assert np.isnan(rounded[-2, 4])
    assert np.signbit(rounded[-1, 4])
    assert rounded[-1, 4] == 0.0


# --- ldmatrix


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_reads_the_rows_that_lanes_pass_into_the_lanes_of_the_table(
    count: int, transposed: bool, emulations: CpuEmulations
) -> None:
    name, fragment = ("ldmatrix_trans", LDMATRIX_TRANS) if transposed else ("ldmatrix", LDMATRIX)
    stored = np.arange(256, dtype=np.uint16).reshape(32, 8)  # row r of shared memory: elements 8 r to 8 r + 7
    orders = [np.arange(32), np.arange(32)[::-1], np.random.default_rng(1).permutation(32), np.full(32, 7)]
    words = np.stack([np.concatenate([stored.view(np.uint32).ravel(), order.astype(np.uint32)]) for order in orders])
    outputs = emulations.run(CHECK[f"{name} x{count}"], words).view(np.uint16).reshape(len(orders), LANES, count, 2)
    for case, order in enumerate(orders):
        given = {place: int(order[lane]) for lane, place in enumerate(LDMATRIX_ROWS[count])}
        for lane in range(LANES):
            for matrix in range(count):
                for half in range(2):
                    row, column = fragment.place(lane, half)
                    assert outputs[case, lane, matrix, half] == stored[given[matrix, row], column]


WRONG_ROW = """
namespace cukiln {
namespace confirm {
struct Arguments {
  const void* in;
  void* out;
};
__device__ __forceinline__ void wrong_row(const Arguments arguments) {
  const int* const wrong = static_cast<const int*>(arguments.in);  // a lane, and its offset
  unsigned found[2];
  ldmatrix(found, shared_memory<unsigned char>() + (static_cast<int>(threadIdx.x) == wrong[0] ? wrong[1] : 0));
}
__device__ __forceinline__ void endless(const Arguments) {
  volatile int turns = 0;
  while (true) turns = turns ^ 1;
}
}
}
"""
WRONG = replace(CHECK["ldmatrix x2"], name="wrong", kernel="wrong_row", shared_bytes=64)
ENDLESS = replace(WRONG, name="endless", kernel="endless")


@pytest.fixture(scope="module")
def wrong_rows(tmp_path_factory: pytest.TempPathFactory) -> CpuEmulations:
    folder = tmp_path_factory.mktemp("wrong_row")
    (folder / "wrong_row.cuh").write_text(WRONG_ROW)
    return CpuEmulations([WRONG, ENDLESS], folder, folder / "wrong_row.cuh")


@pytest.mark.parametrize(
    ("lane", "offset", "message"),
    [
        (3, 8, "misaligned in its 64 bytes"),
        (15, 64, "outside of its 64 bytes"),
        (16, 64, "outside of its 64 bytes"),  # not read, but up to sm_75 it must be valid
        (31, 20, "misaligned in its 64 bytes"),
    ],
)
def test_ldmatrix_refuses_an_address_that_is_no_row(
    lane: int, offset: int, message: str, wrong_rows: CpuEmulations
) -> None:
    with pytest.raises(RunFailed, match=rf"wrong_row.cuh:11: ldmatrix .*{message}.*thread {lane},0,0"):
        wrong_rows.run(WRONG, np.array([[lane, offset]], np.uint32))


def test_time_that_ran_out_is_no_verdict_on_a_kernel(
    wrong_rows: CpuEmulations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_primitives, "CPU_SECONDS", 0.05)
    with pytest.raises(RunFailed, match="still running after") as late:
        wrong_rows.run(ENDLESS, np.zeros((1, 2), np.uint32))
    with pytest.raises(RunFailed, match="misaligned") as wrong:
        wrong_rows.run(WRONG, np.array([[3, 8]], np.uint32))
    assert (late.value.is_verdict, wrong.value.is_verdict) == (False, True)


# --- what lanes, warps and threads exchange


@pytest.mark.parametrize("name", SHUFFLES)
def test_every_lane_gets_the_value_of_the_lane_of_the_table(name: str, emulations: CpuEmulations) -> None:
    lanes = np.arange(32, dtype=np.uint32)
    uniform = np.stack([np.stack([lanes + 100, np.full(32, operand)], axis=1) for operand in range(32)])
    own = np.stack([np.stack([lanes + 100, (lanes * 5 + step) % 32], axis=1) for step in range(32)])
    beyond = uniform + np.array([0, 32], np.uint32)  # counted modulo 32
    words = np.concatenate([uniform, own, beyond]).astype(np.uint32)
    outputs = emulations.run(CHECK["shuffles"], words.reshape(-1, 64)).reshape(-1, 32, 4)[
        :, :, list(SHUFFLES).index(name)
    ]
    expected = [[100 + SHUFFLES[name](lane, int(block[lane, 1]) % 32) for lane in range(32)] for block in words]
    np.testing.assert_array_equal(outputs, expected)


def test_votes_say_any_all_and_which(emulations: CpuEmulations) -> None:
    votes = np.concatenate([np.zeros((1, 32)), np.ones((1, 32)), np.eye(32), 1 - np.eye(32)]).astype(np.uint32)
    outputs = emulations.run(CHECK["votes"], votes).reshape(-1, 32, 3)
    np.testing.assert_array_equal(outputs[:, :, 0], np.repeat(votes.any(axis=1)[:, None], 32, axis=1))
    np.testing.assert_array_equal(outputs[:, :, 1], np.repeat(votes.all(axis=1)[:, None], 32, axis=1))
    ballots = (votes.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=1).astype(np.uint32)
    np.testing.assert_array_equal(outputs[:, :, 2], np.repeat(ballots[:, None], 32, axis=1))


def given_and_computed(emulations: CpuEmulations, name: str) -> tuple[Words, Words]:
    words = CHECK[name].inputs(np.random.default_rng(3))
    return words, emulations.run(CHECK[name], words)


@pytest.mark.parametrize(
    ("name", "threads", "step", "first", "shift"), [("warp", 32, 7, 3, 1), ("block", 128, 37, 11, 33)]
)
def test_after_a_barrier_threads_see_what_others_wrote(
    name: str, threads: int, step: int, first: int, shift: int, emulations: CpuEmulations
) -> None:
    words, outputs = given_and_computed(emulations, name)
    own = np.arange(threads)
    np.testing.assert_array_equal(outputs[:, 0::2], words[:, (own * step + first) % threads])
    np.testing.assert_array_equal(outputs[:, 1::2], np.broadcast_to((own - shift) % threads, words.shape))


def test_named_barriers_hand_over_between_some_warps(emulations: CpuEmulations) -> None:
    words, outputs = given_and_computed(emulations, "some warps")
    lanes = np.arange(32)
    handed = words[:, (lanes + 5) % 32]
    np.testing.assert_array_equal(outputs[:, 32:64], handed)
    np.testing.assert_array_equal(outputs[:, :32], (handed ^ words[:, 32:64])[:, (lanes + 1) % 32])
    np.testing.assert_array_equal(outputs[:, 64:], ~words[:, 64:])


@pytest.mark.parametrize("name", [check.name for check in CHECKS if check.name.startswith("vectors")])
def test_vectors_arrive_whole(name: str, emulations: CpuEmulations) -> None:
    words, outputs = given_and_computed(emulations, name)
    copied, turned = np.split(outputs.view(np.uint8), 2, axis=1)
    np.testing.assert_array_equal(copied, words.view(np.uint8))
    np.testing.assert_array_equal(
        turned.reshape(len(words), 32, -1), words.view(np.uint8).reshape(len(words), 32, -1)[:, ::-1]
    )


def test_copies_that_are_not_wanted_leave_zeros(emulations: CpuEmulations) -> None:
    words, outputs = given_and_computed(emulations, "copies")
    given, made = words.reshape(-1, 32, 16), outputs.reshape(-1, 32, 20)
    wanted = given[:, :, 12]
    expected = given[:, :, :12].copy()
    for bit, part in enumerate((slice(0, 4), slice(4, 6), slice(6, 7), slice(7, 8), slice(8, 12))):
        expected[:, :, part][(wanted >> bit) % 2 == 0] = 0
    np.testing.assert_array_equal(made[:, :, :6], expected[:, :, :6])
    np.testing.assert_array_equal(made[:, :, 6:18], np.roll(expected, -1, axis=1))


def test_additions_to_memory_flush_subnormals_and_wrap_integers(emulations: CpuEmulations) -> None:
    words, outputs = given_and_computed(emulations, "additions")
    given = words.reshape(-1, 32, 6)
    smallest = np.finfo(np.float32).smallest_normal

    def flushed(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.where(np.abs(x) < smallest, np.copysign(np.float32(0), x), x)

    start, addend, part = (np.ascontiguousarray(given[:, :, i]).view(np.float32) for i in range(3))
    with np.errstate(all="ignore"):
        expected = flushed(flushed(start) + flushed(addend))
    assert (np.abs(start) < smallest).any() and np.isnan(expected).any()
    np.testing.assert_array_equal(np.isnan(outputs[:, :32].view(np.float32)), np.isnan(expected))
    numbers_ = ~np.isnan(expected)
    np.testing.assert_array_equal(outputs[:, :32][numbers_], expected.view(np.uint32)[numbers_])
    np.testing.assert_array_equal(np.ascontiguousarray(outputs[:, 32]).view(np.float32), part.sum(axis=1))
    np.testing.assert_array_equal(outputs[:, 33:65], given[:, :, 3] + given[:, :, 4])
    np.testing.assert_array_equal(outputs[:, 65], given[:, :, 5].sum(axis=1, dtype=np.uint32))


# --- conversions


def test_conversions_agree_with_numpy_on_every_half_and_on_floats_of_all_sizes(emulations: CpuEmulations) -> None:
    words, outputs = given_and_computed(emulations, "conversions")
    bits = words.reshape(-1, 4)[:, 0].copy()
    floats, low = bits.view(np.float32), (bits & np.uint32(0xFFFF)).astype(np.uint16)
    with np.errstate(all="ignore"):
        expected = [
            floats,
            bits.view(np.int32).astype(np.float32),
            low.view(np.float16).astype(np.float32),
            low.view(ml_dtypes.bfloat16).astype(np.float32),
            floats,
            floats.astype(np.float16).astype(np.float32),
            floats.astype(ml_dtypes.bfloat16).astype(np.float32),
        ]
    made = outputs.view(np.float32).reshape(-1, 7)
    for i, array in enumerate(expected):
        np.testing.assert_array_equal(np.isnan(made[:, i]), np.isnan(array))
        real = ~np.isnan(array)
        np.testing.assert_array_equal(
            np.ascontiguousarray(made[:, i]).view(np.uint32)[real], array.view(np.uint32)[real]
        )


def test_four_words_are_transposed_as_bytes(emulations: CpuEmulations) -> None:
    words, outputs = given_and_computed(emulations, "bytes")
    square = words.view(np.uint8).reshape(-1, 4, 4)
    np.testing.assert_array_equal(outputs.view(np.uint8).reshape(-1, 4, 4), square.transpose(0, 2, 1))


# --- completeness


def test_every_primitive_has_an_emulation() -> None:
    emulations = "".join((DEVICE / header).read_text() for header in EMULATION_HEADERS)
    for name in primitives():
        assert re.search(rf"^(?:CUKILN_INLINE|inline|#define) [^(=]*\b{name}\(", emulations, re.MULTILINE), name


def test_every_function_that_a_primitive_header_offers_is_a_primitive() -> None:
    """Helpers are `static`, so that the search for primitives passes them by."""
    for header in PRIMITIVE_HEADERS:
        for line in (DEVICE / header).read_text().splitlines():
            if match := re.match(r"__device__ .*?(\w+)\(", line):
                assert match[1] in primitives(), line
