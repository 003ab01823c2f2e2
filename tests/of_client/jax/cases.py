"""Calls of `cukiln.jax` for its tests. Imported where they run: collecting tests starts no JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import cukiln.jax as cj

RANDOM = np.random.default_rng(7)


def random(*shape: int, dtype: str = "float32") -> Any:
    return jax.numpy.asarray(RANDOM.standard_normal(shape, np.float32)).astype(dtype)


def loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """A number that depends on every element in its own way."""

    def weighted(*arrays: Any) -> Any:
        out = function(*arrays).astype("float32")
        return (out * jax.numpy.linspace(0.5, 1.5, out.size).reshape(out.shape)).sum()

    return weighted


# Extents of whole vectors: products of one layout share a kernel.
X, W, V = random(8, 16), random(16, 12), random(12)
STACK, WIDE = random(3, 8, 16), random(3, 16, 12)
IMAGES, FILTERS = random(2, 7, 6, 4), random(8, 3, 3, 4)
Q, K = random(2, 5, 4, 16, dtype="float16"), random(2, 7, 2, 16, dtype="float16")
MASK = jax.numpy.asarray(RANDOM.integers(0, 2, (8, 16), bool))


def dense(x: Any, w: Any, bias: Any) -> Any:
    return cj.matmul(x, w, bias=bias, activation="gelu")


def convolution(x: Any, w: Any, bias: Any) -> Any:
    return cj.conv2d(x, w, bias=bias, activation="relu", stride=(2, 1), padding=((1, 0), (1, 1)))


# What is computed, and of what.
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "dense": (dense, (X, W, V)),
    "its gradients": (jax.grad(loss(dense), (0, 1, 2)), (X, W, V)),
    "a batch": (cj.matmul, (STACK, WIDE)),
    "a matrix for all": (cj.matmul, (STACK, W)),
    "gradients of a matrix for all": (jax.grad(loss(cj.matmul), (0, 1)), (STACK, W)),
    "transposed": (lambda a, b: cj.matmul(a, b, layout="tt"), (W, X)),
    "gradients of transposed": (jax.grad(loss(lambda a, b: cj.matmul(a, b, layout="tt")), (0, 1)), (W, X)),
    "mapped rows": (jax.vmap(dense, (0, None, None)), (STACK, W, V)),
    "mapped matrices": (jax.vmap(cj.matmul), (STACK, WIDE)),
    "mapped, one side": (jax.vmap(cj.matmul, (None, 0)), (X, WIDE)),
    "mapped twice": (jax.vmap(jax.vmap(cj.matmul, (0, None)), (None, 0)), (STACK, WIDE)),
    "mapped biases": (jax.vmap(dense, (None, None, 0)), (X, W, random(3, 12))),
    "mapped gradients": (jax.vmap(jax.grad(loss(dense), (0, 1)), (0, None, None)), (STACK, W, V)),
    "convolution": (convolution, (IMAGES, FILTERS, random(8))),
    "gradients of a convolution": (jax.grad(loss(convolution), (0, 1, 2)), (IMAGES, FILTERS, random(8))),
    "mapped images": (jax.vmap(lambda x: cj.conv2d(x, FILTERS)), (random(3, 2, 7, 6, 4),)),
    "channels first, in groups": (
        lambda x, w: cj.conv2d(x, w, groups=2, dilation=(1, 2), padding=1, layout="nchw"),
        (random(1, 8, 6, 9), random(6, 4, 3, 3)),
    ),
    "softmax": (cj.softmax, (STACK,)),
    "its gradient": (jax.grad(loss(cj.softmax)), (STACK,)),
    "layer_norm": (cj.layer_norm, (X, random(16), random(16))),
    "gradients of layer_norm": (jax.grad(loss(cj.layer_norm), (0, 1, 2)), (X, random(16), random(16))),
    "rms_norm": (cj.rms_norm, (X, random(16))),
    "reduce": (lambda x: cj.reduce(x, (0, 2)), (STACK,)),
    "mapped reduce": (jax.vmap(lambda x: cj.reduce(x, -1, "max")), (STACK,)),
    "masked_activation": (lambda x: cj.masked_activation(x, MASK, where_set="relu", where_clear="square"), (X,)),
    "gradient of masked_activation": (
        jax.grad(loss(lambda x: cj.masked_activation(x, MASK, where_set="relu", where_clear="square"))),
        (X,),
    ),
    "gradient of a mean": (jax.grad(loss(lambda x: cj.reduce(x, 1, "mean"))), (X,)),
    "bfloat16": (cj.matmul, (random(16, 32, dtype="bfloat16"), random(32, 16, dtype="bfloat16"))),
    "attention": (lambda q, k: cj.attention(q, k, k, causal=True), (Q, K)),
    "gradients of attention": (jax.grad(loss(lambda q, k: cj.attention(q, k, k)), (0, 1)), (Q, K)),
}
