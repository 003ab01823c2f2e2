"""Kernels that are wrong without lacking a barrier or a check: confused extents and pitches, a lost element along k, a
shuffled epilogue. The test plan catches each one, in every Config that the change reaches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from codegen import render_cpu
from codegen.operators import operator
from tests.cpu_helpers import loaded, matmul_kernel, verify
from tests.mutants import write_operator

# Level 1's usual tile and its large one, of which the plan's larger problems have room for one only.
LARGE = {"tile_m": 128, "tile_n": 128, "tile_k": 16, "thread_m": 8, "thread_n": 8, "unroll_k": 8, "stages": 2}
CONFIGS: tuple[dict[str, Any], ...] = (
    {"layout": "nn", "align": 1, "stages": 2, "fragments": 2, "epilogue": ("bias.n", "residual")},
    {"layout": "nn", "align": 4, "fragments": 2, "epilogue": ("bias.n", "residual"), **LARGE},
    {"layout": "nt", "align": 1, "fragments": 2, "epilogue": ("bias.m", "mask"), **LARGE},
)
NN, LARGE_ONES, ODD_K = (0, 1), (1, 2), (0, 2)


@dataclass(frozen=True)
class Wrong:
    """`old` stands once in the text and becomes `new`; `reached`: the Configs in which that matters."""

    old: str
    new: str
    reached: tuple[int, ...] = (0, 1, 2)


KERNELS = {
    "out's pitch is that of B": Wrong("row * arguments.ldc +", "row * arguments.ldb +"),
    "out's rows are packed": Wrong("row * arguments.ldc +", "row * int64_t(arguments.n) +"),
    "out's matrices are packed": Wrong("tile.matrix * arguments.stride_c", "tile.matrix * arguments.ldc * arguments.m"),
    "A's matrices lie like those of B": Wrong("tile.matrix * arguments.stride_a", "tile.matrix * arguments.stride_b"),
    "B is the first of the batch": Wrong("tile.matrix * arguments.stride_b", "0"),
    "A's rows are packed": Wrong("arguments.lda, rows_left, k_left -", "arguments.k, rows_left, k_left -"),
    "m stands for n in the rows left": Wrong("rows_left = arguments.m -", "rows_left = arguments.n -"),
    "n bounds the rows": Wrong("in_bounds(row, arguments.m)", "in_bounds(row, arguments.n)"),
    "m bounds the columns": Wrong("in_bounds(column, arguments.n)", "in_bounds(column, arguments.m)"),
    "tiles along n counted by m": Wrong("tiles_n = (arguments.n - 1)", "tiles_n = (arguments.m - 1)"),
    "a matrix has tiles_m squared tiles": Wrong("per_matrix = tiles_m * tiles_n;", "per_matrix = tiles_m * tiles_m;"),
    "a band one row short": Wrong("tiles_m - band * band_rows)", "tiles_m - band * band_rows - (band > 0))"),
    "the last band full": Wrong("smaller(band_rows, tiles_m - band * band_rows)", "band_rows"),
    "the last k lost": Wrong("rows_left, arguments.k);", "rows_left, arguments.k - 1);", ODD_K),
    "the last k of a later tile lost": Wrong(
        "columns_left, k_left - C::tile_k);", "columns_left, k_left - C::tile_k - 1);"
    ),
    "a step along k lost": Wrong("k_left > 0;", "k_left > C::tile_k / 2;"),
    "the last fragment not read ahead": Wrong("if (k + 1 < C::tile_k)", "if (k + 2 < C::tile_k)"),
    "the last stage read again": Wrong("stage ^= 1;", "stage = 1;"),
    "quads not spread": Wrong("j / FragmentB::quad * quad_stride_n + j % FragmentB::quad", "j", LARGE_ONES),
    "a bias of the tile, not of the matrix": Wrong(
        "Position{row, column, offset}",
        "Position{row - tile.row * C::tile_m, column - tile.column * C::tile_n, offset}",
    ),
    "the epilogue of the first matrix for all": Wrong(
        "Position{row, column, offset}", "Position{row, column, offset - tile.matrix * arguments.stride_c}"
    ),
    "products in half precision": Wrong("fma(a.data[i], b.data[j],", "fma(round_to_half(a.data[i]), b.data[j],"),
    "sums in bfloat16": Wrong("accumulators[i][j + w];", "round_to_bfloat16(accumulators[i][j + w]);"),
}  # fmt: skip


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[str]]:
    """By name, a verdict per Config. One g++ file and one verification for all."""
    folder, text = tmp_path_factory.mktemp("wrong"), operator("matmul").kernel_text
    names = {wrong: f"matmul_wrong_{number}" for number, wrong in enumerate(KERNELS)}
    folders = []
    for wrong, name in names.items():
        change = KERNELS[wrong]
        assert text.count(change.old) == 1, wrong
        folders.append(write_operator(folder / name, "matmul", "Matmul", name, text.replace(change.old, change.new)))
    kernels = {wrong: [matmul_kernel(operator=name, **config) for config in CONFIGS] for wrong, name in names.items()}
    with loaded(folders):
        judged = {one.kernel_id: one.verdict for one in verify([k for group in kernels.values() for k in group])}
    return {wrong: [judged[kernel.id] for kernel in group] for wrong, group in kernels.items()}


@pytest.mark.parametrize("wrong", KERNELS)
def test_a_wrong_kernel_is_caught(wrong: str, verdicts: Mapping[str, list[str]]) -> None:
    assert [index for index in KERNELS[wrong].reached if verdicts[wrong][index] == "ok"] == []


EPILOGUES = {
    "order": (
        ("scale", "bias.n", "relu"),
        "    Node::template apply<T, S, N>(value, at, arguments);\n"
        "    apply_from<T + Node::tensors, S + Node::scalars, N, Rest...>(value, at, arguments);",
        "    apply_from<T + Node::tensors, S + Node::scalars, N, Rest...>(value, at, arguments);\n"
        "    Node::template apply<T, S, N>(value, at, arguments);",
    ),
    "tensors": (("bias.n", "residual", "bias.m"), "apply_from<T + Node::tensors,", "apply_from<T,"),
    "scalars": (("scale", "clip"), "S + Node::scalars, N", "S, N"),
    "relu": (("relu",), "return x < 0.0f ? 0.0f : x; }\n};\nstruct LeakyRelu", "return x; }\n};\nstruct LeakyRelu"),
    "leaky relu": (("leaky_relu",), "x < 0.0f ? x * scalars[0] : x;", "x * scalars[0];"),
    "the upper end of a clip": (("clip",), "x > scalars[1] ? scalars[1] : x", "x"),
    "the lower end of a clip": (("clip",), "x < scalars[0] ? scalars[0] :", "false ? scalars[0] :"),
    "one bit of a mask": (("mask",), "kept.data[i] != 0 ?", "(kept.data[i] & 1) ?"),
    "gelu by tanh": (
        ("gelu",), "1.0f + cukiln::erf(x * 0.70710678118654752f)",
        "1.0f + cukiln::tanh(0.79788456f * (x + 0.044715f * x * x * x))",
    ),
    "gelu's constant": (("gelu",), "0.70710678118654752f", "0.7071f"),
    "silu": (("silu",), "x / (1.0f + cukiln::exp(-x))", "x / (1.0001f + cukiln::exp(-x))"),
    "half for bfloat16": (("cast.bfloat16",), "return round_to_bfloat16(x);", "return round_to_half(x);"),
    "no cast": (("cast.float16",), "return round_to_half(x);", "return x;"),
}  # fmt: skip


@contextmanager
def epilogue_changed(old: str, new: str) -> Iterator[None]:
    def changed(path: str) -> str:
        text = unchanged(path)
        assert path != "epilogue.cuh" or text.count(old) == 1
        return text.replace(old, new) if path == "epilogue.cuh" else text

    unchanged = render_cpu.header_text
    render_cpu.header_text = changed  # type: ignore[assignment]
    try:
        yield
    finally:
        render_cpu.header_text = unchanged


@pytest.mark.parametrize("wrong", EPILOGUES)
def test_a_wrong_epilogue_is_caught(wrong: str) -> None:
    chain, old, new = EPILOGUES[wrong]
    with epilogue_changed(old, new):
        (verdict,) = verify([matmul_kernel(epilogue=chain)])
    assert verdict.verdict in ("incorrect", "runtime_error")
