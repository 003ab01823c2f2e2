"""How long a sum of products of limbs may be: what the accumulators hold, run to their ends.

With every limb 255 diagonal 3 grows by 4 * 255^2 for each element of k. It passes 2^31 at a k of 8,257, from which on
it must be read as unsigned, and 2^32 behind 16,512. The problems of the verification plan are shorter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codegen.fixed_point import bits_of
from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.operators.matmul.limbs import unchained_k
from codegen.operators.matmul.ring_space import CHAIN_K
from tests.operators.matmul.ring_kernels import ring_kernel
from tests.support.kernels import ring_runs
from tests.support.kernels.mutants import changed, switched_operator
from tests.support.kernels.ring_runs import UNCHAINED_K, Built, in_parts

TILE: dict[str, Any] = {"tile_m": 16, "tile_n": 16, "warps_m": 1, "warps_n": 1, "algorithm": "limbs"}
KERNELS: Mapping[str, Kernel] = {
    "nt": ring_kernel("nt", **TILE),
    "nn": ring_kernel("nn", **TILE),
    "int32": ring_kernel("nt", "int32", **TILE),
    "tiles": ring_kernel("nt", bits=3, **{**TILE, "truncate": "tile"}),
    **{f"chain_k {chain}": ring_kernel("nt", **TILE, chain_k=chain) for chain in CHAIN_K.allowed if chain},
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return ring_runs.built(KERNELS, tmp_path_factory.mktemp("limbs"))


def ones(k: int, dtype: str = "int64") -> Any:
    """Every limb is 255."""
    return np.full((2, k), -1, dtype)


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("k", [8_256, 8_258, UNCHAINED_K])
def test_diagonals_are_right_to_the_longest_k(built: Built, layout: str, k: int) -> None:
    a, b = ones(k), ones(k).T
    np.testing.assert_array_equal(built.run(layout, a, b), np.full((2, 2), k))


def test_a_diagonal_that_is_read_with_its_sign_shows_behind_2_to_the_31(tmp_path: Path) -> None:
    text = "static_cast<Unsigned>(static_cast<unsigned>(diagonals[i][j][d][r]))"
    file = "gemm/limbs.cuh"
    signed = changed(
        operator("matmul").kernel_texts, "signed", file, text, "static_cast<Unsigned>(diagonals[i][j][d][r])"
    )
    with switched_operator("matmul", "Matmul", tmp_path / "operator", "matmul_signed", [signed]):
        kernel = ring_kernel("nt", operator="matmul_signed", **TILE)
        built = ring_runs.built({"nt": kernel}, tmp_path)
    switch = ctypes.c_int.in_dll(ctypes.CDLL(str(built.path)), "cukiln_mutant")
    for k, unseen in ((8_256, True), (8_258, False)):
        switch.value = 0
        assert np.array_equal(built.run("nt", ones(k), ones(k).T), np.full((2, 2), k)) == unseen
        switch.value = -1
        assert np.array_equal(built.run("nt", ones(k), ones(k).T), np.full((2, 2), k))


@pytest.mark.parametrize(
    ("ring", "diagonal", "k"), [("int64", 3, UNCHAINED_K), ("int40", 0, 66_051), ("int72", 4, 13_210)]
)
def test_the_bound_is_where_the_last_diagonal_that_may_not_wrap_around_is_full(
    ring: str, diagonal: int, k: int
) -> None:
    """Of diagonal d the lowest b - 8 d bits count, which are 32 at most behind that one; it has d + 1 products."""
    assert bits_of(ring) - 8 * diagonal > 32 >= bits_of(ring) - 8 * (diagonal + 1)
    assert (diagonal + 1) * 255**2 * k < 2**32 <= (diagonal + 1) * 255**2 * (k + 1)
    assert unchained_k(ring) == k


def test_carries_leave_room_in_the_diagonals_of_nine_limbs() -> None:
    """Those of 8,192 elements, with what the diagonal before hands on; of more they would not fit."""
    held = 0
    for diagonal in range(5):
        held = (diagonal + 1) * 255**2 * 8192 + 255 + held // 256
        assert held < 2**32
    assert 5 * 255**2 * 16_384 >= 2**32


def test_a_longer_k_is_launched_by_no_kernel_without_carries(built: Built) -> None:
    assert built.run("nt", ones(UNCHAINED_K + 2), ones(UNCHAINED_K + 2).T) is None


@pytest.mark.parametrize("chain", [chain for chain in CHAIN_K.allowed if chain])
def test_with_carries_any_k_is_right(built: Built, chain: int) -> None:
    """Half as long again as two carries take, and longer than what fits without any."""
    k = max(UNCHAINED_K, 2 * chain + chain // 2) + 34
    a, b = ones(k), ones(k).T.copy()
    np.testing.assert_array_equal(built.run(f"chain_k {chain}", a, b), np.full((2, 2), k))
    a[1], b[:, 1] = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, (2, k), endpoint=True)
    np.testing.assert_array_equal(built.run(f"chain_k {chain}", a, b), in_parts(a, b, [0], 0, "floor"))


def test_of_int32_and_of_truncated_tiles_any_k_is_right(built: Built) -> None:
    k = 2 * UNCHAINED_K + 4
    np.testing.assert_array_equal(built.run("int32", ones(k, "int32"), ones(k, "int32").T), np.full((2, 2), k))
    a, b = np.full((2, k), -8), np.full((k, 2), -1)
    np.testing.assert_array_equal(built.run("tiles", a, b), np.full((2, 2), k))
