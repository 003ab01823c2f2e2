"""Small problems with the signature of a kernel, of extents that its tiles meet in every way."""

from collections.abc import Mapping
from typing import Any

from codegen.operators.attention.far import far_rows, far_strides
from codegen.operators.attention.packing import packs
from codegen.operators.attention.problem import SMALLEST_HEAD_DIM, AttentionProblem, Tensor
from codegen.operators.attention.space import PIECE
from codegen.operators.attention.split import SPLITS, splits
from codegen.run_once import long_steps

# Queries and keys of a problem at most, in tiles of either; a large tile has fewer.
MOST_POSITIONS = 320
# Of keys of one query, where they are split.
SPLIT_TILES, MOST_KEYS = 16, 2048
# Splits of a tile each, and keys of all of them, of a problem that is run once.
MANY_SPLITS, MOST_LONG_KEYS = SPLITS[-1] + 2, 2**14
SOFTCAP = 3.0


def reduced_problems(s: Mapping[str, Any], t: Mapping[str, Any]) -> list[AttentionProblem]:
    """Of a kernel for dense batches: whole tiles; causal, with tails of both; a window, with gaps in memory, a scale of
    its own and the narrowest heads; fewer keys than queries, so that some see none; one query of each head, with many
    keys where those are split.

    Of one for ragged batches the same, of sequences of uneven lengths: empty ones first, last and between, whole tiles
    and tails behind each other, so that tiles begin anywhere; of keys in pages besides a whole page and one key more.

    Heads are of 1 to 3 in a group, in batches of 1 and 2; where they are packed of 8, 3, 5, 1 and more than a tile has
    rows, with few queries.
    """
    sizes = int(t["tile_q"]), int(t["tile_kv"]), int(t["stages"])
    tiles = min(SPLIT_TILES, MOST_KEYS // sizes[1]) if splits(t) else 2
    ragged_or_packed = _packed if packs(t) else _ragged
    fields = ragged_or_packed(s, *sizes, tiles) if packs(t) or "lengths" in s else _dense(*sizes, tiles)
    return [_with_widths(s, own) for own in fields]


def special_problem(s: Mapping[str, Any], t: Mapping[str, Any]) -> AttentionProblem:
    """Few queries of several sequences and heads of keys; windows, of which the ends lie within tiles; gaps in memory
    and the narrowest heads."""
    tile_kv, few = int(t["tile_kv"]), PIECE // 2 + 1
    pairs = (few, tile_kv + few), (few // 2, tile_kv // 2 + 1), (few - 2, few)
    lengths = lengths_of(*pairs) if "lengths" in s else {"batch": 2, "seq_q": few, "seq_kv": tile_kv + few}
    heads = {"heads_q": 10 if packs(t) else 4, "heads_kv": 2}
    return _with_widths(s, {**lengths, **heads, "window_left": tile_kv // 2 + 2, "window_right": 3})


def long_problems(s: Mapping[str, Any], t: Mapping[str, Any]) -> list[AttentionProblem]:
    """Of `long_keys`. Of ragged batches besides a sequence of as many queries as there is no number of a tile left for
    (`Sequence` in sequence.cuh): of shorter ones a tile that begins too early is made up for by the next."""
    tile_q, keys = int(t["tile_q"]), long_keys(t)
    if "lengths" not in s:
        return [_with_widths(s, {"seq_q": tile_q, "seq_kv": keys, "heads_q": 1})]
    long = [lengths_of((1, 3), (tile_q, keys))]
    if not packs(t):
        long.append(lengths_of((tile_q, 1), (3 * tile_q - 1, int(t["tile_kv"]) // 2 + 1)))
    return [_with_widths(s, {**lengths, "heads_q": 1}) for lengths in long]


def long_keys(t: Mapping[str, Any]) -> int:
    """So many tiles that a pipeline has come round several times; where keys are split, one for each of as many splits
    as searches have."""
    tile_kv = int(t["tile_kv"])
    return tile_kv * (min(MANY_SPLITS, MOST_LONG_KEYS // tile_kv) if splits(t) else long_steps(int(t["stages"])))


def far_problem(s: Mapping[str, Any], t: Mapping[str, Any]) -> AttentionProblem:
    """The one of `reduced_problems` that has gaps in memory, with far larger ones."""
    near = next(problem for problem in reduced_problems(s, t) if problem.window_left is not None)
    tensors: tuple[Tensor, ...] = ("q", "k", "v", "out")
    strides = {
        f"{name}_strides": (far_rows if name == "out" else far_strides)(near.shape(name)[:3], near.strides(name))
        for name in tensors
    }
    return AttentionProblem.model_validate({**near.canonical(), **strides})


def _packed(s: Mapping[str, Any], tile_q: int, tile_kv: int, stages: int, tiles: int) -> list[dict[str, Any]]:
    some, ring = tile_q + tile_q // 2 + 3, min(stages + 2, 1 + MOST_POSITIONS // tile_kv) * tile_kv
    large = 2 * tile_q + PIECE // 2 if tile_q <= PIECE else tile_q + PIECE // 2
    if "lengths" in s:
        return _packed_ragged(s, tile_q, tile_kv, some, ring, tiles * tile_kv, large)
    return [
        {"seq_q": tile_q // 8, "seq_kv": ring, "heads_q": 16, "heads_kv": 2},
        {"seq_q": some // 3, "seq_kv": some // 3 + tile_kv + 5, "heads_q": 6, "heads_kv": 2, "causal": True},
        {
            "batch": 2, "seq_q": some // 5 + 4, "seq_kv": some // 5 + tile_kv // 2 + 5, "heads_q": 10, "heads_kv": 2,
            "window_left": tile_kv // 2 + 2, "window_right": 1,
        },
        {"seq_q": PIECE + 5, "seq_kv": 3, "heads_q": 2, "heads_kv": 2, "causal": True, "batch": 2},
        {"seq_q": 2, "seq_kv": tiles * tile_kv + 1, "heads_q": large, "heads_kv": 1, "causal": True, "scale": 1.5},
    ]  # fmt: skip


def _packed_ragged(
    s: Mapping[str, Any], tile_q: int, tile_kv: int, some: int, ring: int, keys: int, large: int
) -> list[dict[str, Any]]:
    page = int(s.get("page_size", tile_kv))
    part = some // 3
    return [
        {**lengths_of((tile_q // 8, ring), (0, 2), (tile_q // 8, tile_kv)), "heads_q": 16, "heads_kv": 2},
        {
            **lengths_of((0, 0), (part, part + tile_kv + 5), (1, 1), (part + 1, part), (7, 0), (0, 4)),
            "heads_q": 6, "heads_kv": 2, "causal": True,
        },
        {
            **lengths_of((some // 5, some // 5 + tile_kv // 2 + 1), (5, tile_kv + 3), (some // 5 - 1, 9)),
            "heads_q": 10, "heads_kv": 2, "window_left": tile_kv // 2 + 2, "window_right": 1,
        },
        {**lengths_of((PIECE + 5, 3), (3, page), (1, page + 1)), "heads_q": 2, "heads_kv": 2, "causal": True},
        {**lengths_of((1, keys + 1), (2, 1), (1, 0), (1, tile_kv)), "heads_q": large, "heads_kv": 1, "scale": 1.5},
    ]  # fmt: skip


def _dense(tile_q: int, tile_kv: int, stages: int, tiles: int) -> list[dict[str, Any]]:
    some = min(tile_q + tile_q // 2 + 3, MOST_POSITIONS)
    return [
        {"seq_q": tile_q, "seq_kv": min(stages + 2, 1 + MOST_POSITIONS // tile_kv) * tile_kv, "heads_q": 2},
        {"seq_q": some, "seq_kv": some + tile_kv + 5, "heads_q": 3, "heads_kv": 1, "causal": True},
        {
            "batch": 2, "seq_q": some + 4, "seq_kv": some + tile_kv // 2 + 1, "heads_q": 4, "heads_kv": 2,
            "window_left": tile_kv + tile_kv // 2 + 2, "window_right": 7,
        },
        {"seq_q": PIECE + 5, "seq_kv": 3, "heads_q": 2, "heads_kv": 1, "causal": True, "batch": 2},
        {"seq_q": 1, "seq_kv": tiles * tile_kv + 1, "heads_q": 3, "heads_kv": 3, "scale": 1.5},
    ]  # fmt: skip


def _ragged(s: Mapping[str, Any], tile_q: int, tile_kv: int, stages: int, tiles: int) -> list[dict[str, Any]]:
    page = int(s.get("page_size", tile_kv))
    some = min(tile_q // 2 + 3, MOST_POSITIONS)
    ring = min(stages + 1, 1 + MOST_POSITIONS // tile_kv) * tile_kv
    return [
        {**lengths_of((tile_q, ring), (0, 2), (tile_q, tile_kv)), "heads_q": 2},
        {
            **lengths_of((0, 0), (some, some + tile_kv + 5), (1, 1), (tile_q + 1, tile_q), (7, 0), (0, 4)),
            "heads_q": 3, "heads_kv": 1, "causal": True,
        },
        {
            **lengths_of((some, some + tile_kv // 2 + 1), (5, 3 * tile_kv + 3), (tile_q - 1, 9)),
            "heads_q": 4, "heads_kv": 2, "window_left": tile_kv + tile_kv // 2 + 2, "window_right": 7,
        },
        {**lengths_of((PIECE + 5, 3), (3, page), (1, page + 1)), "heads_q": 2, "heads_kv": 1, "causal": True},
        {
            **lengths_of((1, tiles * tile_kv + 1), (1, 1), (1, 0), (1, tile_kv)),
            "heads_q": 3, "heads_kv": 3, "scale": 1.5,
        },
    ]  # fmt: skip


def lengths_of(*sequences: tuple[int, int]) -> dict[str, Any]:
    """Fields of a ragged batch of so many queries and keys each."""
    of_q, of_kv = zip(*sequences, strict=True)
    return {
        "batch": len(sequences), "seq_q": max(of_q), "seq_kv": max(of_kv), "q_lengths": of_q,
        "kv_lengths": of_kv,
    }  # fmt: skip


def _widest(columns: int, unit: int) -> int:
    """The largest head in so many columns of which a vector of `unit` elements, and no wider one, is a part."""
    return columns if unit == 8 else columns - unit


def _narrow(columns: int, unit: int) -> int:
    """The smallest."""
    head_dim = columns - PIECE + unit
    return head_dim if head_dim >= SMALLEST_HEAD_DIM else SMALLEST_HEAD_DIM + unit


def _with_widths(s: Mapping[str, Any], own: dict[str, Any]) -> AttentionProblem:
    """With the widest heads of the class; with windows the narrowest, and a scale."""
    units = int(s["align"]), max(int(s["align"]), int(s["align_out"]))  # of head_dim_qk, of head_dim_vo
    columns = s["columns_qk"], s["columns_vo"]
    windowed = "window_left" in own
    of_qk, of_vo = (_narrow(*of) if windowed else _widest(*of) for of in zip(columns, units, strict=True))
    return _problem(s, {"head_dim_qk": of_qk, "head_dim_vo": of_vo, **({"scale": 0.25} if windowed else {}), **own})


def _problem(s: Mapping[str, Any], own: dict[str, Any]) -> AttentionProblem:
    fields: dict[str, Any] = {**own, "dtype": s["dtype"], "layout": s["layout"], "lse": s["lse"]}
    fields |= {name: s[name] for name in ("lengths", "page_size") if name in s}
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
