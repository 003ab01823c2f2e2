"""What tests of conv2d_dgrad share: problems by a few fields, kernels by a few words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.operators.conv2d_dgrad.problem import Conv2dDgradProblem
from codegen.schedule import Schedule
from tests.conv2d_kernels import DIRECT, WIDEST
from tests.cpu_helpers import MMA_K, SMALL_TENSOR_TILE, SMALL_TILE, TILE_K


def dgrad(**fields: Any) -> Conv2dDgradProblem:
    """A problem, 2 images of 12 x 10 x 16 and 24 filters of 3 x 3 where nothing else is said."""
    sizes = {"n": 2, "h": 12, "w": 10, "c": 16, "k": 24, "r": 3, "s": 3}
    problem = operator("conv2d_dgrad").parse({"operator": "conv2d_dgrad", **sizes, **fields})
    assert isinstance(problem, Conv2dDgradProblem)
    return problem


def signature(
    layout: str = "nhwc",
    dtype: str = "float16",
    align: tuple[int, int, int] | None = None,
    epilogue: Sequence[str] = (),
    *,
    tf32: bool = True,
    out_dtype: str = "",
    pointwise: bool = False,
    depthwise: bool = False,
    strided: bool = False,
) -> dict[str, Any]:
    """`align`: elements per access of dy, w and dx; default: the widest that the layout has."""
    wide = WIDEST[dtype]
    gathered = wide if layout == "nhwc" or pointwise else 1
    x, w, out = align or (gathered, 1 if depthwise else gathered, 1 if layout == "nchw" and strided else wide)
    return {
        "layout": layout, "dtype": dtype, "acc_dtype": "float32", "out_dtype": out_dtype or dtype,
        "allow_tf32": dtype == "float32" and tf32, "epilogue": list(epilogue), "align_x": x, "align_w": w,
        "align_out": out, "pointwise": pointwise, "depthwise": depthwise, "strided": strided,
    }  # fmt: skip


def tensor_kernel(words: Mapping[str, Any], operator: str = "conv2d_dgrad", **tunables: Any) -> Kernel:
    """An implicit product on tensor cores (float32 is TF32); `words` are those of `signature`."""
    s = signature(**words)
    tile = {name: value for name, value in SMALL_TENSOR_TILE.items() if name != "static_k"}
    depth = {"tile_k": TILE_K[s["dtype"]], "mma_k": MMA_K[s["dtype"]]}
    return Kernel.of(operator, s, Schedule.of({"algorithm": "implicit_gemm", **tile, **depth, **tunables}))


def simt_kernel(words: Mapping[str, Any], operator: str = "conv2d_dgrad", **tunables: Any) -> Kernel:
    """An implicit product on the CUDA cores."""
    s = signature(**{"dtype": "float32", "tf32": False, **words})
    return Kernel.of(operator, s, Schedule.of({"algorithm": "implicit_gemm", **SMALL_TILE, **tunables}))


def direct_kernel(words: Mapping[str, Any], operator: str = "conv2d_dgrad", **tunables: Any) -> Kernel:
    return Kernel.of(operator, signature(**words), Schedule.of({**DIRECT, **tunables}))
