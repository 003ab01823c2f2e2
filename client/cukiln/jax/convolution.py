"""`conv2d` with bias and activation in one kernel, and its gradients by kernels of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from cukiln.errors import UsageError
from cukiln.jax.operation import Arrays, Operation, apply, as_arrays, dtype_of
from cukiln.jax.product import (
    Activation,
    activated,
    before_activation,
    check_activation,
    check_bias,
    epilogue,
)
from cukiln.jax.xla_convolution import AXES, Padding, Pair, Window


def conv2d(
    x: Any,
    w: Any,
    *,
    bias: Any = None,
    activation: Activation | None = None,
    stride: int | Pair = 1,
    padding: int | Pair | Padding = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    layout: Literal["nhwc", "nchw"] = "nhwc",
) -> jax.Array:
    """activation(x * w + bias). `x`: (n, h, w, c), `w`: (k, r, s, c / groups); with `layout` `nchw` (n, c, h, w) and
    (k, c / groups, r, s); `bias`: (k,). `padding`: zeros on all sides, (along h, along w), or ((top, bottom),
    (left, right)). The answer has x's layout and dtype; sums are fp32.
    """
    check_activation(activation)
    if layout not in AXES:
        raise UsageError(f"layout is {layout!r}; allowed: {', '.join(map(repr, AXES))}")
    x, w = as_arrays(x, w)
    if x.ndim != 4 or w.ndim != 4:
        raise UsageError(f"x is {x.shape} and w {w.shape}; both have four axes")
    channels = -1 if layout == "nhwc" else 1
    if w.shape[channels] * groups != x.shape[channels] or w.shape[0] % groups:
        raise UsageError(f"x of {x.shape} and w of {w.shape} do not fit together with {groups} groups in {layout}")
    biases = [] if bias is None else as_arrays(bias)
    check_bias(biases, w.shape[0])
    geometry = Geometry(_pair(stride), _sides(padding), _pair(dilation), groups, layout)
    return apply(Conv2d(geometry, activation, bool(biases)), x, w, *biases)


@dataclass(frozen=True)
class Geometry(Window):
    def problem(self, operator: str, x: tuple[int, ...], w: tuple[int, ...], arrays: Arrays) -> dict[str, Any] | None:
        """Of an image and filters of these shapes; None where no kernel computes with the dtype of `arrays`."""
        if (dtype := dtype_of(*arrays)) is None:
            return None
        last = self.layout == "nhwc"
        n, height, width, c = x if last else (x[0], *x[2:], x[1])
        k, r, s = w[:3] if last else (w[0], *w[2:])
        extents = {"n": n, "h": height, "w": width, "c": c, "k": k, "r": r, "s": s}
        steps = {"stride": [*self.stride], "dilation": [*self.dilation]}
        settings = {**steps, "padding": [[*sides] for sides in self.padding], "groups": self.groups}
        return {"operator": operator, **extents, **settings, "layout": self.layout, "dtype": dtype}


@dataclass(frozen=True)
class Conv2d(Operation):
    geometry: Geometry
    activation: str | None = None
    bias: bool = False

    def problem(self, *arrays: jax.Array) -> Mapping[str, Any] | None:
        problem = self.geometry.problem("conv2d", arrays[0].shape, arrays[1].shape, arrays)
        return problem and {**problem, "epilogue": epilogue(self.activation, bias=self.bias)}

    def xla(self, *arrays: jax.Array) -> jax.Array:
        out = self.geometry.convolve(arrays[0], arrays[1])
        if self.bias:
            bias = arrays[2].astype(out.dtype)
            out = out + (bias if self.geometry.layout == "nhwc" else bias[:, None, None])
        return activated(self.activation, out).astype(arrays[0].dtype)

    def batched(self, size: int, batched: Sequence[bool], arrays: Arrays) -> jax.Array:
        return _images_together(self, size, batched, arrays)

    def gradients(self, cotangent: jax.Array, arrays: Arrays) -> Sequence[jax.Array]:
        x, w, *bias = arrays
        cotangent = before_activation(self, cotangent, arrays)
        of_x = apply(ImageGradient(self.geometry, x.shape), cotangent, w)
        of_w = apply(FilterGradient(self.geometry, w.shape), cotangent, x)
        axes = (0, 1, 2) if self.geometry.layout == "nhwc" else (0, 2, 3)
        sums = [cotangent.sum(axes, dtype=jnp.float32).astype(bias[0].dtype)] if bias else []
        return [of_x, of_w, *sums]


@dataclass(frozen=True)
class ImageGradient(Operation):
    """Of dy and w."""

    geometry: Geometry
    image: tuple[int, ...]

    def problem(self, *arrays: jax.Array) -> Mapping[str, Any] | None:
        dy, w = arrays
        return self.geometry.problem("conv2d_dgrad", (dy.shape[0], *self.image[1:]), w.shape, arrays)

    def xla(self, *arrays: jax.Array) -> jax.Array:
        dy, w = arrays
        return self.geometry.image_gradient(dy, w, (dy.shape[0], *self.image[1:])).astype(dy.dtype)

    def batched(self, size: int, batched: Sequence[bool], arrays: Arrays) -> jax.Array:
        return _images_together(self, size, batched, arrays)


@dataclass(frozen=True)
class FilterGradient(Operation):
    """Of dy and x."""

    geometry: Geometry
    filters: tuple[int, ...]

    def problem(self, *arrays: jax.Array) -> Mapping[str, Any] | None:
        return self.geometry.problem("conv2d_wgrad", arrays[1].shape, self.filters, arrays)

    def xla(self, *arrays: jax.Array) -> jax.Array:
        dy, x = arrays
        return self.geometry.filter_gradient(dy, x, self.filters).astype(dy.dtype)


def _images_together(operation: Operation, size: int, batched: Sequence[bool], arrays: Arrays) -> jax.Array:
    """Mapped images are more images; with mapped filters it is XLA's."""
    if any(batched[1:]):
        return Operation.batched(operation, size, batched, arrays)
    images = arrays[0]
    answer = apply(operation, images.reshape(size * images.shape[1], *images.shape[2:]), *arrays[1:])
    return answer.reshape(size, images.shape[1], *answer.shape[1:])


def _pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _sides(padding: int | Pair | Padding) -> Padding:
    along_h, along_w = (padding, padding) if isinstance(padding, int) else padding
    return _pair(along_h), _pair(along_w)
