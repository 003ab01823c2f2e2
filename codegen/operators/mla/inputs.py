"""Inputs of the tests of multi-head latent attention: those of attention whose heads share one key, of each sequence by
itself (`codegen/operators/attention/inputs.py`), with keys in pages of any order and NaN wherever there is no key.

`integer`: results are exact, as values are elements of keys, which are whole numbers times a power of two.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from codegen.dtypes import dtype
from codegen.operator import InputKind
from codegen.operators.attention.inputs import LARGEST_DRAWN, begins, dense
from codegen.operators.mla.problem import CACHES, HEAD_DIM_CKV, MlaProblem

Numbers = npt.NDArray[Any]
# Of a sequence without pages kv_last_page_len is anything.
OF_NO_PAGE = 99


def make_inputs(p: MlaProblem, kind: InputKind, rng: np.random.Generator) -> dict[str, Numbers]:
    """Arrays of the logical shapes of queries and caches, and the tables. Sequences of the same lengths repeat where
    there are many elements."""
    sequences, drawn, elements = [], dict[tuple[int, int], tuple[Numbers, Numbers]](), 0
    for lengths in p.sequences:
        if elements < LARGEST_DRAWN or lengths not in drawn:
            # What has no length is drawn with one position and then left out.
            made = dense(p.sequence(max(1, lengths[0]), max(1, lengths[1])), kind, rng)
            drawn[lengths] = made["q"][0, : lengths[0]], made["k"][0, : lengths[1], 0]
            elements += sum(array.size for array in drawn[lengths])
        sequences.append(drawn[lengths])
    queries = np.concatenate([of_q for of_q, _ in sequences])
    tensors = {"q_nope": queries[..., :HEAD_DIM_CKV], "q_pe": queries[..., HEAD_DIM_CKV:]}
    caches, tables = _in_pages(p, [of_k for _, of_k in sequences], rng)
    made = {**{name: np.ascontiguousarray(array) for name, array in tensors.items()}, **caches}
    return {**made, **{name: tables[name] for name in p.tables}}


def _in_pages(
    p: MlaProblem, sequences: Sequence[Numbers], rng: np.random.Generator
) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    size, element = p.page_size, dtype(p.dtype).numpy
    caches: dict[str, Numbers] = {name: np.full(p.shape(name), np.nan, element) for name in CACHES}
    pages = rng.permutation(p.shape("ckv_cache")[0])[: p.pages].astype(np.int32)
    counts = [-(-len(keys) // size) for keys in sequences]
    entries = begins(counts)
    for first, keys in zip(entries, sequences, strict=False):
        places = np.arange(len(keys))
        at = pages[first + places // size], places % size
        caches["ckv_cache"][at], caches["kpe_cache"][at] = keys[:, :HEAD_DIM_CKV], keys[:, HEAD_DIM_CKV:]
    last = [
        len(keys) - (count - 1) * size if count else OF_NO_PAGE for keys, count in zip(sequences, counts, strict=True)
    ]
    tables = {
        "qo_indptr": begins([queries for queries, _ in p.sequences]), "kv_indptr": entries, "kv_indices": pages,
        "kv_last_page_len": np.array(last, np.int32),
    }  # fmt: skip
    return caches, tables
