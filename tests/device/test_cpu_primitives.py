"""The CPU emulation of the primitives rounds, orders and aligns as it says, on every processor that we run on."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from codegen.kernel import Kernel
from codegen.operator import Operand
from codegen.operators import operator
from codegen.plan.verification_plan import Order
from codegen.text.render_cpu import render_cpu
from tests.support.kernels.cpu_helpers import LIMITS, faulty_kernel, loaded, matmul_kernel, processes, toolchain
from tests.support.run.places import FAULTY
from workers.cpu.build import build_cpu
from workers.cpu.library import CpuLibrary, alignment_of

RIGHT, ORDERED = (
    0,
    21,
)  # faults of the operator `faulty`: none; a result that tells which warp came last


@pytest.fixture(scope="module")
def kernels() -> Iterator[tuple[Kernel, ...]]:
    with loaded([FAULTY]):
        yield (faulty_kernel(RIGHT), faulty_kernel(ORDERED))


@pytest.fixture(scope="module")
def built(kernels: tuple[Kernel, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = build_cpu(kernels, toolchain(), processes(), LIMITS, folder=tmp_path_factory.mktemp("cpu"))
    ((path, _),) = build.libraries
    return path


@pytest.fixture(scope="module")
def library(built: Path) -> CpuLibrary:
    return CpuLibrary(built)


def rounded(built: Path, values: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    half, bfloat16 = np.empty_like(values), np.empty_like(values)
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (values, half, bfloat16)]
    ctypes.CDLL(str(built)).cukiln_round(*pointers, ctypes.c_int64(values.size))
    return half, bfloat16


def float32_values() -> NDArray[np.float32]:
    """Every half, its neighbours and the ties between halves, and a million random bit patterns."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = np.sort(halves[np.isfinite(halves)])
    ties = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    exact = np.concatenate([halves, ties, np.float32([65519.996, 65520, 65536, 1e-8, 3e38])])
    random = np.random.default_rng(7).integers(0, 2**32, 10**6, np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        return np.concatenate(
            [exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf)), random]
        )


def test_half_rounds_to_nearest_even_like_numpy(built: Path) -> None:
    values = float32_values()
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(np.float16).astype(np.float32)
    halves, _ = rounded(built, values)
    numbers = ~np.isnan(values)
    assert np.isnan(halves[~numbers]).all()
    np.testing.assert_array_equal(halves[numbers].view(np.uint32), expected[numbers].view(np.uint32))


def test_bfloat16_rounds_to_the_nearer_neighbour_and_ties_to_even(built: Path) -> None:
    values = float32_values()
    values = values[np.abs(values) < 3.38e38]  # beyond, the neighbour above is infinity, tested below
    _, rounded_ = rounded(built, values)
    below = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # towards zero
    above = (below.view(np.uint32) + np.uint32(0x10000)).view(np.float32)
    distance_below = np.abs(values.astype(np.float64) - below)
    distance_above = np.abs(values.astype(np.float64) - above)
    below_even = (below.view(np.uint32) >> np.uint32(16)) % 2 == 0
    take_below = (distance_below < distance_above) | ((distance_below == distance_above) & below_even)
    np.testing.assert_array_equal(rounded_.view(np.uint32), np.where(take_below, below, above).view(np.uint32))


def test_bfloat16_keeps_what_is_no_number_and_overflows_to_infinity(built: Path) -> None:
    _, rounded_ = rounded(built, np.float32([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38]))
    assert np.isnan(rounded_[0])
    np.testing.assert_array_equal(rounded_[1:], np.float32([np.inf, -np.inf, np.inf, -np.inf]))


def last_warp(library: CpuLibrary, kernel: Kernel, orders: Sequence[tuple[Order, int]]) -> list[int]:
    """Which of the two warps wrote last, for each order and seed."""
    op = operator(kernel.operator)
    (problem, *_) = op.test_problems(kernel)
    inputs = {"in": np.zeros((2, 128), np.float32)}
    tensors = library.allocate(op.operands(problem))
    tensors[0].fill(inputs["in"])
    orders_ = []
    for order, seed in orders:
        outcome = library.run(
            kernel.namespace, tensors, None, integers=op.integers(problem), launch=[], scalars=[], order=order,
            seed=seed,
            exact=True, cpu_seconds=5.0,
        )  # fmt: skip
        assert outcome.status == "ok"
        orders_.append(int(tensors[1].view[0, 0]) // 8)
    library.free()
    return orders_


def test_warps_run_in_the_order_asked_and_a_seed_repeats_its_own(
    library: CpuLibrary, kernels: tuple[Kernel, ...]
) -> None:
    assert last_warp(library, kernels[1], [("ascending", 1), ("descending", 1)]) == [1, 0]
    seeded: list[tuple[Order, int]] = [("seeded", seed) for seed in range(12)]
    result = last_warp(library, kernels[1], seeded)
    assert set(result) == {0, 1}
    assert last_warp(library, kernels[1], seeded) == result


@pytest.mark.parametrize(
    ("dtype", "shape", "strides", "alignment"),
    [
        ("float32", (8, 12), (12, 1), 16),
        ("float32", (8, 12), (13, 1), 4),
        ("float32", (8, 10), (12, 1), 8),
        ("float32", (1, 12), (13, 1), 16),  # one row: its pitch says nothing
        ("float32", (2, 8, 12), (98, 12, 1), 8),
        ("float32", (7,), (1,), 4),
        ("uint8", (8, 12), (12, 1), 4),
        ("float16", (8, 12), (16, 1), 8),
        ("bfloat16", (8, 12), (16, 1), 8),
        ("int8", (8, 12), (16, 1), 4),
        ("int32", (8, 12), (12, 1), 16),
    ],
)
def test_buffers_start_where_their_rows_allow_and_no_better(
    dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], alignment: int, library: CpuLibrary
) -> None:
    operand = Operand("x", dtype, "in", shape, strides)
    assert alignment_of(operand) == alignment
    (tensor,) = library.allocate([operand])
    address = tensor.view.ctypes.data
    assert address % alignment == 0
    assert alignment == 16 or address % (2 * alignment) == alignment
    library.free()


AARCH64 = ("aarch64-linux-gnu-g++", "qemu-aarch64-static")


@pytest.mark.skipif(not all(map(shutil.which, AARCH64)), reason=f"needs {' and '.join(AARCH64)}")
def test_the_aarch64_switch_runs_a_kernel(tmp_path: Path) -> None:
    """On x86-64 only under emulation; on an aarch64 machine all other tests use it."""
    kernel = matmul_kernel(stages=2)
    main = """
    int main() {
      const int m = 40, n = 36, k = 20;
      float* a = static_cast<float*>(cukiln_allocate("a", m * k * 4, 16, 0));
      float* b = static_cast<float*>(cukiln_allocate("b", k * n * 4, 16, 0));
      float* out = static_cast<float*>(cukiln_allocate("out", m * n * 4, 16, 1));
      for (int i = 0; i < m * k; ++i) a[i] = static_cast<float>(i * 7919 % 5 - 2);
      for (int i = 0; i < k * n; ++i) b[i] = static_cast<float>(i * 104729 % 7 - 3);
      void* pointers[] = {a, b, out};
      int64_t extents[] = {1, m, n, k, k, n, n, 0, 0, 0};
      const int32_t launch[] = {0};
      cukiln::cpu::Call call{pointers, extents, launch, nullptr, nullptr, 2, 1, 5, 0};
      int wrong = NAMESPACE_run(&call);
      for (int i = 0; i < m * n; ++i) {
        float sum = 0;
        for (int q = 0; q < k; ++q) sum += a[i / n * k + q] * b[q * n + i % n];
        wrong += sum != out[i];
      }
      extents[3] = k + 1;  // reads behind a: refused
      printf("wrong %d, then status %d: %s\\n", wrong, NAMESPACE_run(&call), cukiln_message());
    }
    """.replace("NAMESPACE", kernel.namespace)
    (tmp_path / "main.cpp").write_text(render_cpu([kernel]) + main)
    build = [
        AARCH64[0],
        "-std=c++17",
        "-O1",
        "-fno-exceptions",
        "-fno-rtti",
        "-static",
        "-Wno-unknown-pragmas",
        "main.cpp",
    ]
    subprocess.run([*build, "-o", "main"], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    run = subprocess.run([AARCH64[1], "./main"], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=120)
    assert run.stdout.startswith("wrong 0, then status 1: gemm/simt.cuh:")
