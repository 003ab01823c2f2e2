"""What tests of conv2d share: problems by a few fields, kernels by a few words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.operators.conv2d.problem import Conv2dProblem
from codegen.schedule import Schedule
from tests.cpu_helpers import MMA_K, SMALL_TENSOR_TILE, SMALL_TILE, TILE_K

DIRECT: dict[str, int | str] = {
    "algorithm": "direct", "threads": 64, "threads_k": 4, "filters": 4, "pixels": 2, "window": 0, "taps": 16,
}  # fmt: skip
# Elements of 16 bytes, or of the quads of the CUDA cores.
WIDEST = {"float16": 8, "bfloat16": 8, "float32": 4}


def conv2d(**fields: Any) -> Conv2dProblem:
    """A problem, 2 images of 12 x 10 x 16 and 24 filters of 3 x 3 where nothing else is said."""
    sizes = {"n": 2, "h": 12, "w": 10, "c": 16, "k": 24, "r": 3, "s": 3}
    problem = operator("conv2d").parse({"operator": "conv2d", **sizes, **fields})
    assert isinstance(problem, Conv2dProblem)
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
) -> dict[str, Any]:
    """`align`: elements per access of x, w and out; default: the widest that the layout has. A `bias` is that of the
    layout's channels."""
    wide = WIDEST[dtype]
    x, w, out = align or (wide if layout == "nhwc" or pointwise else 1, wide, wide)
    nodes = [f"bias.{'n' if layout == 'nhwc' else 'm'}" if node == "bias" else node for node in epilogue]
    return {
        "layout": layout, "dtype": dtype, "acc_dtype": "float32", "out_dtype": out_dtype or dtype,
        "allow_tf32": dtype == "float32" and tf32, "epilogue": nodes, "align_x": x, "align_w": w,
        "align_out": out, "pointwise": pointwise, "depthwise": depthwise,
    }  # fmt: skip


def tensor_kernel(words: Mapping[str, Any], operator: str = "conv2d", **tunables: Any) -> Kernel:
    """An implicit product on tensor cores (float32 is TF32); `words` are those of `signature`."""
    s = signature(**words)
    tile = {name: value for name, value in SMALL_TENSOR_TILE.items() if name != "static_k"}
    depth = {"tile_k": TILE_K[s["dtype"]], "mma_k": MMA_K[s["dtype"]]}
    return Kernel.of(operator, s, Schedule.of({"algorithm": "implicit_gemm", **tile, **depth, **tunables}))


def simt_kernel(words: Mapping[str, Any], operator: str = "conv2d", **tunables: Any) -> Kernel:
    """An implicit product on the CUDA cores."""
    s = signature(**{"dtype": "float32", "tf32": False, **words})
    return Kernel.of(operator, s, Schedule.of({"algorithm": "implicit_gemm", **SMALL_TILE, **tunables}))


def direct_kernel(words: Mapping[str, Any], operator: str = "conv2d", **tunables: Any) -> Kernel:
    return Kernel.of(operator, signature(**words), Schedule.of({**DIRECT, **tunables}))
