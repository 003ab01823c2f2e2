"""What tests of the three convolutions share: problems by a few fields, kernels by a few words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from codegen.fixed_point import RINGS
from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.operators.conv2d import Conv2dProblem
from codegen.operators.convolution.problem import Convolution
from codegen.search.schedule import Schedule
from tests.support.kernels.cpu_helpers import MMA_K, SMALL_IMAD, SMALL_LIMBS, SMALL_TENSOR_TILE, SMALL_TILE, TILE_K

SIZES = {"n": 2, "h": 12, "w": 10, "c": 16, "k": 24, "r": 3, "s": 3}
DIRECT: dict[str, int | str] = {
    "algorithm": "direct", "threads": 64, "threads_k": 4, "filters": 4, "pixels": 2, "window": 0, "taps": 16,
}  # fmt: skip
DIRECT_WGRAD: dict[str, int | str] = {
    "algorithm": "direct", "threads": 64, "threads_k": 4, "filters": 4, "elements": 4, "split": "none",
}  # fmt: skip
EXACT_FUSED: dict[str, int | str] = {
    "algorithm": "winograd_fused", "output_tile": 2, "tile_m": 8, "tile_n": 8, "tile_k": 4, "thread_m": 4,
    "thread_n": 4, "truncate": "once",
}  # fmt: skip
# Elements of 16 bytes, or of the quads of the CUDA cores.
WIDEST = {"float16": 8, "bfloat16": 8, "float32": 4, "int32": 4, "int64": 2}
ALIGNS = {
    "conv2d": ("align_x", "align_w", "align_out"),
    "conv2d_dgrad": ("align_x", "align_w", "align_out"),
    "conv2d_wgrad": ("align_dy", "align_x", "align_dw"),
}


def convolution(name: str, **fields: Any) -> Convolution:
    """A problem, 2 images of 12 x 10 x 16 and 24 filters of 3 x 3 where nothing else is said."""
    problem = operator(name).parse({"operator": name, **SIZES, **fields})
    assert isinstance(problem, Convolution)
    return problem


def conv2d(**fields: Any) -> Conv2dProblem:
    problem = convolution("conv2d", **fields)
    assert isinstance(problem, Conv2dProblem)
    return problem


@dataclass(frozen=True)
class Kernels:
    """Of one of the three, which may be known by another name (`called`). `words` are those of `signature`."""

    operator: str
    called: str = ""

    def signature(
        self,
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
        bits: int = 0,
        rounding: str = "floor",
    ) -> dict[str, Any]:
        """`align`: elements per access of the operands in `ALIGNS`; default: the widest that the layout has. A `bias`
        is that of the filters; `bits` and `rounding` are of rings."""
        last, wide = layout == "nhwc", WIDEST[dtype]
        gathered = wide if last or (pointwise and self.operator != "conv2d_wgrad") else 1
        widest = {
            "conv2d": (gathered, wide, wide),
            "conv2d_dgrad": (gathered, 1 if depthwise else gathered, 1 if strided and not last else wide),
            "conv2d_wgrad": (wide, gathered, WIDEST[out_dtype or dtype]),
        }[self.operator]
        bias = "bias.n" if last and self.operator == "conv2d" else "bias.m"
        own: dict[str, Any] = {"strided": strided} if self.operator == "conv2d_dgrad" else {}
        ring = dtype if dtype in RINGS else ""
        own |= {"fraction_bits": bits, "rounding": rounding} if ring else {}
        return {
            "layout": layout, "dtype": dtype, "acc_dtype": ring or "float32", "out_dtype": out_dtype or dtype,
            "allow_tf32": dtype == "float32" and tf32, "pointwise": pointwise, "depthwise": depthwise, **own,
            "epilogue": [bias if node == "bias" else node for node in epilogue],
            **dict(zip(ALIGNS[self.operator], align or widest, strict=True)),
        }  # fmt: skip

    def tensor(self, words: Mapping[str, Any], **tunables: Any) -> Kernel:
        """An implicit product on tensor cores (float32 is TF32)."""
        dtype = words.get("dtype", "float16")
        tile = {name: value for name, value in SMALL_TENSOR_TILE.items() if name != "static_k"}
        depth = {"tile_k": TILE_K[dtype], "mma_k": MMA_K[dtype]}
        return self.kernel(words, {"algorithm": "implicit_gemm", **tile, **depth, **tunables})

    def simt(self, words: Mapping[str, Any], **tunables: Any) -> Kernel:
        """An implicit product on the CUDA cores."""
        plain = {"dtype": "float32", "tf32": False, **words}
        return self.kernel(plain, {"algorithm": "implicit_gemm", **SMALL_TILE, **tunables})

    def imad(self, words: Mapping[str, Any], **tunables: Any) -> Kernel:
        """An implicit product over a ring on the CUDA cores; by limbs: on tensor cores."""
        return self.kernel({"dtype": "int64", **words}, {**SMALL_IMAD, **tunables})

    def limbs(self, words: Mapping[str, Any], **tunables: Any) -> Kernel:
        return self.kernel({"dtype": "int64", **words}, {**SMALL_LIMBS, **tunables})

    def exact_winograd(self, way: str, words: Mapping[str, Any], **tunables: Any) -> Kernel:
        """Over a ring; `way`: "imad" or "limbs"."""
        products = {
            name: value for name, value in {"imad": SMALL_IMAD, "limbs": SMALL_LIMBS}[way].items() if name != "split"
        }
        own = {"algorithm": f"winograd_{way}", "output_tile": 2, "transform_width": 1}
        return self.kernel({"dtype": "int64", **words}, {**products, **own, **tunables})

    def exact_fused(self, words: Mapping[str, Any], **tunables: Any) -> Kernel:
        """Winograd over a ring in one launch."""
        return self.kernel({"dtype": "int64", **words}, {**EXACT_FUSED, **tunables})

    def direct(self, words: Mapping[str, Any], **tunables: Any) -> Kernel:
        own = DIRECT_WGRAD if self.operator == "conv2d_wgrad" else DIRECT
        return self.kernel(words, {**own, **tunables})

    def made(self, configs: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Kernel]:
        """By name: "tensor", "simt" or "direct", words, tunables."""
        return {name: getattr(self, kind)(words, **tunables) for name, (kind, words, tunables) in configs.items()}

    def kernel(self, words: Mapping[str, Any], tunables: Mapping[str, Any]) -> Kernel:
        return Kernel.of(self.called or self.operator, self.signature(**words), Schedule.of(tunables))
