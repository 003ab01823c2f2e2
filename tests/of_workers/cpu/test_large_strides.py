"""Rows and matrices that lie 2^31 elements apart and more: an offset computed in 32 bits ends elsewhere.

Their memory is mapped and hardly touched: what lies between rows of a few elements never gets a page.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from tests.support.kernels.cpu_helpers import LIMITS, matmul_kernel, processes, tensor_kernel, toolchain
from tests.support.kernels.mutants import changed, switched_matmul
from workers.cpu.build import build_cpu
from workers.cpu.library import CpuLibrary, Outcome, Tensor

NAME = "matmul_large"
PITCH = 2**31 + 64
AS_IT_IS = -1
Launch = tuple[int, int, int]  # raster, split_k, stream_blocks


@dataclass(frozen=True)
class Large:
    """A kernel, its problem and its launch-time tunables. Two tiles along at least one axis, because what a tile's
    own place adds to an address is 0 in the first one."""

    kernel: Kernel
    problem: Mapping[str, Any]
    launch: Launch


def _simt(layout: str, m: int, n: int, k: int, launch: Launch = (0, 1, 0), **words: Any) -> Large:
    return Large(matmul_kernel(layout, operator=NAME, **words), _problem(layout, "float32", m, n, k, words), launch)


def _tensor(layout: str, dtype: str, m: int, n: int, k: int, launch: Launch = (0, 1, 0), **words: Any) -> Large:
    return Large(tensor_kernel(layout, dtype, operator=NAME, **words), _problem(layout, dtype, m, n, k, words), launch)


def _problem(layout: str, dtype: str, m: int, n: int, k: int, words: Mapping[str, Any]) -> dict[str, Any]:
    nodes = [{"op": name} for name in words.get("epilogue", ())]
    shape = {"m": m, "n": n, "k": k, "batch": 2, "lda": PITCH, "ldb": PITCH, "ldc": PITCH}
    return {"operator": "matmul", "layout": layout, "dtype": dtype, "epilogue": nodes, **shape}


# Tiles have 32 x 32 x 8 elements on CUDA cores, else 32 x 16 x 32 (int8: 64).
CASES = {
    "simt nn": _simt("nn", 34, 32, 12, epilogue=("residual",)),
    "simt tt": _simt("tt", 32, 36, 12),
    "simt tn, workspace": _simt("tn", 32, 32, 16, (0, 2, 0), split="workspace"),
    "fp16 nn": _tensor("nn", "float16", 34, 16, 40, epilogue=("residual",)),
    "fp16 tt": _tensor("tt", "float16", 32, 24, 40),
    "fp16 tt, workspace": _tensor("tt", "float16", 32, 24, 64, (0, 2, 0), split="workspace"),
    "fp16 nn, stream-K": _tensor("nn", "float16", 34, 16, 64, (0, 1, 3), split="stream"),
    "int8 nn": _tensor("nn", "int8", 34, 16, 80, copy="registers"),
    "int8 nt": _tensor("nt", "int8", 34, 20, 64),
}
# By file: what the kernels compute in 64 bits and a `static_cast<int>` would end.
PRODUCTS = {
    "kernel.cuh": ("row * ldc", "matrix * stride_c"),
    "gemm/tile.cuh": ("row(0) * pitch",),
    "gemm/simt.cuh": (
        "tile.matrix * arguments.stride_a",
        "tile.matrix * arguments.stride_b",
        "first_row * arguments.lda",
        "first_column * arguments.ldb",
        "share.first * arguments.lda",
        "share.first * arguments.ldb",
        "C::tile_k * arguments.lda",
        "C::tile_k * arguments.ldb",
    ),
    "gemm/tensor.cuh": (
        "tile.matrix * arguments.stride_a",
        "tile.matrix * arguments.stride_b",
        "row * lda",
        "column * ldb",
        "share.first * lda",
        "share.first * ldb",
        "C::tile_k * lda",
        "C::tile_k * ldb",
    ),
}
WRONG = [(file, product) for file, products in PRODUCTS.items() for product in products]


class Library:
    """All kernels of CASES, with every wrong product behind a switch (tests/support/kernels/mutants.py)."""

    def __init__(self, folder: Path) -> None:
        build = build_cpu([case.kernel for case in CASES.values()], toolchain(), processes(), LIMITS, folder=folder)
        assert not build.errors, build.errors
        ((path, _),) = build.libraries
        self._library = CpuLibrary(path)
        switches = ctypes.CDLL(str(path))
        self._mutant = ctypes.c_int.in_dll(switches, "cukiln_mutant")
        self._reached = (ctypes.c_ubyte * len(WRONG)).in_dll(switches, "cukiln_reached")

    def is_right(self, case: Large, mutant: int) -> bool:
        """Whether a run on integers gives the reference exactly; what is said where AS_IT_IS does not."""
        self._mutant.value = mutant
        matmul = operator("matmul")
        problem = matmul.parse(case.problem)
        inputs = matmul.make_inputs(problem, "integer", np.random.default_rng(1))
        expected, _ = matmul.reference(problem, inputs, exact=True)
        tensors = self._library.allocate(matmul.operands(problem))
        try:
            # Element by element: filling a tensor would touch all of its memory.
            for tensor in tensors:
                tensor.view[...] = inputs[tensor.operand.name] if tensor.operand.role == "in" else -7
            outcome = self._run(case, tensors)
            out = next(tensor.view for tensor in tensors if tensor.operand.role == "out").astype(np.float64)
            right = outcome.status == "ok" and np.array_equal(out, expected)
            assert right or mutant != AS_IT_IS, outcome.message
            return right
        finally:
            tensors.clear()
            self._library.free()

    def _run(self, case: Large, tensors: list[Tensor]) -> Outcome:
        integers = operator("matmul").integers(operator("matmul").parse(case.problem))
        name, launch = case.kernel.namespace, case.launch
        workspace = self._library.workspace(name, integers, launch)
        call: dict[str, Any] = {"integers": integers, "launch": launch, "scalars": [], "cpu_seconds": 5.0}
        return self._library.run(name, tensors, workspace, order="ascending", seed=1, exact=True, **call)

    def reached(self, case: Large) -> set[int]:
        """The wrong products that a run of the right kernel asks for."""
        self._reached[:] = [0] * len(WRONG)
        self.is_right(case, AS_IT_IS)
        return {number for number, asked in enumerate(self._reached) if asked}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    folder, texts = tmp_path_factory.mktemp("large"), operator("matmul").kernel_texts
    sites = [
        changed(texts, f"{file}: {product}", file, product, f"static_cast<int>({product})") for file, product in WRONG
    ]
    with switched_matmul(folder / "operator", NAME, sites):
        yield Library(folder)


@pytest.mark.parametrize("name", CASES)
def test_distances_beyond_32_bits_are_right(name: str, library: Library) -> None:
    assert library.is_right(CASES[name], AS_IT_IS)


@pytest.mark.parametrize(("file", "product"), WRONG)
def test_a_product_in_32_bits_is_caught(file: str, product: str, library: Library) -> None:
    number = WRONG.index((file, product))
    reaching = [case for case in CASES.values() if number in library.reached(case)]
    assert reaching
    assert not all(library.is_right(case, number) for case in reaching)
