"""Attention of sequences of uneven lengths: problems, and the references of each sequence by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from codegen.kernel import Candidate
from codegen.lower import lower
from codegen.operators.attention.problem import AttentionProblem
from codegen.search.search import Search
from tests.operators.attention.kernels import DEFAULT, LLAMA, attention, definition, in_fp32
from tests.operators.harness import declarations as declare
from tests.operators.harness.declarations import SM_90A, Array, Inputs

RAGGED: dict[str, Any] = {**DEFAULT, "lengths": "ragged", "batch": 3}
UNEVEN: dict[str, Any] = {"q_lengths": [70, 0, 9], "kv_lengths": [90, 5, 40]}
PREFILL: dict[str, Any] = {**LLAMA, "lengths": "ragged", "batch": 8, "q_lengths": [2048, 100, 7, 900, 64, 1500, 0, 333],
                           "kv_lengths": [2048, 100, 7, 900, 64, 1500, 0, 333]}  # fmt: skip


def sequences_of(p: AttentionProblem, inputs: Inputs) -> list[tuple[slice, AttentionProblem, Inputs]]:
    """Of each sequence with queries and keys: its rows of out, and the dense problem and inputs that it is."""
    of_q, of_kv = inputs["qo_indptr"].tolist(), inputs["kv_indptr"].tolist()
    parts = []
    for number in range(p.batch):
        rows, keys = slice(*of_q[number : number + 2]), slice(*of_kv[number : number + 2])
        if rows.stop > rows.start and keys.stop > keys.start:
            own = p.sequence(rows.stop - rows.start, keys.stop - keys.start)
            parts.append((rows, own, {"q": inputs["q"][None, rows], **{n: inputs[n][None, keys] for n in ("k", "v")}}))
    return parts


def ragged_of(compute: Any, p: AttentionProblem, inputs: Inputs, *more: Any) -> Array:
    """Each sequence by itself, as `compute` has it."""
    out = np.zeros((p.total_q, p.heads_q, p.head_dim_vo), np.longdouble)
    lse = np.full((p.total_q, p.heads_q), -np.inf, np.longdouble)
    for rows, own, given in sequences_of(p, inputs):
        result = compute(own, given, *more).reshape(-1)
        outs = own.seq_q * own.heads_q * own.head_dim_vo
        out[rows] = result[:outs].reshape(own.seq_q, own.heads_q, own.head_dim_vo)
        if p.lse:
            lse[rows] = result[outs:].reshape(own.heads_q, own.seq_q).T
    return np.concatenate([out.reshape(-1), lse.reshape(-1)]) if p.lse else out


REFERENCED: dict[str, dict[str, Any]] = {
    "uneven": {"q_lengths": [5, 0, 3], "kv_lengths": [9, 4, 1], "head_dim_qk": 16},
    "causal": {"q_lengths": [6, 1, 4], "kv_lengths": [11, 7, 4], "head_dim_qk": 16, "causal": True},
    "a window": {"q_lengths": [12, 3, 5], "kv_lengths": [7, 9, 0], "head_dim_qk": 8, "head_dim_vo": 12,
                 "window_left": 6, "window_right": 1, "dtype": "bfloat16"},
}  # fmt: skip
BOUNDED: dict[str, dict[str, Any]] = {
    "uneven": UNEVEN, "causal": {**UNEVEN, "causal": True, "lse": True, "dtype": "bfloat16"}
}  # fmt: skip


def planned(of: Mapping[str, Any] = RAGGED) -> list[Candidate]:
    problem = attention(**{**of, **UNEVEN, "causal": True, "lse": True})
    one, two = (
        lower(problem, SM_90A, Search(level=level, limit=limit)).candidates for level, limit in ((1, 3), (2, 3))
    )
    return [*one, *two]


def table(length: int, dtype: str = "int32", **where: Any) -> str:
    return f"T(({length},), {dtype!r}, **{where!r})"


def references(
    sequence_by_sequence: Callable[..., Array], defined: Mapping[str, Any], bounded: Mapping[str, Any]
) -> declare.References:
    """`sequence_by_sequence` has each computed by the reference of a dense problem."""
    return declare.References(
        definition=partial(sequence_by_sequence, definition),
        defined=defined,
        exact=False,
        rtol=1e-10,
        atol=1e-13,
        in_fp32=partial(sequence_by_sequence, in_fp32),
        bounded=bounded,
        wrong=8,
        on_device=[
            (kind, {**fields, "lse": True})
            for kind, fields in product(("integer", "normal", "special"), defined.values())
        ],
        on_device_rtol=1e-12,
    )
