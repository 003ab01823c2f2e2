"""`matmul`: products of matrices with bias and activation in one kernel, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from cukiln.errors import UsageError
from cukiln.jax.operation import Arrays, Operation, apply, as_arrays, dtype_of

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}
Activation = Literal["relu", "gelu", "silu", "tanh", "sigmoid"]
Layout = Literal["nn", "nt", "tn", "tt"]
_FLIPPED = {"n": "t", "t": "n"}


def activated(activation: str | None, x: jax.Array) -> jax.Array:
    return x if activation is None else ACTIVATIONS[activation](x)


def before_activation(operation: Any, cotangent: jax.Array, arrays: Arrays) -> jax.Array:
    """The cotangent of what an operation's activation is applied to."""
    if operation.activation is not None:
        before = apply(replace(operation, activation=None), *arrays)
        (cotangent,) = jax.vjp(lambda x: activated(operation.activation, x), before)[1](cotangent)
    return cotangent


def epilogue(activation: str | None, *, bias: bool) -> list[dict[str, str]]:
    return [{"op": "bias"}] * bias + ([] if activation is None else [{"op": activation}])


def check_activation(activation: str | None) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        raise UsageError(f"activation is {activation!r}; allowed: None, {', '.join(map(repr, ACTIVATIONS))}")


def matmul(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: Activation | None = None,
    layout: Layout = "nn",
    allow_tf32: bool = False,
) -> jax.Array:
    """activation(a · b + bias). `a`: (…, m, k), by layout's first letter `t` (…, k, m); `b`: (…, k, n), `t`: (…, n, k),
    or two-dimensional for all; `bias`: (n,). The answer is (…, m, n) of the inputs' dtype, summed in fp32.
    `allow_tf32`: float32 may be multiplied with the 10 bits that tensor cores have.
    """
    if len(layout) != 2 or set(layout) - {"n", "t"}:
        raise UsageError(f"layout is {layout!r}; allowed: 'nn', 'nt', 'tn', 'tt'")
    check_activation(activation)
    a, b = as_arrays(a, b)
    if activation is not None and not jnp.issubdtype(jnp.result_type(a, b), jnp.floating):
        raise UsageError(f"an activation takes floats, and the product is of {jnp.result_type(a, b)}")
    product = Product(layout, activation, bias is not None, allow_tf32)
    biases = [] if bias is None else as_arrays(bias)
    check_bias(biases, product.shapes(a, b)[2])
    return multiply(product, a, b, *biases)


def check_bias(biases: Sequence[jax.Array], length: int) -> None:
    for bias in biases:
        if bias.shape != (length,):
            raise UsageError(f"the bias is of {bias.shape}; expected ({length},)")


def multiply(product: Product, a: jax.Array, b: jax.Array, *bias: jax.Array) -> jax.Array:
    """The product, of matrices with equal axes before them, or of one for all rows of a."""
    batch, *_ = product.shapes(a, b)
    if b.ndim > 2 or product.layout[0] == "t":
        a, b = (jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))
    return apply(product, a, b, *bias)


@dataclass(frozen=True)
class Product(Operation):
    layout: str
    activation: str | None = None
    bias: bool = False
    allow_tf32: bool = False

    def shapes(self, a: jax.Array, b: jax.Array) -> tuple[tuple[int, ...], int, int, int]:
        """Batch, m, n and k. Raises `UsageError`."""
        if a.ndim < 2 or b.ndim < 2:
            raise UsageError(f"a is {a.shape} and b {b.shape}; matrices have at least two axes")
        m, k = a.shape[-2:] if self.layout[0] == "n" else a.shape[:-3:-1]
        of_b, n = b.shape[-2:] if self.layout[1] == "n" else b.shape[:-3:-1]
        batch_a, batch_b = a.shape[:-2], b.shape[:-2]
        if of_b != k or (batch_a and batch_b and batch_a != batch_b):
            raise UsageError(f"a of {a.shape} and b of {b.shape} cannot be multiplied with layout {self.layout!r}")
        return batch_a or batch_b, m, n, k

    def problem(self, *arrays: jax.Array) -> Mapping[str, Any] | None:
        dtype = dtype_of(*arrays)
        if dtype is None:
            return None
        a, b = arrays[:2]
        batch, m, n, k = self.shapes(a, b)
        count = math.prod(batch)
        problem: dict[str, Any] = {
            "operator": "matmul",
            "layout": self.layout,
            "dtype": dtype,
            "allow_tf32": self.allow_tf32,
            "epilogue": epilogue(self.activation, bias=self.bias),
        }
        if b.ndim == 2 and self.layout[0] == "n":  # one matrix with the rows of all
            return {**problem, "m": count * m, "n": n, "k": k}
        return {**problem, "m": m, "n": n, "k": k, "batch": count}

    def xla(self, *arrays: jax.Array) -> jax.Array:
        a, b = arrays[:2]
        a = a if self.layout[0] == "n" else jnp.swapaxes(a, -1, -2)
        b = b if self.layout[1] == "n" else jnp.swapaxes(b, -1, -2)
        precision = None if self.allow_tf32 else jax.lax.Precision.HIGHEST
        dtype = jnp.result_type(a, b)
        wide = jnp.float32 if dtype in (jnp.float16, jnp.bfloat16) else dtype
        out = jnp.matmul(a, b, precision=precision, preferred_element_type=wide)
        if self.bias:
            out = out + arrays[2].astype(wide)
        return activated(self.activation, out).astype(dtype)

    def batched(self, size: int, batched: Sequence[bool], arrays: Arrays) -> jax.Array:
        a, b, *rest = arrays
        if any(batched[2:]):  # a bias for each: behind the product
            plain = replace(self, activation=None, bias=False)
            mapped = any(batched[:2])
            out = multiply(plain, *self._together(size, batched, a, b)) if mapped else multiply(plain, a, b)[None]
            bias = rest[0].reshape(size, *(1,) * (out.ndim - 2), rest[0].shape[-1])
            return activated(self.activation, (out + bias).astype(jnp.float32)).astype(out.dtype)
        return multiply(self, *self._together(size, batched, a, b), *rest)

    def _together(self, size: int, batched: Sequence[bool], a: jax.Array, b: jax.Array) -> list[jax.Array]:
        """Both with equal axes before the matrix, the mapped one first; a matrix that all share stays as it is."""
        pairs = list(zip((a, b), batched, strict=False))
        batch = max(x.shape[1:-2] if mapped else x.shape[:-2] for x, mapped in pairs)
        return [x if x.ndim == 2 and not mapped else _mapped(x, mapped, (size, *batch)) for x, mapped in pairs]

    def gradients(self, cotangent: jax.Array, arrays: Arrays) -> Sequence[jax.Array]:
        a, b, *bias = arrays
        cotangent = before_activation(self, cotangent, arrays)
        of_a = self._of_a(cotangent, b)
        rows = (a, cotangent)
        if b.ndim == 2 and self.layout[0] == "n":  # the sum over the batch is part of one product
            rows = (_as_rows(a), _as_rows(cotangent))
        sums = [cotangent.sum(range(cotangent.ndim - 1), dtype=jnp.float32).astype(bias[0].dtype)] if bias else []
        return [of_a, self._of_b(*rows), *sums]

    def _of_a(self, cotangent: jax.Array, b: jax.Array) -> jax.Array:
        if self.layout[0] == "n":  # da = dc · bᵀ
            return multiply(Product(f"n{_FLIPPED[self.layout[1]]}", allow_tf32=self.allow_tf32), cotangent, b)
        return multiply(Product(f"{self.layout[1]}t", allow_tf32=self.allow_tf32), b, cotangent)  # daᵀ = b · dcᵀ

    def _of_b(self, a: jax.Array, cotangent: jax.Array) -> jax.Array:
        if self.layout[1] == "n":  # db = aᵀ · dc
            return multiply(Product(f"{_FLIPPED[self.layout[0]]}n", allow_tf32=self.allow_tf32), a, cotangent)
        return multiply(Product(f"t{self.layout[0]}", allow_tf32=self.allow_tf32), cotangent, a)  # dbᵀ = dcᵀ · a


def _as_rows(x: jax.Array) -> jax.Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # -1 is no axis of an empty array


def _mapped(x: jax.Array, mapped: bool, batch: tuple[int, ...]) -> jax.Array:
    """Matrices for each index of `batch`, whose first axis is the mapped one."""
    x = x if mapped else x[None]
    lacking = len(batch) + 2 - x.ndim
    return jnp.broadcast_to(x.reshape(x.shape[0], *(1,) * lacking, *x.shape[1:]), (*batch, *x.shape[-2:]))
