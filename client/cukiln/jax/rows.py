"""Functions of rows and of elements: softmax, the norms, reductions, masked activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import index
from typing import Any, Literal

import jax
import jax.numpy as jnp

from cukiln.errors import UsageError
from cukiln.jax.operation import Arrays, Operation, all_mapped, apply, as_arrays, dtype_of, plain
from cukiln.jax.product import ACTIVATIONS

Fn = Literal["sum", "mean", "max", "min"]
_FOLDS: Mapping[str, Any] = {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max, "min": jnp.min}


def softmax(x: Any) -> jax.Array:
    """Along the last axis."""
    (x,) = as_arrays(x)
    _floats("softmax", x)
    _has_rows("softmax", x)
    return apply(Softmax(), x)


def layer_norm(x: Any, scale: Any = None, shift: Any = None, *, epsilon: float = 1e-5) -> jax.Array:
    """(x − mean) / √(variance + epsilon) · scale + shift, along the last axis; `scale` and `shift`: vectors of its
    length, of x's dtype."""
    return _norm("layer_norm", x, scale, shift, epsilon)


def rms_norm(x: Any, scale: Any = None, shift: Any = None, *, epsilon: float = 1e-6) -> jax.Array:
    """x / √(mean of x² + epsilon) · scale + shift, along the last axis, as `layer_norm`."""
    return _norm("rms_norm", x, scale, shift, epsilon)


def _norm(operator: str, x: Any, scale: Any, shift: Any, epsilon: float) -> jax.Array:
    vectors = [vector for vector in (scale, shift) if vector is not None]
    arrays = as_arrays(x, *vectors)
    _floats(operator, *arrays)
    _has_rows(operator, arrays[0])
    return apply(Norm(operator, scale is not None, shift is not None, plain("epsilon", epsilon)), *arrays)


def _floats(name: str, *arrays: jax.Array) -> None:
    for array in arrays:
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise UsageError(f"{name} takes floats, and an array is {array.dtype}; x.astype('float32') is one")


def _has_rows(name: str, x: jax.Array) -> None:
    if not x.ndim:
        raise UsageError(f"{name} is along the last axis, and x has none: expected an array of at least one axis")


def reduce(x: Any, axes: int | Sequence[int], fn: Fn = "sum") -> jax.Array:
    """`fn` over `axes`, which the answer does not have; folded in fp32."""
    if fn not in _FOLDS:
        raise UsageError(f"fn is {fn!r}; allowed: {', '.join(map(repr, _FOLDS))}")
    (x,) = as_arrays(x)
    axes = tuple(index(axis) for axis in (axes if isinstance(axes, Sequence) else [axes]))
    if not x.ndim:
        raise UsageError(f"axes are {axes}, and x has none: it is a number already")
    if not axes or any(not -x.ndim <= axis < x.ndim for axis in axes):
        raise UsageError(f"axes are {axes}; allowed: at least one of {-x.ndim} to {x.ndim - 1}")
    return apply(Reduce(tuple(sorted({axis % x.ndim for axis in axes})), fn), x)


def masked_activation(x: Any, mask: Any, *, where_set: str = "relu", where_clear: str = "identity") -> jax.Array:
    """The function `where_set` of x where the mask, bools of x's shape, is set; elsewhere `where_clear`."""
    for name in (where_set, where_clear):
        if name not in _FUNCTIONS:
            raise UsageError(f"{name!r} is no function of a mask; allowed: {', '.join(map(repr, _FUNCTIONS))}")
    x, mask = as_arrays(x, mask)
    _floats("masked_activation", x)
    if mask.shape != x.shape or mask.dtype != jnp.bool_:
        raise UsageError(f"the mask is {mask.dtype} of {mask.shape}; expected bools of x's {x.shape}")
    return apply(MaskedActivation(where_set, where_clear), x, mask)


class _Rows(Operation):
    """Of which a mapped x alone is one with more rows."""

    def batched(self, size: int, batched: Sequence[bool], arrays: Arrays) -> jax.Array:
        if any(batched[1:]):
            return super().batched(size, batched, arrays)
        return apply(self, *arrays)


@dataclass(frozen=True)
class Softmax(_Rows):
    def problem(self, *arrays: jax.Array) -> Mapping[str, Any] | None:
        (x,) = arrays
        dtype = dtype_of(x)
        return None if dtype is None or not x.ndim else {"operator": "softmax", "shape": _rows(x), "dtype": dtype}

    def xla(self, *arrays: jax.Array) -> jax.Array:
        (x,) = arrays
        return jax.nn.softmax(_wide(x), axis=-1).astype(x.dtype)


@dataclass(frozen=True)
class Norm(_Rows):
    operator: str
    scale: bool
    shift: bool
    epsilon: float

    def problem(self, *arrays: jax.Array) -> Mapping[str, Any] | None:
        x, *vectors = arrays
        dtype = dtype_of(*arrays)
        fits = x.ndim and 0 <= self.epsilon < inf and all(vector.shape == x.shape[-1:] for vector in vectors)
        if dtype is None or not fits:
            return None
        settings = {"scale": self.scale, "shift": self.shift, "epsilon": self.epsilon}
        return {"operator": self.operator, "shape": _rows(x), "dtype": dtype, **settings}

    def xla(self, *arrays: jax.Array) -> jax.Array:
        wide = _wide(arrays[0])
        if self.operator == "layer_norm":
            wide = wide - wide.mean(-1, keepdims=True)
        out = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + self.epsilon)
        vectors = iter(arrays[1:])
        if self.scale:
            out = out * _wide(next(vectors))
        if self.shift:
            out = out + _wide(next(vectors))
        return out.astype(arrays[0].dtype)


@dataclass(frozen=True)
class Reduce(Operation):
    axes: tuple[int, ...]
    fn: str

    def problem(self, *arrays: jax.Array) -> Mapping[str, Any] | None:
        (x,) = arrays
        dtype = dtype_of(x)
        if dtype is None or x.ndim > 8:
            return None
        return {"operator": "reduce", "shape": list(x.shape), "axes": list(self.axes), "fn": self.fn, "dtype": dtype}

    def xla(self, *arrays: jax.Array) -> jax.Array:
        (x,) = arrays
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.asarray(_FOLDS[self.fn](x, axis=self.axes))
        folded: jax.Array = _FOLDS[self.fn](_wide(x), axis=self.axes)
        return folded.astype(x.dtype)

    def batched(self, size: int, batched: Sequence[bool], arrays: Arrays) -> jax.Array:
        return apply(replace(self, axes=tuple(axis + 1 for axis in self.axes)), *arrays)


@dataclass(frozen=True)
class MaskedActivation(Operation):
    where_set: str
    where_clear: str

    def problem(self, *arrays: jax.Array) -> Mapping[str, Any] | None:
        x, _ = arrays
        dtype = dtype_of(x)
        if dtype is None or not 1 <= x.ndim <= 8:
            return None
        functions = {"where_set": {"op": self.where_set}, "where_clear": {"op": self.where_clear}}
        return {"operator": "masked_activation", "shape": list(x.shape), "dtype": dtype, "mask": "bytes", **functions}

    def xla(self, *arrays: jax.Array) -> jax.Array:
        x, mask = arrays
        wide = _wide(x)
        return jnp.where(mask, _FUNCTIONS[self.where_set](wide), _FUNCTIONS[self.where_clear](wide)).astype(x.dtype)

    def batched(self, size: int, batched: Sequence[bool], arrays: Arrays) -> jax.Array:
        return apply(self, *all_mapped(size, batched, arrays))


_FUNCTIONS: Mapping[str, Any] = {
    **{name: ACTIVATIONS[name] for name in ("relu", "gelu", "silu")},
    "identity": lambda x: x,
    "square": lambda x: x * x,
}


def _rows(x: jax.Array) -> list[int]:
    """All rows along one axis: problems that differ in the axes before the last one alone are the same."""
    return [x.size // x.shape[-1], x.shape[-1]]


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
