"""Wrong kernels: what stands in matmul's text or in the epilogue's, and what is wrong in its place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wrong:
    """`old` stands once in `file` and becomes `new`: both expressions, or both statements. `harmless`: Configs that the
    change reaches without consequence: nothing there is split, or placed, or of A."""

    file: str
    old: str
    new: str
    harmless: tuple[str, ...] = ()


TILE, SIMT, TENSOR, SPLIT = "gemm/tile.cuh", "gemm/simt.cuh", "gemm/tensor.cuh", "gemm/split.cuh"

# Configs of the test whose k is not divided.
UNSPLIT = ("fp16 nn", "fp16 tt, read ahead", "fp16 nt, halves of mma", "tf32 tn", "int8 nn", "int8 tn, short rows")
_APPLIED = "C::Epilogue::apply(value, at, arguments.epilogue);"
_STORE = "store_global<width>(partial, sums);"
_PER_SLICE = (
    "Vector<typename C::Accumulator, width> twice = sums; "
    "if constexpr (is_same<typename C::Accumulator, float>) C::Epilogue::apply(twice, Position{row, column, "
    "matrix * arguments.stride_c + row * arguments.ldc + column}, arguments.epilogue); "
    "store_global<width>(partial, twice);"
)
_TO_HALF = (
    "multiply(fragments[k % C::fragments]); for (auto& row : sums) for (auto& piece : row) for (auto& one : piece) "
    "one = static_cast<Accumulator>(round_to_half(static_cast<float>(one)));"
)
COMMON = {
    "out's pitch is that of B": Wrong("kernel.cuh", "row * ldc", "row * ldb"),
    "out's rows are packed": Wrong("kernel.cuh", "row * ldc", "row * int64_t(n)"),
    "out's matrices are packed": Wrong("kernel.cuh", "matrix * stride_c", "matrix * ldc * m"),
    "the last band full": Wrong(TILE, "smaller(band_rows, tiles_m - band * band_rows)", "band_rows"),
    "a band one row short": Wrong(TILE, "tiles_m - band * band_rows", "tiles_m - band * band_rows - (band > 0)"),
    "a bias of the tile, not of the matrix": Wrong(
        TILE,
        _APPLIED,
        _APPLIED.replace("at,", "Position{row % C::tile_m, column % C::tile_n, at.offset},"),
        ("fp16 nt, halves of mma", "tf32 tn"),
    ),
    "the epilogue of the first matrix for all": Wrong(
        TILE,
        _APPLIED,
        _APPLIED.replace("at,", "Position{row, column, at.offset - matrix * arguments.stride_c},"),
        ("fp16 tt, read ahead", "int8 nn", "int8 tn, short rows", "fp16 nt, halves of mma", "fp16 nt, stream-K"),
    ),
    "outputs by way of bfloat16": Wrong(TILE, "to_float(sums.data[i])", "round_to_bfloat16(to_float(sums.data[i]))"),
}
CUDA_CORES = {
    "B is the first of the batch": Wrong(SIMT, "tile.matrix * arguments.stride_b", "0"),
    "A's rows are packed": Wrong(
        SIMT,
        "loader_a.load(a, arguments.lda, rows_left, k_left);",
        "loader_a.load(a, arguments.k, rows_left, k_left);",
    ),
    "a step along k lost": Wrong(SIMT, "k_left > 0", "k_left > C::tile_k / 2"),
    "the last stage read again": Wrong(SIMT, "stage ^= 1;", "stage = 1;"),
    "quads not spread": Wrong(
        SIMT, "j / FragmentB::quad * quad_stride_n + j % FragmentB::quad", "j", ("simt nn, 1 element",)
    ),
    "products in half precision": Wrong(
        SIMT,
        "fma(a.data[i], b.data[j], accumulators[i][j])",
        "fma(round_to_half(a.data[i]), b.data[j], accumulators[i][j])",
    ),
    "sums in bfloat16": Wrong(SIMT, "accumulators[i][j + w]", "round_to_bfloat16(accumulators[i][j + w])"),
}
TENSOR_CORES = {
    "B is the first of the batch ": Wrong(TENSOR, "tile.matrix * arguments.stride_b", "0"),
    "A's fragments in another order": Wrong(
        TENSOR,
        "low + 8 * (of_a ? middle : high)",
        "low + 8 * (of_a ? 1 - middle : high)",
        ("fp16 tt, read ahead",),
    ),
    "halves of k swapped in A": Wrong(
        TENSOR,
        "chunk = of_a ? high : middle;",
        "chunk = of_a ? 1 - high : middle;",
        ("fp16 tt, read ahead",),
    ),
    "halves of k swapped in A, turned": Wrong(
        TENSOR,
        "row = low + 8 * (of_a ? high : middle);",
        "row = low + 8 * (of_a ? 1 - high : middle);",
        ("fp16 nn",),
    ),
    "halves of k swapped in A, by words": Wrong(TENSOR, "of_a ? i / 2 : i % 2", "of_a ? 1 - i / 2 : i % 2"),
    "columns of B swapped": Wrong(TENSOR, "fragments.b[j / 2][j % 2 * 2]", "fragments.b[j / 2][2 - j % 2 * 2]"),
    "a k-step read twice": Wrong(
        TENSOR,
        "load(fragments[0], stage, k);",
        "load(fragments[0], stage, k / 2 * 2);",
        ("int8 tn, short rows",),  # its tiles are one k-step deep
    ),
    "the last k-step lost": Wrong(
        TENSOR,
        "multiply(fragments[k % C::fragments]);",
        "if (k + 1 < k_steps) multiply(fragments[k % C::fragments]);",
    ),
    "the last k-step lost, read ahead": Wrong(
        TENSOR, "warp.multiply(odd);", "if (k + 1 < W::k_steps) warp.multiply(odd);"
    ),
    "the last tile of k lost": Wrong(
        TENSOR, "(share.end - share.first - 1) / C::tile_k + 1", "(share.end - share.first) / C::tile_k"
    ),
    "sums in half precision": Wrong(TENSOR, "multiply(fragments[k % C::fragments]);", _TO_HALF),
    "bytes in the order of descending k": Wrong(
        TENSOR, "source + (k + j) * pitch + outer", "source + (k + 3 - j) * pitch + outer"
    ),
    # Neighbours along k turn by the same, those along m or n each by another; in "int8 nn" there are none of those.
    "turned squares begin at another row": Wrong(TENSOR, "(column ^ turn)", "(column ^ (turn >> 1))", ("int8 nn",)),
    "words exchanged by the unit of k": Wrong(TENSOR, "turn & 1", "unit(i) % units_k & 1"),
    "units of k counted along m or n": Wrong(TENSOR, "k % chunk_bytes", "unit(i) / units_k * 4 % chunk_bytes"),
    "rows of halves swapped on the way out": Wrong(
        TENSOR, "i * 16 + half * 8 + lane / 4", "i * 16 + (1 - half) * 8 + lane / 4"
    ),
    "rows of halves swapped in the exchange": Wrong(
        TENSOR, "(half * 8 + lane / 4) * pitch", "((1 - half) * 8 + lane / 4) * pitch"
    ),
}
DIVIDED = {
    "slices leave a gap": Wrong(
        TILE,
        "static_cast<int>(slice * steps / arguments.slices)",
        "static_cast<int>(slice * steps / arguments.slices) + (slice > 0)",
    ),
    "every slice is the first of A": Wrong(
        TENSOR,
        "(C::a_transposed ? row + share.first * lda : row * lda + share.first)",
        "(C::a_transposed ? row : row * lda)",
        UNSPLIT,
    ),
    "a slice takes the rest of k": Wrong(TENSOR, "(share.end - share.first)", "(arguments.k)", UNSPLIT),
    "a slice is added twice": Wrong(SPLIT, "partial += slice_elements;", "if (slice != 2) partial += slice_elements;"),
    "blocks end elsewhere than the reduction thinks": Wrong(
        TILE,
        "total % blocks * block / blocks",
        "total % blocks * block / blocks + (block > 0 && block < blocks)",
    ),
    "the epilogue for every slice": Wrong(TILE, _STORE, _PER_SLICE),
    "all slices write to the first": Wrong(
        TILE, "C::split == split_atomic ? 0 : blockIdx.y", "0", ("int8 nt, atomic",)
    ),
}

# By the chain of nodes that shows it.
_NEXT = "apply_from<tensor_index + Node::tensors, scalar_index + Node::scalars, N, Rest...>(value, at, arguments);"
_APPLY = "Node::template apply<tensor_index, scalar_index, N>(value, at, arguments);"
_ERF, _CLIP = "1.0f + cukiln::erf(x * 0.70710678118654752f)", "(x > scalars[1] ? scalars[1] : x)"
EPILOGUES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "order": (("scale", "bias.n", "relu"), _APPLY, f"{_NEXT} {_APPLY} return;"),
    "tensors": (("bias.n", "residual", "bias.m"), _NEXT, _NEXT.replace("tensor_index + Node::tensors", "tensor_index")),
    "scalars": (("scale", "clip"), _NEXT, _NEXT.replace("scalar_index + Node::scalars", "scalar_index")),
    "relu": (("relu",), "x < V(0) ? V(0) : x", "x"),
    "leaky relu": (("leaky_relu",), "x < 0.0f ? x * scalars[0] : x", "x * scalars[0]"),
    "the lower end of a clip": (("clip",), f"x < scalars[0] ? scalars[0] : {_CLIP}", _CLIP),
    "the upper end of a clip": (("clip",), "x > scalars[1] ? scalars[1] : x", "x"),
    "one bit of a mask": (("mask",), "kept.data[i] != 0", "kept.data[i] & 1"),
    "one bit of a mask's byte": (("masked_activation.bytes.relu.square",), "read.data[i] != 0", "read.data[i] & 1"),
    "the bits of a word from the highest": (
        ("masked_activation.bits.relu.square",),
        "static_cast<int>(offset & 31)",
        "static_cast<int>(31 - (offset & 31))",
    ),
    "every word is the first": (("masked_activation.bits.relu.square",), "(offset >> 5)", "0"),
    "the scalars of the other function": (
        ("masked_activation.bits.polynomial2.polynomial3",),
        "scalars_of_set + Set::scalars",
        "scalars_of_set",
    ),
    "gelu by tanh": (("gelu",), _ERF, "1.0f + cukiln::tanh(0.79788456f * (x + 0.044715f * x * x * x))"),
    "gelu's constant": (("gelu",), "0.70710678118654752f", "0.7071f"),
    "silu": (("silu",), "x / (1.0f + cukiln::exp(-x))", "x / (1.0001f + cukiln::exp(-x))"),
    "sigmoid": (("sigmoid",), "1.0f / (1.0f + cukiln::exp(-x))", "1.0001f / (1.0f + cukiln::exp(-x))"),
    "tanh": (("tanh",), "cukiln::tanh(x)", "1.0001f * cukiln::tanh(x)"),
    "half for bfloat16": (("cast.bfloat16",), "round_to_bfloat16(x)", "round_to_half(x)"),
    "no cast": (("cast.float16",), "round_to_half(x)", "x"),
}
# Nodes that are right on numbers, but for the sign of a zero: a chain of matmul's, or the node of a masked activation.
_RELU, _MASK = "x < V(0) ? V(0) : x", "kept.data[i] != 0 ? value.data[i] : V(0)"
_LEAKY, _LARGEST = "x < 0.0f ? x * scalars[0] : x", "x > 0.0f ? 65504.0f : -65504.0f"
SPECIAL_EPILOGUES: dict[str, tuple[tuple[str, ...] | str, str, str]] = {
    "relu loses NaN": (("relu",), _RELU, "x > V(0) ? x : V(0)"),
    "leaky relu loses NaN": (("leaky_relu",), _LEAKY, f"{_LEAKY} > 0.0f ? x : 0.0f"),
    "clip loses NaN": (
        ("clip",), f"x < scalars[0] ? scalars[0] : {_CLIP}", f"!(x >= scalars[0]) ? scalars[0] : {_CLIP}",
    ),
    "relu is a product": (("relu",), _RELU, "x * V(x > V(0) || x != x)"),
    "relu writes -0": (("relu",), _RELU, "x < V(0) ? V(0) * V(-1) : x"),
    "a mask is a product": (("mask",), _MASK, "value.data[i] * V(kept.data[i] != 0)"),
    "a mask writes -0": (("mask",), _MASK, f"{_MASK} * V(-1)"),
    "infinities of either sign are one": (
        ("residual",), "return a + b;", "return a + b != a + b && a == a && b == b ? a : a + b;",
    ),
    "sigmoid divides infinities": (
        ("sigmoid",), "1.0f / (1.0f + cukiln::exp(-x))", "cukiln::exp(x) / (1.0f + cukiln::exp(x))",
    ),
    "a clip lets infinities through": (
        ("clip",), "x > scalars[1] ? scalars[1] : x", "x > scalars[1] && x - x == 0.0f ? scalars[1] : x",
    ),
    "a cast makes numbers of infinities": (
        ("cast.float16",), "round_to_half(x)", f"x - x != 0.0f && x == x ? ({_LARGEST}) : round_to_half(x)",
    ),
    "an identity loses -0": ("bits.relu.identity", "return x;", "return x + V(0);"),
    "a relu loses -0": ("bits.relu.identity", _RELU, "x > V(0) || x != x ? x : V(0)"),
    "a relu takes the smallest number for 0": ("bits.relu.identity", _RELU, "x < V(1e-38f) && x != V(0) ? V(0) : x"),
}  # fmt: skip
