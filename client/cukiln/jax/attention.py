"""`attention`: scaled dot products of queries and keys, softmax, values, in one kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from cukiln.errors import UsageError
from cukiln.jax.operation import Arrays, Operation, apply, as_arrays, dtype_of, plain

_LOWEST = -3.0e38  # of a score that is not seen: −inf would give NaN where a query sees none


def attention(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None) -> jax.Array:
    """softmax(scale · q kᵀ) v. `q`: (batch, positions, heads, head_dim); `k`, `v`: the same, with a divisor of q's
    heads; `scale`: default 1 / √head_dim. `causal`: the last query sees the last key, and each before it one less; a
    query that sees none gives zeros. Gradients are XLA's, which holds all scores.
    """
    q, k, v = as_arrays(q, k, v)
    heads, fewer = q.shape[2:3], k.shape[2:3]
    matching = q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] and k.shape[:3] == v.shape[:3]
    if not matching or q.shape[3] != k.shape[3] or not fewer[0] or heads[0] % fewer[0]:
        raise UsageError(
            f"q, k and v are {q.shape}, {k.shape} and {v.shape}; expected (batch, positions, heads, head_dim): "
            "of k and v equal but for head_dim; of q and k equal batch and head_dim, q's heads a multiple of k's"
        )
    return apply(Attention(causal, 1 / math.sqrt(q.shape[3]) if scale is None else plain("scale", scale)), q, k, v)


@dataclass(frozen=True)
class Attention(Operation):
    causal: bool
    scale: float

    def problem(self, *arrays: jax.Array) -> Mapping[str, Any] | None:
        q, k, v = arrays
        dtype = dtype_of(q, k, v)
        if dtype not in ("float16", "bfloat16") or not 0 < self.scale < math.inf:
            return None
        return {
            "operator": "attention",
            "batch": q.shape[0],
            "seq_q": q.shape[1],
            "seq_kv": k.shape[1],
            "heads_q": q.shape[2],
            "heads_kv": k.shape[2],
            "head_dim_qk": q.shape[3],
            "head_dim_vo": v.shape[3],
            "causal": self.causal,
            "scale": self.scale,
            "dtype": dtype,
        }

    def xla(self, *arrays: jax.Array) -> jax.Array:
        q, k, v = (array.astype(jnp.float32) for array in arrays)
        group = q.shape[2] // k.shape[2]
        k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * self.scale
        seen = jnp.ones(scores.shape[-2:], bool)
        if self.causal:
            seen = jnp.tril(seen, k.shape[1] - q.shape[1])
        weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen, scores, _LOWEST), axis=-1), 0.0)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v).astype(arrays[0].dtype)

    def batched(self, size: int, batched: Sequence[bool], arrays: Arrays) -> jax.Array:
        q, k, v = (
            array if mapped else jnp.broadcast_to(array, (size, *array.shape))
            for array, mapped in zip(arrays, batched, strict=True)
        )
        together = (array.reshape(size * array.shape[1], *array.shape[2:]) for array in (q, k, v))
        return apply(self, *together).reshape(*q.shape[:-1], v.shape[-1])
