"""Why some changed texts are the same kernel, though compilers make another one of them. An argument is about lines of
a file; `judge` checks that the outputs of such a mutant have the bits of the kernel as it is, in every case of its plan
under three seeds, and takes it for no equivalent where one bit differs. Where an argument says that only roundings
differ, all outputs have to be right in each of these cases."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.mutants.changes import Change

ORDER = "another order of tiles, each of which is computed once"
UNUSED = "where it differs, nothing is made of the value"
MASKED = "a mask where none is needed, or keys that it hides"
SLOWER = "the general way, of which the one that is left is a case"
SYMMETRIC = "factors that change places"
EMPTY = "work on nothing: blocks, copies or steps without an element"
SAME_THERE = "where the choice differs, both sides are the same"
TIMES_ZERO = "a number whose partner is 0"
WHOLE_VECTORS = "an end of whole vectors: where a vector's first element exists, so does the one behind it"
ORIGIN = "another origin of exponentials, by which sums and weights are divided alike"


@dataclass(frozen=True)
class Argument:
    """`text`: a part of the line; `change`: a pattern of `rule: old -> new`; `rounds`: only roundings differ."""

    file: str
    text: str
    change: str
    reason: str
    rounds: bool = False


ARGUMENTS = (
    Argument("gemm/tile.cuh", "const int band_rows = arguments.raster == 1 ? tiles_m : arguments.raster;", ".*", ORDER),
    Argument("gemm/tile.cuh", "whole_rows", "case: whole_rows -> false", SLOWER),
    Argument("gemm/simt.cuh", "fma(a.data[i], b.data[j], ", "operand: .* -> b.data.j., a.data.i., .*", SYMMETRIC),
    Argument("attention/merge_rows.cuh", "maximum(greatest, own)", "operand: .* -> own, greatest", SYMMETRIC),
    Argument("gemm/simt.cuh", "const bool more = k_left > C::tile_k;", "(case|initial value): .*", EMPTY),
    Argument("rows.cuh", "const int64_t grid = arguments.rows ?", "initial value: .*", EMPTY),
    Argument("reduce/kernel.cuh", "vectors ? list.extent[i] / vector", "case: vectors -> (true|false)", UNUSED),
    Argument("reduce/kernel.cuh", "const int64_t base = exists ? offset_along", "case: exists -> true", UNUSED),
    Argument(
        "masked_activation/kernel.cuh", "if (first + (C::vector - 1) < arguments.elements) {", ".* -> false", SLOWER
    ),
    Argument("masked_activation/kernel.cuh", "unsigned bits = 0;", "(constant|initial value): .*", UNUSED),
    Argument("attention/block.cuh", "const int first_query = packs_heads<C> ?", ".*", MASKED),
    Argument("mla/kernel.cuh", "if (tile < tiles) {", "case: .* -> true", EMPTY),
    Argument("mla/block.cuh", "if (tile < tiles) {", "case: .* -> true", EMPTY),
    Argument("mla/block.cuh", "sequence.end_seen(arguments, last < sequence.rows ? last", ".*", MASKED),
    Argument("mla/block.cuh", "float most = scores[i][0][half * 2];", "initial value: .*", ORIGIN, rounds=True),
    Argument("mla/kernel.cuh", "asked < 1 ? 1 : asked < tiles ? asked : tiles", "comparison: < -> <=", SAME_THERE),
    # Without elements there is no workspace, and there are no places.
    Argument(
        "masked_activation/kernel.cuh", "kernel.gather_scatter && workspace != nullptr", ".* -> [|]{2}", SAME_THERE
    ),
    # Its rows say already that a call is refused.
    Argument("rows.cuh", "arguments.columns = fits ? static_cast<int>(extents[1]) : -1;", "operator: .*", UNUSED),
    # Winograd and phases without taps: what their products read is set later.
    Argument("conv2d_dgrad/kernel.cuh", "arguments.a = pointers[dy_is_a ? 0 : 1];", "constant: 1 -> 2", UNUSED),
    Argument("conv2d_dgrad/kernel.cuh", "tile.column * C::tile_n >= phase.n) return;", "extent: .* [+] 1.", EMPTY),
    # Of gathered operands the other one: what it meets behind the last product of a sum is 0.
    Argument("gemm/simt.cuh", "held[i].data[j] = T(0);", "(constant|initial value): 0 -> .*", TIMES_ZERO),
    Argument("gemm/simt.cuh", "in_bounds(k, k_left);  // bounds: load k", "extent: k -> .k [+] 1.", WHOLE_VECTORS),
)


def argument_of(change: Change) -> Argument | None:
    words = f"{change.rule}: {change.old} -> {change.new}"
    for argument in ARGUMENTS:
        if argument.file == change.file and argument.text in change.text and re.fullmatch(argument.change, words):
            return argument
    return None
