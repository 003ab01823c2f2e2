"""The conv2d_dgrad problem: the gradient of a convolution's image.

dx[n, h, w, g C' + c] = epilogue(sum over p, r, q, s, k of dy[n, p, q, g K' + k] * w[g K' + k, r, s, c]) over all p and
r with p stride_h - top + r dilation_h = h, and q and s likewise; C' and K' are the channels and filters of a
group.
"""

from math import gcd
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from codegen.epilogue import MAX_NODES, Cast, Clip, Mask, Residual, Scale
from codegen.operators.convolution.problem import AllowsWinograd, Padding
from codegen.problem import refuse, require_indexable

AnyNode = Annotated[Scale | Residual | Mask | Clip | Cast, Field(discriminator="op")]
# Residues of a stride along an axis at most; no convolution in use has as many.
MOST_RESIDUES = 65536


class Conv2dDgradProblem(AllowsWinograd):
    """dx from dy and w. The fields are those of the convolution: dx has the shape that x has there, dy that of out.

    dy and w are of `dtype`, sums of float32; dx and residuals of `out_dtype`; over a ring all are of `dtype`.
    """

    reads = ("dy", "w")
    gathered = "dy"
    writes = "dx"
    most_padding = 2  # of a window of 3, or dx would be read from dy without its borders
    operator: Literal["conv2d_dgrad"] = "conv2d_dgrad"
    epilogue: Annotated[tuple[AnyNode, ...], Field(max_length=MAX_NODES)] = ()

    @property
    def strided(self) -> bool:
        """Whether rows or columns of dx differ in their taps."""
        return max(self.stride) > 1

    @property
    def longest_sum(self) -> int:
        """Of a row of filter elements only those count that meet the same row of dx."""
        rows, columns = (-(-taps // self.tap_step(axis)) for axis, taps in enumerate((self.r, self.s)))
        return rows * columns * self.group_filters

    def tap_step(self, axis: int) -> int:
        """From one tap that meets a row or column of dx to the next."""
        return self.stride[axis] // gcd(self.stride[axis], self.dilation[axis])

    @property
    def gathered_products(self) -> int:
        return self.group_filters * self.r * self.s

    @field_validator("padding", mode="after")
    @classmethod
    def _can_be_counted(cls, value: Padding, info: ValidationInfo) -> Padding:
        d = info.data
        if any(name not in d for name in ("n", "h", "w", "r", "s", "stride")):
            return value  # another field is already at fault
        require_indexable(d["n"] * d["h"] * d["w"], "pixels of dx (n h w)")
        for axis, (extent, taps) in enumerate((("h", "r"), ("w", "s"))):
            residues = min(d["stride"][axis], max(d[extent], d[taps]))
            if residues > MOST_RESIDUES:
                raise refuse(
                    "too_large",
                    f"makes {residues} residues of the stride along {extent}; at most {MOST_RESIDUES} are possible",
                    allowed=MOST_RESIDUES,
                )
        return value
