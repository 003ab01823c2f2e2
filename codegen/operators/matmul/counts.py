"""What a run of a matmul's schedule does, by launch and primitive, as the launch code and the kernels have it."""

from collections.abc import Mapping, Sequence
from typing import Any

from codegen.alignment import round_up
from codegen.counts import TRUNCATE, LaunchCounts, Primitive, load, merged, store
from codegen.dtypes import dtype
from codegen.epilogue import Node, tensor_nodes
from codegen.fixed_point import over_ring, products
from codegen.operators.matmul import limb_planes, split
from codegen.operators.matmul.grid import blocks, k_steps, tiles
from codegen.operators.matmul.kernel_family import is_limbs, is_tensor
from codegen.operators.matmul.limbs import limb_products
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.truncations import early_truncations

# Products of an mma on 16 x 8 outputs, but for its k.
MMA_OUTPUTS = 16 * 8
_MMA_TYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "tf32", "int8": "s8"}
_LANE_BYTES = 16  # of an access at most


def multiplications(problem: MatmulProblem) -> int:
    """Of the problem; zeros that a gather brings count."""
    return problem.batch * problem.m * problem.n * problem.k


def launches(
    problem: MatmulProblem,
    t: Mapping[str, Any],
    aligns: tuple[int, int, int],
    reads: Sequence[int] | None = None,
    executed: Primitive | None = None,
) -> tuple[LaunchCounts, ...]:
    """In the order of launches. `aligns`: elements of an access to A, B and out; `reads`: bytes of A and B that lanes
    ask for, where not every element of the matrices is one of memory; `executed`: products, where they are not those of
    whole tiles."""
    made = {
        limb_planes.SPLIT_LIMBS: lambda: _split_limbs(problem, aligns),
        "clear": lambda: [_clear(problem)],
        "run": lambda: _run(problem, t, aligns, reads or input_bytes(problem, t), executed),
        "reduce": lambda: _reduce(problem, t, aligns[2]),
    }
    return tuple(
        LaunchCounts(name, merged(made[name]()), multiplications(problem) if name == "run" else 0)
        for name in split.functions(t)
    )


def input_bytes(problem: MatmulProblem, t: Mapping[str, Any]) -> tuple[int, int]:
    """Of A and B that lanes ask for: A once for each column of tiles, B once for each row."""
    tiles_m, tiles_n = tiles(problem, t["tile_m"], t["tile_n"])
    of_row = dtype(problem.dtype).bytes * problem.k
    if limb_planes.planes(t):
        of_row = limb_planes.row_bytes(problem)
    of_k = problem.batch * of_row
    return of_k * problem.m * tiles_n, of_k * problem.n * tiles_m


def _run(
    problem: MatmulProblem,
    t: Mapping[str, Any],
    aligns: tuple[int, int, int],
    reads: Sequence[int],
    executed: Primitive | None,
) -> list[Primitive]:
    size = dtype(problem.dtype).bytes
    copy = "cp_async" if t.get("copy") == "cp_async" else "load_global"
    parts = [executed or _products(problem, t)]
    accesses = [limb_planes.VECTOR] * 2 if limb_planes.planes(t) else [align * size for align in aligns[:2]]
    parts += [load(bytes_, access, copy) for bytes_, access in zip(reads, accesses, strict=True)]
    if over_ring(problem) and problem.fraction_bits:
        parts.append(Primitive(TRUNCATE, early_truncations(problem, t)))
    return parts + _handed_on(problem, t, aligns[2])


def _split_limbs(problem: MatmulProblem, aligns: tuple[int, int, int]) -> list[Primitive]:
    size, along_k = dtype(problem.dtype).bytes, (not problem.a_transposed, problem.b_transposed)
    reads = [
        load(size * problem.k * rows, size * (align if along else 1))
        for rows, align, along in zip(limb_planes.rows(problem), aligns, along_k, strict=False)
    ]
    return [*reads, store(limb_planes.plane_bytes(problem), limb_planes.VECTOR)]


def _products(problem: MatmulProblem, t: Mapping[str, Any]) -> Primitive:
    """Of whole tiles."""
    of_tile = t["tile_m"] * t["tile_n"] * t["tile_k"] * k_steps(problem.k, t["tile_k"])
    executed: int = blocks(problem, t["tile_m"], t["tile_n"]) * of_tile
    if is_limbs(t):
        limbs = executed * limb_products(problem.dtype)
        return Primitive("mma_m16n8k32_u8", limbs // (MMA_OUTPUTS * 32), executed, limbs)
    if not is_tensor(t):
        return Primitive("imad" if over_ring(problem) else "fma", executed, executed)
    name = f"mma_m16n8k{t['mma_k']}_{_MMA_TYPES[problem.dtype]}"
    return Primitive(name, executed // (MMA_OUTPUTS * t["mma_k"]), executed)


def _handed_on(problem: MatmulProblem, t: Mapping[str, Any], align_c: int) -> list[Primitive]:
    """What `run` makes of its sums: outputs, or partial sums."""
    size, rows = split.sum_bytes(problem), problem.batch * problem.m
    if t["split"] == "none":
        return _outputs(problem, t, rows * problem.n, _width(problem, t, align_c))
    if t["split"] == "stream":
        pieces, shared = _stream_pieces(problem, t)
        whole = _outputs(problem, t, round((1 - shared) * rows * problem.n), _width(problem, t, align_c))
        return [*whole, store(size * pieces * t["tile_m"] * t["tile_n"], size * min(4, _width(problem, t, align_c)))]
    # By way of shared memory sums go in whole vectors, to the pitch of the workspace.
    in_vectors = t.get("epilogue_path") == "shared"
    columns = round_up(problem.n, 4) if in_vectors else problem.n
    width = 1 if t["split"] == "atomic" else 4 if in_vectors else _width(problem, t, align_c)
    return [store(size * int(t["split_k"]) * rows * columns, size * width)]


def _width(problem: MatmulProblem, t: Mapping[str, Any], align_c: int) -> int:
    """Outputs of a lane's store in `run`."""
    if problem.k == 0:
        return align_c
    if is_tensor(t):
        return align_c if t.get("epilogue_path") == "shared" else min(align_c, 2)
    return min(align_c, int(t["thread_n"]), _LANE_BYTES // dtype(problem.dtype).bytes)


def _outputs(problem: MatmulProblem, t: Mapping[str, Any], outputs: int, width: int) -> list[Primitive]:
    """So many outputs with their epilogue, `width` of a store."""
    size = dtype(problem.out_dtype).bytes
    parts = [
        store(outputs * size, width * size),
        *epilogue_reads(problem.epilogue, problem.out_dtype, outputs, width),
    ]
    once = over_ring(problem) and t["truncate"] == "once"
    return parts + epilogue_products(problem, outputs, truncated=outputs if once else 0)


def epilogue_products(problem: Any, outputs: int, truncated: int) -> list[Primitive]:
    """Squares and polynomials of an epilogue; over a ring with truncations: of those, and of `truncated` sums."""
    multiplied, ring = outputs * products(problem.epilogue), over_ring(problem)
    shifts = multiplied + truncated if ring and problem.fraction_bits else 0
    name = "imad" if ring else "fma"
    return [Primitive(name, multiplied, multiplied, of_epilogue=multiplied), Primitive(TRUNCATE, shifts)]


def epilogue_reads(chain: Sequence[Node], out_dtype: str, outputs: int, width: int) -> list[Primitive]:
    """What outputs of a row have in common is read once for each store, as is a word of a mask."""
    parts = []
    for node, _, element in tensor_nodes(chain, out_dtype):
        size, once = dtype(element).bytes, node.packed_mask or node.structure == "bias.m"
        parts.append(load(outputs * size // (width if once else 1), size if once else size * width))
    return parts


def _reduce(problem: MatmulProblem, t: Mapping[str, Any], align_c: int) -> list[Primitive]:
    outputs, size = problem.batch * problem.m * problem.n, split.sum_bytes(problem)
    if t["split"] == "stream":
        pieces, shared = _stream_pieces(problem, t)
        per_tile = outputs / blocks(problem, t["tile_m"], t["tile_n"])
        outputs, partials = round(shared * outputs), round(pieces * per_tile) * size
    else:
        partials = outputs * size * (int(t["split_k"]) if t["split"] == "workspace" else 1)
    return [load(partials, size * min(4, align_c)), *_outputs(problem, t, outputs, align_c)]


def _stream_pieces(problem: MatmulProblem, t: Mapping[str, Any]) -> tuple[int, float]:
    """With stream-K: parts of tiles that go through the workspace, and the share of tiles that do."""
    total, steps, count = split.all_steps(problem, t), k_steps(problem.k, t["tile_k"]), int(t["stream_blocks"])
    begins = (total // count * block + total % count * block // count for block in range(1, count))
    cut = [begin // steps for begin in begins if begin % steps]
    return len(cut) + len(set(cut)), len(set(cut)) * steps / total


def _clear(problem: MatmulProblem) -> Primitive:
    size = split.sum_bytes(problem)
    return store(size * problem.batch * problem.m * split.workspace_pitch(problem.n), 4 * size)
