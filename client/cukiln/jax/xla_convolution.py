"""Convolutions by XLA, with the types of kernels: 16-bit operands are multiplied as they are and summed in float32.

The gradients are convolutions of their own: JAX's transposed ones have no type for their sums, and refuse a cotangent
that is wider than the operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

Pair = tuple[int, int]
Padding = tuple[Pair, Pair]
AXES = {"nhwc": ("NHWC", "OHWI", "NHWC"), "nchw": ("NCHW", "OIHW", "NCHW")}
_SHORT = (jnp.float16, jnp.bfloat16)


@dataclass(frozen=True)
class Window:
    """How filters meet an image. `layout`: a key of AXES."""

    stride: Pair
    padding: Padding
    dilation: Pair
    groups: int
    layout: str

    def convolve(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Of float32 or wider."""
        x, w = _alike(x, w)
        out: jax.Array = jax.lax.conv_general_dilated(
            x,
            w,
            self.stride,
            self.padding,
            rhs_dilation=self.dilation,
            dimension_numbers=AXES[self.layout],
            feature_group_count=self.groups,
            **_terms(x),
        )
        return out

    def image_gradient(self, dy: jax.Array, w: jax.Array, image: Sequence[int]) -> jax.Array:
        """Of the image, whose shape is given: the filters, turned round, meet dy with zeros between its pixels."""
        dy, w = _alike(dy, w)
        if not (dy.size and w.size and prod(image)):
            return jnp.zeros(tuple(image), _wide(dy))
        axes = jax.lax.conv_dimension_numbers(tuple(image), w.shape, AXES[self.layout])
        filters, channels, *places = axes.rhs_spec
        turned = _moved_groups(jax.lax.rev(w, places), filters, channels, self.groups)
        spec = (channels, filters, *places)
        gaps = []
        for axis, (low, _) in enumerate(self.padding):
            size, reach, spread = self._lengths(axis, dy.shape, w.shape, image)
            gaps.append((reach - low - 1, size - spread + low))
        out: jax.Array = jax.lax.conv_general_dilated(
            dy,
            turned,
            (1, 1),
            gaps,
            lhs_dilation=self.stride,
            rhs_dilation=self.dilation,
            dimension_numbers=jax.lax.ConvDimensionNumbers(axes.out_spec, spec, axes.lhs_spec),
            feature_group_count=self.groups,
            **_terms(dy),
        )
        return out

    def filter_gradient(self, dy: jax.Array, x: jax.Array, filters: Sequence[int]) -> jax.Array:
        """Of the filters, whose shape is given: the image meets dy as a filter, with images as channels."""
        dy, x = _alike(dy, x)
        if not (dy.size and x.size and prod(filters)):
            return jnp.zeros(tuple(filters), _wide(dy))
        axes = jax.lax.conv_dimension_numbers(x.shape, tuple(filters), AXES[self.layout])
        images, channels, *places = axes.lhs_spec
        grouped = _moved_groups(x, channels, images, self.groups)
        gaps = []
        for axis, (low, _) in enumerate(self.padding):
            size, reach, spread = self._lengths(axis, dy.shape, filters, x.shape)
            gaps.append((low, spread - size + reach - low - 1))

        def exchanged(spec: Sequence[int]) -> tuple[int, ...]:
            return (spec[1], spec[0], *spec[2:])

        out: jax.Array = jax.lax.conv_general_dilated(
            grouped,
            dy,
            self.dilation,
            gaps,
            rhs_dilation=self.stride,
            dimension_numbers=jax.lax.ConvDimensionNumbers(
                (channels, images, *places), exchanged(axes.out_spec), exchanged(axes.rhs_spec)
            ),
            feature_group_count=self.groups,
            **_terms(dy),
        )
        return out

    def _lengths(
        self, axis: int, dy: Sequence[int], filters: Sequence[int], image: Sequence[int]
    ) -> tuple[int, int, int]:
        """Along h or w: pixels of the image, those that a filter reaches over, and from dy's first to its last."""
        place = axis + (1 if self.layout == "nhwc" else 2)
        reach = (filters[place] - 1) * self.dilation[axis] + 1
        return image[place], reach, (dy[place] - 1) * self.stride[axis] + 1


def _moved_groups(x: jax.Array, of: int, to: int, groups: int) -> jax.Array:
    """The groups that stand in front in one axis, in front in another."""
    if groups == 1:
        return x
    apart = list(x.shape)
    apart[of : of + 1] = [groups, x.shape[of] // groups]
    together = list(x.shape)
    together[of] //= groups
    together[to] *= groups
    return jnp.moveaxis(x.reshape(apart), of, to).reshape(together)


def _alike(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both of one dtype: their own where that is one of kernels."""
    if a.dtype == b.dtype and a.dtype in _SHORT:
        return a, b
    wide = jnp.promote_types(jnp.result_type(a, b), jnp.float32)
    return a.astype(wide), b.astype(wide)


def _wide(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _terms(x: jax.Array) -> dict[str, Any]:
    """float32 is multiplied with all of its bits."""
    precision = None if x.dtype in _SHORT else jax.lax.Precision.HIGHEST
    return {"precision": precision, "preferred_element_type": _wide(x)}
