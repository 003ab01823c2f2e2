"""Small problems with the signature of a kernel, of extents that its tiles meet in every way."""

from collections.abc import Mapping
from typing import Any

from codegen.operators.attention.problem import SMALLEST_HEAD_DIM, AttentionProblem, Tensor
from codegen.operators.attention.space import PIECE
from codegen.operators.attention.split import splits

# Queries and keys of a problem at most, in tiles of either; a large tile has fewer.
MOST_POSITIONS = 320
# Of keys of one query, where they are split.
SPLIT_TILES, MOST_KEYS = 16, 2048
SOFTCAP = 3.0


def reduced_problems(s: Mapping[str, Any], t: Mapping[str, Any]) -> list[AttentionProblem]:
    """Whole tiles; causal, with tails of both; a window, with gaps in memory, a scale of its own and the narrowest
    heads; fewer keys than queries, so that some see none; one query of each head, with many keys where those are split.

    Heads are of 1 to 3 in a group, in batches of 1 and 2.
    """
    tile_q, tile_kv, stages = int(t["tile_q"]), int(t["tile_kv"]), int(t["stages"])
    units = int(s["align"]), max(int(s["align"]), int(s["align_out"]))  # of head_dim_qk, of head_dim_vo
    columns = s["columns_qk"], s["columns_vo"]
    wide = [_widest(*of) for of in zip(columns, units, strict=True)]
    narrow = [_narrow(*of) for of in zip(columns, units, strict=True)]
    tiles = min(SPLIT_TILES, MOST_KEYS // tile_kv) if splits(t) else 2
    some = min(tile_q + tile_q // 2 + 3, MOST_POSITIONS)
    fields: list[dict[str, Any]] = [
        {"seq_q": tile_q, "seq_kv": min(stages + 2, 1 + MOST_POSITIONS // tile_kv) * tile_kv, "heads_q": 2},
        {"seq_q": some, "seq_kv": some + tile_kv + 5, "heads_q": 3, "heads_kv": 1, "causal": True},
        {
            "batch": 2, "seq_q": some + 4, "seq_kv": some + tile_kv // 2 + 1, "heads_q": 4, "heads_kv": 2,
            "head_dim_qk": narrow[0], "head_dim_vo": narrow[1], "scale": 0.25,
            "window_left": tile_kv + tile_kv // 2 + 2, "window_right": 7,
        },
        {"seq_q": PIECE + 5, "seq_kv": 3, "heads_q": 2, "heads_kv": 1, "causal": True, "batch": 2},
        {"seq_q": 1, "seq_kv": tiles * tile_kv + 1, "heads_q": 3, "heads_kv": 3, "scale": 1.5},
    ]  # fmt: skip
    return [_problem(s, {"head_dim_qk": wide[0], "head_dim_vo": wide[1], **own}) for own in fields]


def _widest(columns: int, unit: int) -> int:
    """The largest head in so many columns of which a vector of `unit` elements, and no wider one, is a part."""
    return columns if unit == 8 else columns - unit


def _narrow(columns: int, unit: int) -> int:
    """The smallest."""
    head_dim = columns - PIECE + unit
    return head_dim if head_dim >= SMALLEST_HEAD_DIM else SMALLEST_HEAD_DIM + unit


def _problem(s: Mapping[str, Any], own: dict[str, Any]) -> AttentionProblem:
    fields: dict[str, Any] = {**own, "dtype": s["dtype"], "layout": s["layout"], "lse": s["lse"]}
    if s["softcap"]:
        fields["softcap"] = SOFTCAP
    packed = AttentionProblem(**fields)
    gaps = "window_left" in own
    tensors: tuple[Tensor, ...] = ("q", "k", "v", "out")
    for name in tensors:
        fields[f"{name}_strides"] = _strides(packed, name, s["align_out" if name == "out" else "align"], gaps)
    return AttentionProblem(**fields)


def _strides(problem: AttentionProblem, tensor: Tensor, align: int, gaps: bool) -> tuple[int, int, int]:
    """Of an alignment class; with gaps behind each head's elements and each matrix."""
    _, outer, inner, columns = problem.shape(tensor)
    step = columns + (2 * align if gaps else 0)
    if tensor == "out" and align < 8 and step % (2 * align) == 0:
        step += align  # else a wider access would fit
    return outer * inner * step + (align if gaps else 0), inner * step, step
