"""What every function of this package is to JAX: kernel or XLA, batching, a gradient."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cukiln.errors import UsageError
from cukiln.jax.kernels import call, find

SHORT = ("float16", "bfloat16")
FLOATS = ("float32", *SHORT)
Arrays = tuple[jax.Array, ...]


class Operation(ABC):
    """A function of arrays, with all else that it depends on as fields: a frozen dataclass, by which JAX's traces are
    distinguished."""

    @abstractmethod
    def problem(self, *arrays: jax.Array) -> Mapping[str, Any] | None:
        """The problem that this call is; None where the service has no such operator."""

    @abstractmethod
    def xla(self, *arrays: jax.Array) -> jax.Array:
        """The same by XLA."""

    def batched(self, size: int, batched: Sequence[bool], arrays: Arrays) -> jax.Array:
        """Under `vmap`: arrays whose `batched` is set have the mapped axis first, and so has the answer."""
        return jax.vmap(self.xla, [0 if mapped else None for mapped in batched], axis_size=size)(*arrays)

    def gradients(self, cotangent: jax.Array, arrays: Arrays) -> Sequence[jax.Array | None]:
        """Of each array; None where it has none. By XLA, which computes what it needs of the call again."""
        return tuple(jax.vjp(self.xla, *arrays)[1](cotangent))


def apply(operation: Operation, *arrays: jax.Array) -> jax.Array:
    """The operation, by its kernel where one is known."""
    answer: jax.Array = _function(operation)(*arrays)
    return answer


@functools.cache
def _function(operation: Operation) -> Any:
    @jax.custom_batching.custom_vmap
    def compute(*arrays: jax.Array) -> jax.Array:
        return _by_kernel_or_xla(operation, arrays)

    @compute.def_vmap
    def batched(size: int, mapped: Sequence[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        return operation.batched(size, mapped, arrays), True

    @jax.custom_vjp
    def differentiable(*arrays: jax.Array) -> Any:
        return compute(*arrays)

    differentiable.defvjp(
        lambda *arrays: (differentiable(*arrays), arrays),  # not `compute`: it has a gradient, too
        lambda arrays, cotangent: tuple(operation.gradients(cotangent, arrays)),
    )
    return differentiable


def _by_kernel_or_xla(operation: Operation, arrays: Arrays) -> jax.Array:
    problem = operation.problem(*arrays) if all(array.size for array in arrays) else None
    tuned = None if problem is None else find(problem)
    if tuned is None:
        return operation.xla(*arrays)

    def by_kernel(*inputs: jax.Array) -> jax.Array:
        like = jax.eval_shape(operation.xla, *inputs)
        return call(tuned, inputs, like)[0].reshape(like.shape)

    # Compiled for another platform, the program has XLA's way.
    by_platform = {tuned.platform: by_kernel}
    answer: jax.Array = jax.lax.platform_dependent(*arrays, **by_platform, default=operation.xla)
    return answer


def all_mapped(size: int, batched: Sequence[bool], arrays: Arrays) -> list[jax.Array]:
    """Each with the mapped axis first; those that have none, as often as it is long."""
    return [
        array if mapped else jnp.broadcast_to(array, (size, *array.shape))
        for array, mapped in zip(arrays, batched, strict=True)
    ]


def dtype_of(*arrays: jax.Array) -> str | None:
    """What all of them have, where kernels have it, too."""
    names = {str(array.dtype) for array in arrays}
    return names.pop() if len(names) == 1 and names <= set(FLOATS) else None


def plain(name: str, number: Any) -> float:
    """A number that a compiled program has as a constant. Raises `UsageError` for one that is traced."""
    if isinstance(number, jax.core.Tracer):
        raise UsageError(f"{name} is traced; it must be a number, the same for all calls of the compiled program")
    return float(number)


def as_arrays(*values: Any) -> list[jax.Array]:
    return [jnp.asarray(value) for value in values]
