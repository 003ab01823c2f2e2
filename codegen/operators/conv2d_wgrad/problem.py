"""The conv2d_wgrad problem: the gradient of a convolution's filters, from the gradient of its output and its image.

dw[k, c, r, s] = epilogue(sum over n, p, q of dy[n, k, p, q] * x[n, g C' + c, p stride_h - top + r dilation_h, …])
for the group g of filter k and C' = c / groups channels of a group; what lies outside of x counts as 0.
"""

from typing import Literal

from pydantic import field_validator

from codegen.operators.convolution.problem import AnyNode, Convolution
from codegen.problem import refuse


class Conv2dWgradProblem(Convolution):
    """dw from dy and x, with the fields of the convolution itself; dy has the shape of its output, dw of its filters.

    dy and x are of `dtype`; dw, biases and residuals of `out_dtype`; over a ring all are of `dtype`.
    """

    reads = ("dy", "x")
    writes = "dw"
    operator: Literal["conv2d_wgrad"] = "conv2d_wgrad"

    @field_validator("epilogue", mode="after")
    @classmethod
    def _without_activation_masks(cls, value: tuple[AnyNode, ...]) -> tuple[AnyNode, ...]:
        if any(node.op == "masked_activation" for node in value):
            raise refuse("no_activation", "masked_activation is for outputs of a layer; a gradient of filters has none")
        return value

    @property
    def sum_length(self) -> int:
        return self.pixels

    @property
    def pointwise(self) -> bool:
        """Whether it is a product of stored matrices. With channels first there would be one for each image."""
        return super().pointwise and self.channels_last

    @property
    def one_channel(self) -> bool:
        """Whether a filter has one channel: depthwise, or several filters for each channel."""
        return self.group_channels == 1
