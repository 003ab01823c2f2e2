"""The conv2d problem."""

from typing import Literal

from codegen.operators.convolution.problem import AllowsWinograd


class Conv2dProblem(AllowsWinograd):
    """out from x and w; see Convolution for shapes."""

    reads = ("x", "w")
    writes = "out"
    operator: Literal["conv2d"] = "conv2d"
