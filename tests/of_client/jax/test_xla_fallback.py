"""Where no kernel is known, XLA computes in a kernel's types: 16-bit operands, float32 sums, 16-bit results."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_tvm_ffi") is None, reason="jax and jax-tvm-ffi are not installed"
)
# Shape of the image and filters (channels last), stride, padding, dilation, groups.
CONVOLUTIONS = [
    ((2, 7, 6, 4), (8, 3, 3, 4), (2, 1), ((1, 0), (1, 1)), (1, 1), 1),
    ((1, 9, 8, 6), (4, 2, 3, 3), (3, 2), ((0, 3), (2, 0)), (2, 1), 2),
]
SHORT = ["float16", "bfloat16"]
# Of the grids, what has every layout, every convolution, both dtypes, and both kinds of attention.
DRAWN = [("nhwc", 0, "float16"), ("nchw", 1, "bfloat16")]
EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.fixture(autouse=True)
def _without_kernels() -> None:
    import cukiln.jax as cj

    cj.configure(target=None)


def random(*shape: int, dtype: str, seed: int = 1) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def products(function: Callable[..., Any], *arrays: Any) -> list[tuple[set[str], str]]:
    """Of each product and convolution in the program: the dtypes of its operands, and that of its sums."""
    import jax

    made = []

    def walk(program: Any) -> None:
        for equation in program.eqns:
            if equation.primitive.name in ("dot_general", "conv_general_dilated"):
                operands = {str(operand.aval.dtype) for operand in equation.invars}
                made.append((operands, str(equation.outvars[0].aval.dtype)))
            for value in equation.params.values():
                for inner in value if isinstance(value, list | tuple) else [value]:
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        walk(inner)

    walk(jax.make_jaxpr(function)(*arrays).jaxpr)
    return made


def close(made: Any, expected: Any, dtype: str) -> None:
    """To the rounding of a 16-bit result, and of a 16-bit factor of each term."""
    made, expected = np.asarray(made, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(
        made, expected, rtol=4 * EPSILON[dtype], atol=4 * EPSILON[dtype] * np.abs(expected).max()
    )


@pytest.mark.parametrize(
    ("layout", "image", "filters", "stride", "padding", "dilation", "groups", "dtype"),
    [
        pytest.param(layout, *convolution, dtype, marks=() if (layout, number, dtype) in DRAWN else pytest.mark.long)
        for layout in ("nhwc", "nchw")
        for number, convolution in enumerate(CONVOLUTIONS)
        for dtype in SHORT
    ],
)
def test_a_convolution_and_its_gradients_are_those_of_wide_operands_rounded_once(
    dtype: str, image: Any, filters: Any, stride: Any, padding: Any, dilation: Any, groups: int, layout: Any
) -> None:
    import jax

    import cukiln.jax as cj

    if layout == "nchw":
        image, filters = ((shape[0], shape[3], *shape[1:3]) for shape in (image, filters))
    x, w = random(*image, dtype=dtype), random(*filters, dtype=dtype, seed=2)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "layout": layout}
    axes = ("NHWC", "OHWI", "NHWC") if layout == "nhwc" else ("NCHW", "OIHW", "NCHW")

    def ours(x: Any, w: Any, dy: Any) -> Any:
        y, pull = jax.vjp(lambda x, w: cj.conv2d(x, w, **options), x, w)
        return y, *pull(dy)

    def wide(x: Any, w: Any, dy: Any) -> Any:
        def convolve(x: Any, w: Any) -> Any:
            return jax.lax.conv_general_dilated(
                x, w, stride, padding, rhs_dilation=dilation, dimension_numbers=axes, feature_group_count=groups
            )

        y, pull = jax.vjp(convolve, x.astype("float32"), w.astype("float32"))
        return y, *pull(dy.astype("float32"))

    shape = jax.eval_shape(lambda x, w: cj.conv2d(x, w, **options), x, w).shape
    dy = random(*shape, dtype=dtype, seed=3)
    assert products(ours, x, w, dy) == [({dtype}, "float32")] * 3
    for made, expected in zip(jax.jit(ours)(x, w, dy), jax.jit(wide)(x, w, dy), strict=True):
        assert str(made.dtype) == dtype and made.shape == expected.shape
        np.testing.assert_allclose(
            np.asarray(made, np.float64), np.asarray(expected, np.float64), rtol=1.01 * EPSILON[dtype], atol=1e-5
        )


@pytest.mark.parametrize(
    ("dtype", "causal"),
    [
        ("float16", True),
        ("bfloat16", False),
        pytest.param("float16", False, marks=pytest.mark.long),
        pytest.param("bfloat16", True, marks=pytest.mark.long),
    ],
)
def test_attention_and_its_gradients_are_those_of_wide_operands_to_their_rounding(dtype: str, causal: bool) -> None:
    import jax
    import jax.numpy as jnp

    import cukiln.jax as cj

    q, k, v = (random(2, n, heads, 16, dtype=dtype, seed=n) for n, heads in ((7, 4), (5, 2), (5, 2)))

    def ours(q: Any, k: Any, v: Any, dy: Any) -> Any:
        y, pull = jax.vjp(lambda *arrays: cj.attention(*arrays, causal=causal), q, k, v)
        return y, *pull(dy)

    def wide(*arrays: Any) -> Any:
        q, k, v, dy = (array.astype(jnp.float32) for array in arrays)

        def attend(q: Any, k: Any, v: Any) -> Any:
            k, v = jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4
            seen = jnp.tril(jnp.ones((7, 5), bool), -2) if causal else jnp.ones((7, 5), bool)
            weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen, scores, -3e38), axis=-1), 0.0)
            return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

        y, pull = jax.vjp(attend, q, k, v)
        return y, *pull(dy)

    dy = random(2, 7, 4, 16, dtype=dtype, seed=9)
    assert {(frozenset(operands), sums) for operands, sums in products(ours, q, k, v, dy)} == {
        (frozenset({dtype}), "float32")
    }
    for made, expected in zip(jax.jit(ours)(q, k, v, dy), jax.jit(wide)(q, k, v, dy), strict=True):
        assert str(made.dtype) == dtype
        close(made, expected, dtype)


def test_gradients_have_gradients() -> None:
    import jax
    import jax.numpy as jnp

    import cukiln.jax as cj

    x, w = random(3, 6, dtype="float32"), random(6, 5, dtype="float32", seed=2)
    image, filters = random(1, 5, 5, 2, dtype="float32"), random(2, 3, 3, 2, dtype="float32", seed=2)
    axes = ("NHWC", "OHWI", "NHWC")
    pairs: list[tuple[Any, Any, Any]] = [
        (x, lambda x: cj.matmul(x, w, activation="tanh"), lambda x: jnp.tanh(x @ w)),
        (x, cj.softmax, lambda x: jax.nn.softmax(x, -1)),
        (
            image,
            lambda x: cj.conv2d(x, filters, padding=1, activation="silu"),
            lambda x: jax.nn.silu(
                jax.lax.conv_general_dilated(x, filters, (1, 1), [(1, 1)] * 2, dimension_numbers=axes)
            ),
        ),
    ]

    def twice(function: Any) -> Any:
        def slopes(x: Any) -> Any:
            return (jax.grad(lambda x: (function(x) ** 3).sum())(x) ** 2).sum()

        return jax.jit(jax.grad(slopes))

    for array, ours, theirs in pairs:
        close(twice(ours)(array), twice(theirs)(array), "float16")


def test_what_is_empty_is_empty_or_zero() -> None:
    import jax

    import cukiln.jax as cj

    x, w = random(0, 5, 5, 2, dtype="bfloat16"), random(2, 3, 3, 2, dtype="bfloat16")
    of_x, of_w = jax.grad(lambda x, w: cj.conv2d(x, w).sum(), (0, 1))(x, w)
    assert of_x.shape == x.shape and not np.asarray(of_w, np.float32).any()
    empty = random(1, 0, 2, 8, dtype="bfloat16")
    made = cj.attention(random(1, 3, 2, 8, dtype="bfloat16"), empty, empty)
    assert made.shape == (1, 3, 2, 8) and not np.asarray(made, np.float32).any()


def test_a_service_whose_address_is_none_is_xlas_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    import cukiln.jax as cj
    from cukiln.jax import kernels

    monkeypatch.setattr(kernels, "_configured", None)
    monkeypatch.setenv("CUKILN_URL", "http://a..b")
    with pytest.warns(UserWarning, match="XLA computes a call of softmax: .*a part that is empty"):
        out = cj.softmax(np.zeros((2, 4), np.float32))
    np.testing.assert_allclose(out, 0.25)
