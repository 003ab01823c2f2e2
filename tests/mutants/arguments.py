"""Why some changed texts are the same kernel, though compilers make another one of them. An argument is about lines of
a file; `verify` checks that the outputs of such a mutant have the bits of the kernel as it is, in every case of its
plan under three seeds, and takes it for no equivalent where one bit differs. Where an argument says that only
roundings differ, all outputs have to be right in each of these cases."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.mutants.changes import Change

ORDER = "another order of tiles, each of which is computed once"
UNUSED = "where it differs, nothing is made of the value"
MASKED = "a mask where none is needed, or keys that it hides"
SLOWER = "the general way, of which the one that is left is a case"
EMPTY = "work on nothing: blocks, copies or steps without an element"
NARROW, MOST = "32-bit offset: .*", 2**31 - 1
FITS = "a number that 32 bits hold, or launch code refuses the call"
SAME_THERE = "where the choice differs, both sides are the same"
TIMES_ZERO = "a number whose partner is 0"
WHOLE_VECTORS = "an end of whole vectors: where a vector's first element exists, so does the one behind it"
ORIGIN = "another origin of exponentials, by which sums and weights are divided alike"
SECOND_PASS = "another origin of a row's sums; where it is far from the mean there is a second pass"
OF_CLASS = "the same of every extent of the kernel's class; those of others have kernels of their own"
ELSEWHERE = "another place of the same shared memory, where nothing else is"
PAIR = "both of a pair, the second first"
ALONG_K = "both factors' elements in another order along k"
SHARES = "slices of other lengths, of which each element of k is in one"
BARRIER = "a barrier where none is needed"
PADDING = "more of a vector, in what lies between the rows of a workspace"
FEW = "the same of two warps, of which only the first is before another"


@dataclass(frozen=True)
class Argument:
    """`text`: a part of the line; `change`: a pattern of `rule: old -> new`; `rounds`: only roundings differ.
    `refuses`: by a problem, numbers of a call beyond which the argument does not hold: launch code must refuse it."""

    file: str
    text: str
    change: str
    reason: str
    rounds: bool = False
    refuses: Callable[[Any], Mapping[str, int]] | None = None


ARGUMENTS = (
    Argument("gemm/tile.cuh", "const int band_rows = arguments.raster == 1 ? tiles_m : arguments.raster;", ".*", ORDER),
    Argument("gemm/tile.cuh", "whole_rows", "case: whole_rows -> false", SLOWER),
    Argument(
        "gemm/simt.cuh", "const bool more = k_left > C::tile_k;", "(case|initial value): .*|comparison: > -> >=", EMPTY
    ),
    Argument("gemm/tensor.cuh", "for (int step = 1; step <= steps; ++step) {", "constant: 1 -> 0", EMPTY),
    Argument("gemm/tensor.cuh", "const bool more = step < steps;", "comparison: < -> <=", EMPTY),
    Argument("gemm/tile.cuh", "const int64_t steps = (k - 1) / C::tile_k + 1, slice", ".*", SHARES, rounds=True),
    Argument("conv2d_wgrad/direct.cuh", "if (i > 0) __syncthreads();", "case: .* -> true", BARRIER),
    # Of sums that are split: rows of the workspace are whole vectors.
    Argument("gemm/simt.cuh", "constexpr int width = FragmentB::quad < C::align_c", "initial value: .*", PADDING),
    Argument("gemm/tensor.cuh", "if constexpr (over_ring<C>) return (along_k ? row % 2", "operand: .*", ELSEWHERE),
    Argument("gemm/limb_planes.cuh", "limb_words[word * 4 + limb][group] = turned[limb];", "element: .* 1", ALONG_K),
    # Of a kernel whose epilogue has as many tensors as there is room for, a check of array bounds shows it.
    Argument("gemm/launch.cuh", "epilogue.tensors[i] = tensors[i];", "comparison: < -> <=", UNUSED),
    Argument("gemm/tile.cuh", "if constexpr (C::split == split_none) return Share{0, k};", "case: .* -> false", SLOWER),
    Argument("conv2d/gather.cuh", "return groups == batch ? matrix : matrix % groups;", "(extent|case): .*", SLOWER),
    Argument("conv/feed.cuh", "if (k_left > 0) {", "case: .* -> true", EMPTY),
    Argument("conv2d_dgrad/phases.cuh", "if (!strided) return Part{along.extent,", "case: .* -> false", SLOWER),
    # Filters behind the last one, which are not written.
    Argument("conv/direct.cuh", "filter < arguments.filters ? filter : arguments.filters - 1;", "constant: .*", UNUSED),
    # Of equal values either is the extreme.
    Argument(
        "reduce.cuh", "const bool beyond = greatest ? other.value > state.value", "comparison: . -> .=", SAME_THERE
    ),
    Argument("rows.cuh", "const int64_t grid = arguments.rows ?", "initial value: .*|constant: 1 -> 2", EMPTY),
    Argument("rows.cuh", "columns = exists ? static_cast<unsigned>(given.columns) : 0;", "extent: .*", WHOLE_VECTORS),
    Argument("rows.cuh", "if (has(step)) held[step] = widened(vectors[step]);", "case: .* -> true", UNUSED),
    Argument("reduce.cuh", "merge(state, State{values.data[i]});", "element: .* 1", PAIR, rounds=True),
    # Blocks of columns that are no outputs.
    Argument("reduce/kernel.cuh", "while (arguments.combine_columns < combine_threads", "comparison: .*", EMPTY),
    # All lanes have the state of their row.
    Argument(
        "reduce/kernel.cuh",
        "if (exists && lane == 0) finish<C, 1>(arguments, row, state);",
        "comparison: .*",
        SAME_THERE,
    ),
    Argument("reduce/kernel.cuh", "arguments.count = static_cast<float>(count);", "extent: .*", UNUSED),
    Argument("reduce/kernel.cuh", "kernel.along_rows ? count / kernel.vector", "case: .* -> false", SAME_THERE),
    Argument("reduce/kernel.cuh", "if (all) {", "case: .* -> false", SLOWER, rounds=True),
    Argument("reduce/kernel.cuh", "vectors ? list.extent[i] / vector", "case: vectors -> (true|false)", UNUSED),
    Argument("reduce/kernel.cuh", "const int64_t base = exists ? offset_along", "case: exists -> true", UNUSED),
    Argument(
        "masked_activation/kernel.cuh", "if (first + (C::vector - 1) < arguments.elements) {", ".* -> false", SLOWER
    ),
    Argument("masked_activation/kernel.cuh", "unsigned bits = 0;", "(constant|initial value): .*", UNUSED),
    Argument("attention/block.cuh", "const int first_query = packs_heads<C> ?", ".*", MASKED),
    Argument(
        "attention/block.cuh",
        "const int end = end_seen(rows, place.query(C::tile_q - 1));",
        "(initial value|extent): .*",
        MASKED,
    ),
    Argument("attention/kernel.cuh", "if (warp.needs_mask(rows, begin))", "case: .* -> true", MASKED),
    # Of a single stage.
    Argument("attention/kernel.cuh", "filling = reading;", "operand: .*", SAME_THERE),
    # Sequences of a ragged batch have keys of their own.
    Argument(
        "attention/kernel.cuh", "arguments.first_key = static_cast<int>(left < 0 ? -seq_q", "statement: .*", UNUSED
    ),
    Argument("attention/kernel.cuh", "const int64_t heads = heads_of(kernel, integers[0], integers[3]", ".*", ORDER),
    Argument("attention/kernel.cuh", "arguments.band = static_cast<int>(launch[0] > 0", ".*", ORDER),
    Argument("mla/block.cuh", "if (tile < tiles) {", "case: .* -> true", EMPTY),
    Argument("mla/block.cuh", "sequence.end_seen(arguments, last < sequence.rows ? last", ".*", MASKED),
    Argument("mla/block.cuh", "float most = scores[i][0][half * 2];", "initial value: .*", ORIGIN, rounds=True),
    Argument("mla/block.cuh", "most = maximum(most, scores[i][j][half * 2 + e]);", "element: .* 1", PAIR),
    Argument("mla/block.cuh", "const int count = end > 0 ? (end - 1)", "constant: 1 -> 0", MASKED),
    # Lanes of a row have the same value.
    Argument("mla/block.cuh", "if (lane() % 4 == 0) store_shared<1>(exchange", "constant: 0 -> 1", SAME_THERE),
    Argument("mla/kernel.cuh", "if (warp.needs_mask(begin)) warp.mask(begin);", "case: .* -> true", MASKED),
    Argument("mla/kernel.cuh", "if (!sequence.has_row(sequence.first)) return;", "case: .* -> false", EMPTY),
    Argument("mla/kernel.cuh", "splits(plan_of<C>, integers[3], launch[0])};", "element: .*", SHARES, rounds=True),
    Argument("mla/kernel.cuh", "const int64_t tiles = keys < 1 ? 1 : ceil_div(keys,", "initial value: .*", EMPTY),
    # It is -1 or more than 0.
    Argument("mla/kernel.cuh", "const bool counted = arguments.batch > 0 &&", "extent: .*", SAME_THERE),
    # Rows of partial sums are whole blocks.
    Argument("attention/tile.cuh", "bool in_bounds(int64_t index, int64_t extent)", "comparison: < -> <=", OF_CLASS),
    Argument("mla/kernel.cuh", "asked < 1 ? 1 : asked < tiles ? asked : tiles", "comparison: < -> <=", SAME_THERE),
    # Without elements, and of a kernel without lists, there is no workspace, and there are no places.
    Argument(
        "masked_activation/kernel.cuh", "kernel.gather_scatter && workspace != nullptr", ".* -> ([|]{2}|true)", UNUSED
    ),
    # Of a single slice the end is that of all steps.
    Argument(
        "reduce/kernel.cuh",
        "return {begin, arguments.steps - begin < arguments.chunk ?",
        "case: begin < arguments.chunk -> true",
        SAME_THERE,
    ),
    # Any number below 0 is refused.
    Argument("rows.cuh", "arguments.rows = fits ? static_cast<int>(extents[0]) : -1;", "constant: 1 -> 2", UNUSED),
    # A row without elements is not read.
    Argument("layer_norm/kernel.cuh", "float origin = 0.0f;", "initial value: .*", UNUSED),
    Argument("rows.cuh", "for (int step = 0; step < C::steps; ++step)", "extent: .* [+] 1.", EMPTY),
    Argument("rows.cuh", "shared_memory<unsigned>() + which * state_words<C>", "operator: [*] -> [+]", ELSEWHERE),
    Argument("layer_norm/kernel.cuh", "return c < low ? low : c < high ? c : high;", ".*", SECOND_PASS, rounds=True),
    Argument("gemm/tile.cuh", "constexpr int64_t workspace_pitch(int64_t n)", "constant: 3 -> 2", OF_CLASS),
    Argument("gemm/simt.cuh", "for (int k_left = length; k_left > 0;", "extent: k_left -> .k_left - 1.", OF_CLASS),
    # Of a product that is not split: which of its slices a block has.
    Argument("gemm/tile.cuh", "in_band / rows, matrix, -1};", "constant: 1 -> 0", UNUSED),
    Argument("gemm/tensor.cuh", "constexpr int width = C::align_c < 2 ? 1 : 2;", "case: .* -> true", SLOWER),
    Argument("reduce/kernel.cuh", "constexpr int width = C::scattered ? 1", "case: C::scattered -> true", SLOWER),
    # Places of an output whose axes are in the caller's order already.
    Argument(
        "reduce/kernel.cuh", "const bool kept = (mask >> (max_axes - 1 - axis) & 1u) == 0;", "constant: .*", UNUSED
    ),
    Argument("masked_activation/kernel.cuh", "load_shared<1>(of_warps + other)", "operator: [+] -> -", FEW),
    Argument(
        "masked_activation/kernel.cuh",
        "places = count * kernel.threads * word_bits;",
        NARROW,
        FITS,
        refuses=lambda p: {"elements": MOST},
    ),
    # Winograd and phases without taps: what their products read is set later.
    Argument("conv2d_dgrad/kernel.cuh", "arguments.a = pointers[dy_is_a ? 0 : 1];", "constant: 1 -> 2", UNUSED),
    Argument("conv2d_dgrad/kernel.cuh", "tile.column * C::tile_n >= phase.n) return;", "extent: .* [+] 1.", EMPTY),
    # Of gathered operands the other one: what it meets behind the last product of a sum is 0.
    Argument("gemm/simt.cuh", "held[i].data[j] = T(0);", "(constant|initial value): 0 -> .*", TIMES_ZERO),
    Argument("gemm/simt.cuh", "in_bounds(k, k_left);  // bounds: load k", "extent: k -> .k [+] 1.", WHOLE_VECTORS),
    Argument(
        "rows.cuh", "const int64_t row = int64_t(blockIdx.x) * C::rows", NARROW, FITS, refuses=lambda p: {"rows": MOST}
    ),
    Argument(
        "masked_activation/kernel.cuh",
        "const int64_t tile = int64_t(blockIdx.x) * (C::threads * word_bits);",
        NARROW,
        FITS,
        refuses=lambda p: {"elements": MOST + 1},
    ),
    Argument(
        "masked_activation/kernel.cuh",
        "const int64_t tile = int64_t(blockIdx.x) * (C::threads * word_bits), first",
        NARROW,
        FITS,
        refuses=lambda p: {"elements": MOST + 1},
    ),
    Argument(
        "mla/kernel.cuh",
        "const int64_t token = sequence.first_q;",
        NARROW,
        FITS,
        refuses=lambda p: {"tokens": MOST // p.heads_q + 1},
    ),
    Argument(
        "mla/kernel.cuh",
        "if (row >= int64_t(entry(arguments.qo_indptr, arguments.batch)) * arguments.heads) return;",
        NARROW,
        FITS,
        refuses=lambda p: {"tokens": MOST // p.heads_q + 1},
    ),
    # Rows of all images with channels last, each of at least a column.
    Argument(
        "conv/winograd.cuh",
        "const int64_t first_pixel = C::channels_last ? int64_t(tile.image)",
        NARROW,
        FITS,
        refuses=lambda p: {"n": MOST // (p.p * p.q) + 1},
    ),
    Argument(
        "conv/winograd.cuh",
        "const int64_t pitch = C::channels_last ? arguments.ldb : arguments.lda;",
        NARROW,
        FITS,
        refuses=lambda p: {"c": MOST, "k": MOST},
    ),
    Argument(
        "conv/winograd.cuh",
        "const int64_t pitch = C::channels_last ? arguments.lda : arguments.ldb;",
        NARROW,
        FITS,
        refuses=lambda p: {"c": MOST, "k": MOST},
    ),
    Argument(
        "conv2d_dgrad/planes.cuh",
        "const int64_t filter = int64_t(rows) * taps, within = item % filter",
        NARROW,
        FITS,
        refuses=lambda p: {"k": (MOST // (p.r * p.s * p.group_channels) + 1) * p.groups},
    ),
    Argument(
        "conv2d_dgrad/phases.cuh",
        "const int64_t tap = number % along.tap_step, behind",
        NARROW,
        FITS,
        refuses=lambda p: {"dilation_h": MOST, "dilation_w": MOST},
    ),
)


@dataclass(frozen=True)
class Open:
    """Lines of which a wrong one is not seen, and what it would take."""

    file: str
    text: str
    takes: str


OF_MERGES = "2^31 partial rows (batches, heads, queries, splits): the last heads of many, as a part"
OF_SUMS = "2^31 rows of partial sums, in several matrices"
OPEN = (
    Open("reduce/kernel.cuh", "found > INT64_MAX / extent[i]", "extents whose product leaves 64 bits"),
    Open(
        "gemm/limbs.cuh",
        "diagonals[i][j][d][r] = 0;",
        "locals that begin with a pattern (-ftrivial-auto-var-init), which g++ 11 does not have",
    ),
    Open(
        "attention/block.cuh",
        "first_query = row / group;",
        "products of a row and its group beyond 2^31, in a local that begins with a pattern",
    ),
    Open(
        "attention/kernel.cuh",
        "static_cast<int>(clipped(integers[",
        "the result of a call whose window is longer than a problem's may be",
    ),
    Open("attention/merge.cuh", "const int64_t rows = int64_t(heads)", OF_MERGES),
    Open("gemm/split.cuh", "const int64_t row = index / per_row;", OF_SUMS),
    Open("gemm/tile.cuh", "(slice * rows + int64_t(matrix)", OF_SUMS),
    Open(
        "gemm/launch.cuh",
        "|| arguments.slices > 65535) return 0;",
        "a kernel that divides k, beside the one that was asked: those have to take as many slices",
    ),
    Open("gemm/split.cuh", "const int64_t per_row = arguments.n / width, rows", OF_SUMS),
    Open("gemm/tile.cuh", "arguments.workspace) + int64_t(slot) * (C::tile_m", "2^31 sums of stream-K's blocks, 8 GiB"),
    Open("attention/sequence.cuh", "const int64_t head = int64_t(place.batch)", "2^31 rows of lse, as a part"),
    Open("attention/sequence.cuh", "const int64_t query = sequence.first_q", "2^31 rows of lse, as a part"),
    Open("conv/channel_planes.cuh", "const int64_t of_group = int64_t(group)", "planes of 2^31 bytes of other images"),
    Open("conv/channel_planes.cuh", "first = planes + (int64_t(arguments.group_of", "2^31 rows of filters' planes"),
    Open("conv/winograd.cuh", ": (int64_t(tile.image) * layer.filters + filter)", "2^31 rows of out, as a part"),
    Open("conv2d_dgrad/phases.cuh", "const int64_t before = int64_t(image)", "2^31 pixels of images, as a part"),
    Open("reduce/kernel.cuh", "int64_t elements = 1;", "2^31 elements, as a part"),
    Open("reduce/kernel.cuh", "const int64_t outputs = kept.elements(), count", "2^31 outputs, which `check` refuses"),
    Open("reduce/kernel.cuh", "int64_t found = 1;", "extents whose product leaves 32 bits, with outputs that agree"),
    Open("conv/winograd.cuh", "const int64_t tiles = int64_t(layer.images)", "2^31 tiles of many images, as a part"),
    Open("reduce/kernel.cuh", "const int64_t slices = asked < 1", "2^31 values of an output, which `check` refuses"),
    Open(
        "rows.cuh",
        "for (int i = 0; i < in_flight; ++i)",
        "a check of a kernel's own array that is passed by reference: -fsanitize=object-size shows it, for 9 % more of "
        "a candidate's seconds (8 kernels of six operators)",
    ),
    Open("attention/merge_rows.cuh", "const int64_t ", OF_MERGES),
    Open(
        "mla/kernel.cuh",
        "return kernel.ragged ? rows / kernel.tile_q + batch",
        "a ragged batch of more rows than any number that stands beside `rows`",
    ),
    Open("attention/merge.cuh", "const int64_t head = int64_t(blockIdx.y)", OF_MERGES),
    Open("mla/kernel.cuh", "const int64_t first = blockIdx.y * rows", "2^31 partial rows of 512 floats, 4 TiB"),
    Open(
        "mla/block.cuh", "return int64_t(first_q) * arguments.heads + row;", "2^31 rows of out of 512 elements, 2 TiB"
    ),
    Open("conv/direct.cuh", "int64_t(filter) * output.pitch", "one image alone with 2^31 outputs, with channels first"),
    Open(
        "conv2d/gather.cuh",
        "const int64_t stride = C::channels_last ?",
        "several groups, each with 2^31 elements of filters",
    ),
    Open(
        "gemm/split.cuh",
        "const int64_t pitch = workspace_pitch(arguments.n), slice_elements",
        "of depthwise filters' gradients a slice with 2^31 sums; their image is gathered by 32 bits",
    ),
    Open(
        "gemm/tile.cuh",
        "const int64_t rows = int64_t(arguments.batch)",
        "2^31 rows in several matrices: their last rows, as a part",
    ),
    Open(
        "reduce/kernel.cuh",
        "arguments.workspace + (int64_t(i) * arguments.slices",
        "2^31 states of slices: the last outputs, as a part",
    ),
)


def takes(file: str, text: str) -> str:
    """What it would take to see that such a line is wrong; nothing where that is not written down."""
    return next((each.takes for each in OPEN if each.file == file and each.text in text), "")


def argument_of(change: Change) -> Argument | None:
    words = f"{change.rule}: {change.old} -> {change.new}"
    for argument in ARGUMENTS:
        if argument.file == change.file and argument.text in change.text and re.fullmatch(argument.change, words):
            return argument
    return None
