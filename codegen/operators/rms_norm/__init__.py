"""RMS normalisation: each row divided by its root mean square."""

from importlib.resources import files as packaged_files
from typing import Literal

from codegen.rows.operator import NormOperator
from codegen.rows.problem import NormProblem


class RmsNormProblem(NormProblem):
    """out = x / sqrt(mean of x^2 + epsilon), of each row, times gamma where `scale`, plus beta where `shift`."""

    operator: Literal["rms_norm"] = "rms_norm"


class RmsNorm(NormOperator):
    """See RmsNormProblem."""

    name = "rms_norm"
    problem_type = RmsNormProblem
    folder = packaged_files("codegen.operators.rms_norm")
    flops = 6
    centred = False


OPERATOR = RmsNorm()
