"""Small problems with the signature of a kernel, of extents that its tiles meet in every way."""

from collections.abc import Mapping
from typing import Any

from codegen.operators.attention.far import far_strides
from codegen.operators.attention.reduced import lengths_of, long_keys
from codegen.operators.attention.split import splits
from codegen.operators.mla.problem import CACHES, TENSORS, VECTOR, MlaProblem

SPLIT_TILES = 9  # of keys of one query, where they are split


def reduced_problems(s: Mapping[str, Any], t: Mapping[str, Any]) -> list[MlaProblem]:
    """Of a kernel with one query of each sequence: whole tiles and more of them than stages; few heads, with a sequence
    without keys, one with a single key, a whole page and one key more; more heads than rows of a tile, with gaps in
    memory and a scale of its own; many keys where they are split.

    With any number of queries: sequences of uneven lengths, so that tiles begin anywhere, empty ones first, last and
    between; fewer keys than queries, so that some see none; causal and not; heads that divide a tile and others.
    """
    tile_q, tile_kv, stages = int(t["tile_q"]), int(t["tile_kv"]), int(t["stages"])
    tiles, page = SPLIT_TILES if splits(t) else 2, int(s["page_size"])
    fields = (_ragged if s["queries"] == "ragged" else _one)(tile_q, tile_kv, stages, tiles, page)
    return [_problem(s, own, gaps=number == 1) for number, own in enumerate(fields)]


def long_problem(s: Mapping[str, Any], t: Mapping[str, Any]) -> MlaProblem:
    """Of `long_keys`."""
    lengths = lengths_of((1, 3), (1, long_keys(t))) if s["queries"] == "ragged" else _keys(3, long_keys(t))
    return _problem(s, {**lengths, "heads_q": int(t["tile_q"])}, gaps=False)


def far_problem(s: Mapping[str, Any], t: Mapping[str, Any]) -> MlaProblem:
    """The one of them that has gaps in memory, with far larger ones."""
    near = reduced_problems(s, t)[1]
    strides = {f"{name}_strides": far_strides(near.shape(name)[:2], near.strides(name)) for name in TENSORS}
    return MlaProblem.model_validate({**near.canonical(), **strides})


def _one(tile_q: int, tile_kv: int, stages: int, tiles: int, page: int) -> list[dict[str, Any]]:
    return [
        {**_keys((stages + 4) * tile_kv, tile_kv), "heads_q": tile_q},
        {**_keys(tile_kv + 5, 0, 1, page, page + 1), "heads_q": 3, "scale": 0.25},
        {**_keys(tiles * tile_kv + 1, 2), "heads_q": tile_q + 5},
    ]


def _ragged(tile_q: int, tile_kv: int, stages: int, tiles: int, page: int) -> list[dict[str, Any]]:
    some = tile_q // 4 + 3
    return [
        {**lengths_of((tile_q // 4, (stages + 4) * tile_kv), (0, 2), (tile_q // 8, tile_kv)), "heads_q": 8},
        {
            **lengths_of((0, 0), (some, some + tile_kv + 5), (1, 1), (tile_q // 2, 9), (7, 0), (0, 4)),
            "heads_q": 3, "causal": True, "scale": 0.25,
        },
        {
            **lengths_of((5, 3), (3, page), (1, page + 1), (2, tiles * tile_kv + 1)),
            "heads_q": tile_q - 1, "causal": True,
        },
    ]  # fmt: skip


def _keys(*lengths: int) -> dict[str, Any]:
    return {"batch": len(lengths), "seq_kv": max(lengths), "kv_lengths": lengths}


def _problem(s: Mapping[str, Any], own: dict[str, Any], *, gaps: bool) -> MlaProblem:
    """With gaps behind each head or key, and each token or page."""
    fields = {**own, **{name: s[name] for name in ("dtype", "lse", "queries", "page_size")}}
    if not gaps:
        return MlaProblem(**fields)
    packed = MlaProblem(**fields)
    for name in TENSORS:
        _, inner, columns = packed.shape(name)
        step = columns + (2 * VECTOR if name in CACHES else VECTOR)
        fields[f"{name}_strides"] = inner * step + VECTOR, step
    return MlaProblem(**fields)
