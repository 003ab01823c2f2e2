"""What tests of multi-head latent attention share: problems by a few fields, kernels by a few words, other ways to
compute them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.operators.mla.problem import MlaProblem
from codegen.search.schedule import Schedule
from tests.operators.harness.declarations import Array, Inputs

NAME = "mla"
OP = operator(NAME)
DEFAULT: dict[str, Any] = {"batch": 3, "seq_kv": 90, "heads_q": 16, "page_size": 16}
RAGGED: dict[str, Any] = {**DEFAULT, "queries": "ragged", "seq_q": 20}
UNEVEN: dict[str, Any] = {"q_lengths": [20, 0, 9], "kv_lengths": [90, 5, 40]}
# Small ones: two warps that share 16 rows.
SMALL: dict[str, Any] = {"tile_q": 16, "tile_kv": 16, "warps": 2, "warps_vo": 2, "stages": 2}
# DeepSeek-V3 on 8 devices, and on one.
DECODE: dict[str, Any] = {"batch": 64, "seq_kv": 4096, "heads_q": 16, "page_size": 64, "lse": True}
WIDE_DECODE: dict[str, Any] = {**DECODE, "heads_q": 128}
PREFILL: dict[str, Any] = {
    "queries": "ragged", "batch": 16, "seq_q": 512, "seq_kv": 2048, "heads_q": 16, "page_size": 1, "causal": True,
    "lse": True,
}  # fmt: skip


def mla(**fields: Any) -> MlaProblem:
    """One query of 16 heads for each of three sequences, where nothing else is said."""
    problem = OP.parse({"operator": NAME, **DEFAULT, **fields})
    assert isinstance(problem, MlaProblem)
    return problem


def kernel(
    dtype: str = "float16", *, lse: bool = False, ragged: bool = False, page_size: int = 16, name: str = NAME,
    **tunables: int | str,
) -> Kernel:  # fmt: skip
    signature = {
        "dtype": dtype, "lse": lse, "queries": "ragged" if ragged else "one", "page_size": page_size
    }  # fmt: skip
    return Kernel.of(name, signature, Schedule.of({**SMALL, **tunables}))


def rows_of(p: MlaProblem, inputs: Inputs, dtype: Any) -> Iterator[tuple[int, int, Array, Array, Array]]:
    """Of each query and head that sees a key: its token, its head, itself, and the keys that it sees, whose first
    elements are values; by the definition, one key after the other."""
    for number in range(p.batch):
        first, end = inputs["qo_indptr"][number : number + 2] if p.ragged else (number, number + 1)
        pages = inputs["kv_indices"][inputs["kv_indptr"][number] : inputs["kv_indptr"][number + 1]]
        last = int(inputs["kv_last_page_len"][number]) if p.page_size > 1 else 1
        places = [
            (page, place)
            for index, page in enumerate(pages)
            for place in range(last if index == len(pages) - 1 else p.page_size)
        ]
        for token in range(first, end):
            visible = places[: max(0, len(places) - (end - 1 - token))] if p.causal else places
            keys = np.array([
                [*inputs["ckv_cache"][page, place], *inputs["kpe_cache"][page, place]] for page, place in visible
            ], dtype)  # fmt: skip
            for head in range(p.heads_q if visible else 0):
                query = np.array([*inputs["q_nope"][token, head], *inputs["q_pe"][token, head]], dtype)
                yield token, head, query, keys, keys[:, :512]


def definition(p: MlaProblem, inputs: Inputs) -> Array:
    """Row by row in extended precision: out, and lse behind it."""
    out = np.zeros((p.total_q, p.heads_q, 512), np.longdouble)
    lse = np.full((p.total_q, p.heads_q), -np.inf, np.longdouble)
    for token, head, query, keys, values in rows_of(p, inputs, np.longdouble):
        scores = p.scale * (keys @ query)
        most = scores.max()
        weights = np.exp(scores - most)
        out[token, head] = weights @ values / weights.sum()
        lse[token, head] = (most + np.log(weights.sum())) / np.log(np.longdouble(2))
    return np.concatenate([out.reshape(-1), lse.reshape(-1)]) if p.lse else out


def in_fp32(p: MlaProblem, inputs: Inputs, lost: bool) -> Array:
    """In single precision, with weights of 16 bits; without the first key in the sums where that is `lost`."""
    element = inputs["q_nope"].dtype
    out = np.zeros((p.total_q, p.heads_q, 512), np.float32)
    lse = np.full((p.total_q, p.heads_q), -np.inf, np.float32)
    for token, head, query, keys, values in rows_of(p, inputs, np.float32):
        bits = (np.float32(p.scale * math.log2(math.e)) * (keys @ query))[lost:]
        most = bits.max()
        weights = np.exp2(bits - most)
        narrow = weights.astype(element).astype(np.float32)
        out[token, head] = (narrow @ values[lost:] / weights.sum()).astype(element).astype(np.float32)
        lse[token, head] = most + np.log2(weights.sum())
    return np.concatenate([out.reshape(-1), lse.reshape(-1)]) if p.lse else out


def by_torch(p: MlaProblem, inputs: Inputs) -> Array:
    """The absorbed form by PyTorch's operations in float64; all rows see a key."""
    import torch

    out = np.zeros((p.total_q, p.heads_q, 512))
    for token, head, query, keys, _ in rows_of(p, inputs, np.float64):
        of_q, of_keys = torch.from_numpy(query), torch.from_numpy(keys)
        logits = of_keys[:, :512] @ of_q[:512] + of_keys[:, 512:] @ of_q[512:]
        out[token, head] = (torch.softmax(logits * p.scale, 0) @ of_keys[:, :512]).numpy()
    return out
