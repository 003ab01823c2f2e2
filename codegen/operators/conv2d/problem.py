"""The conv2d problem, and which of Winograd's forms it allows."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from codegen.operators.convolution.problem import Convolution

Winograd = Literal["none", "f2", "f4"]
# What Winograd's two forms compute.
OF_WINOGRAD: dict[str, Any] = {"r": 3, "s": 3, "stride": (1, 1), "dilation": (1, 1), "groups": 1}
# Outputs along an axis of the tiles that each allows.
WINOGRAD: dict[str, tuple[int, ...]] = {"none": (), "f2": (2,), "f4": (2, 4)}


class Conv2dProblem(Convolution):
    """out from x and w; see Convolution for shapes."""

    reads = ("x", "w")
    writes = "out"
    operator: Literal["conv2d"] = "conv2d"
    winograd: Winograd = Field(
        default="none",
        description="Which of Winograd's forms may compute it, with their larger errors: f2 F(2 x 2, 3 x 3), f4 also "
        "F(4 x 4, 3 x 3). Means nothing where Winograd does not compute the convolution.",
    )

    def canonical(self) -> dict[str, Any]:
        """Without `winograd` where it is none, so that what was stored before it was a field is found."""
        fields = super().canonical()
        return {name: value for name, value in fields.items() if (name, value) != ("winograd", "none")}

    @field_validator("winograd", mode="after")
    @classmethod
    def _of_what_winograd_computes(cls, value: Winograd, info: ValidationInfo) -> Winograd:
        d = info.data
        return value if all(d.get(name, fit) == fit for name, fit in OF_WINOGRAD.items()) else "none"


def fits_winograd(problem: Convolution) -> bool:
    """Whether F(2 x 2, 3 x 3) and F(4 x 4, 3 x 3) compute the convolution."""
    return all(getattr(problem, name) == value for name, value in OF_WINOGRAD.items())
