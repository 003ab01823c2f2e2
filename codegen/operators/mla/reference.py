"""Multi-head latent attention in float64 by its definition: attention of each sequence, whose keys are ckv and kpe side
by side and whose values are ckv.

Bounds are those of attention (`codegen/operators/attention/reference.py`), of heads of 576 elements: a kernel adds up a
score in one sum over both parts, weighs in fp32 what all keys of a tile have, and rounds each weight to 16 bits before
it meets a value. Where several warps share a row their greatest scores are compared, which rounds nothing, and their
totals are added, which is an order of the sum of weights like any other.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from codegen.arrays import Array, Float64, as_float64, joined, namespace_of
from codegen.operators.attention.reference import dense
from codegen.operators.mla.problem import CACHES, HEAD_DIM, HEAD_DIM_CKV, QUERIES, MlaProblem


def reference(p: MlaProblem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
    """(result, bound) of out's shape; with `lse` of out's elements and then lse's, both as vectors."""
    xp, rows = namespace_of(inputs["q_nope"]), (p.total_q, p.heads_q)
    out, error = xp.zeros((*rows, HEAD_DIM_CKV)), xp.zeros((*rows, HEAD_DIM_CKV))
    lse, lse_error = xp.zeros(rows) - np.inf, xp.zeros(rows)
    for number in range(p.batch):
        first, end = _queries(p, inputs, number)
        keys = _keys(p, inputs, number)
        count = int(keys.shape[1])
        if end == first or not count:  # no query, or none that sees a key
            continue
        own = p.sequence(end - first, count)
        q = _side_by_side(p, [inputs[name][first:end, :, :] for name in QUERIES], (end - first, p.heads_q))
        of_out, of_lse = dense(own, {"q": q, "k": keys, "v": keys[:, :, :, :HEAD_DIM_CKV]}, exact)
        at, whole = (slice(first, end), slice(None)), (own.seq_q, p.heads_q)
        out[at], error[at] = (part.reshape(*whole, HEAD_DIM_CKV) for part in (of_out.value, of_out.error))
        lse[at], lse_error[at] = (part.swapaxes(1, 2).reshape(*whole) for part in (of_lse.value, of_lse.error))
    return (joined([out, lse]), joined([error, lse_error])) if p.lse else (out, error)


def _queries(p: MlaProblem, inputs: Mapping[str, Array], number: int) -> tuple[int, int]:
    """Tokens of sequence `number`."""
    if not p.ragged:
        return number, number + 1
    return int(inputs["qo_indptr"][number]), int(inputs["qo_indptr"][number + 1])


def _keys(p: MlaProblem, inputs: Mapping[str, Array], number: int) -> Float64:
    """Of sequence `number`: (1, keys, 1, elements)."""
    first, end = (int(inputs["kv_indptr"][number + i]) for i in (0, 1))
    size = p.page_size
    last = int(inputs["kv_last_page_len"][number]) if size > 1 else 1
    count = (end - first - 1) * size + last if end > first else 0
    pages = inputs["kv_indices"][first:end]
    caches = (namespace_of(pages).take(inputs[name], pages, 0) for name in CACHES)
    return _side_by_side(
        p, [cache.reshape((end - first) * size, cache.shape[2])[:count, :] for cache in caches], (count, 1)
    )


def _side_by_side(p: MlaProblem, parts: Sequence[Array], shape: tuple[int, int]) -> Float64:
    """Two tensors as one: (1, *shape, elements)."""
    whole = namespace_of(parts[0]).zeros((1, *shape, HEAD_DIM))
    for part, columns in zip(parts, (slice(0, HEAD_DIM_CKV), slice(HEAD_DIM_CKV, HEAD_DIM)), strict=True):
        values = as_float64(part, p.dtype).reshape(1, *shape, columns.stop - columns.start)
        whole[(slice(None), slice(None), slice(None), columns)] = values
    return whole
