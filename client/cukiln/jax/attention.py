"""`attention`: scaled dot products of queries and keys, softmax, values, in one kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from cukiln.errors import UsageError
from cukiln.jax.operation import SHORT, Arrays, Operation, all_mapped, apply, as_arrays, dtype_of, plain

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


def _product(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Of 16-bit operands as they are, summed in float32."""
    made: jax.Array = jnp.einsum(axes, a, b, preferred_element_type=jnp.float32)
    return made


@dataclass(frozen=True)
class Attention(Operation):
    causal: bool
    scale: float

    def problem(self, *arrays: jax.Array) -> Mapping[str, Any] | None:
        q, k, v = arrays
        dtype = dtype_of(q, k, v)
        if dtype not in SHORT or not 0 < self.scale < math.inf:
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
        q, k, v = self._together(arrays)
        weights, total = self._weights(q, k)
        out = _product("bngqk,bknd->bqngd", weights.astype(v.dtype), v) / jnp.moveaxis(total, 3, 1)
        return out.reshape(*arrays[0].shape[:-1], v.shape[-1]).astype(arrays[0].dtype)

    def gradients(self, cotangent: jax.Array, arrays: Arrays) -> Sequence[jax.Array]:
        q, k, v = self._together(arrays)
        dout = cotangent.astype(v.dtype).reshape(*q.shape[:-1], v.shape[-1])
        weights, total = self._weights(q, k)
        shares = weights / total
        of_shares = _product("bqngd,bknd->bngqk", dout, v)
        of_scores = shares * (of_shares - (of_shares * shares).sum(-1, keepdims=True)) * self.scale
        lower = of_scores.astype(q.dtype)
        gradients = (
            _product("bngqk,bknd->bqngd", lower, k),
            _product("bngqk,bqngd->bknd", lower, q),
            _product("bngqk,bqngd->bknd", shares.astype(v.dtype), dout),
        )
        return [made.reshape(array.shape).astype(array.dtype) for made, array in zip(gradients, arrays, strict=True)]

    def _together(self, arrays: Arrays) -> Arrays:
        """Of one dtype, that of kernels as it is; q as (batch, positions, heads of k, of q for each, head_dim)."""
        q, k, v = arrays
        if dtype_of(q, k, v) not in SHORT:
            q, k, v = (array.astype(jnp.float32) for array in arrays)
        return q.reshape(*q.shape[:2], k.shape[2], q.shape[2] // k.shape[2], q.shape[3]), k, v

    def _weights(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """e to the scores, of which the largest of a query is 1, and their sums, as a kernel has them: the values are
        weighted in 16 bits, and divided by the sum in float32."""
        scores = _product("bqngd,bknd->bngqk", q, k) * self.scale
        seen = jnp.ones(scores.shape[-2:], bool)
        if self.causal:
            seen = jnp.tril(seen, k.shape[1] - q.shape[1])
        scores = jnp.where(seen, scores, _LOWEST)
        largest = jax.lax.stop_gradient(scores.max(-1, keepdims=True, initial=_LOWEST))
        weights = jnp.where(seen, jnp.exp(scores - largest), 0.0)
        total = weights.sum(-1, keepdims=True)
        return weights, jnp.where(total == 0.0, 1.0, total)

    def batched(self, size: int, batched: Sequence[bool], arrays: Arrays) -> jax.Array:
        q, k, v = all_mapped(size, batched, arrays)
        together = (array.reshape(size * array.shape[1], *array.shape[2:]) for array in (q, k, v))
        return apply(self, *together).reshape(*q.shape[:-1], v.shape[-1])
