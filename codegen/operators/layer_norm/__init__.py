"""Layer normalisation: each row with mean 0 and variance 1."""

from importlib.resources import files as packaged_files
from typing import Literal

from pydantic import StrictBool

from codegen.rows.operator import NormOperator
from codegen.rows.problem import NormProblem


class LayerNormProblem(NormProblem):
    """out = (x - mean) / sqrt(variance + epsilon), of each row, times gamma where `scale`, plus beta where `shift`."""

    operator: Literal["layer_norm"] = "layer_norm"
    shift: StrictBool = True


class LayerNorm(NormOperator):
    """See LayerNormProblem."""

    name = "layer_norm"
    problem_type = LayerNormProblem
    folder = packaged_files("codegen.operators.layer_norm")
    flops = 8
    centred = True


OPERATOR = LayerNorm()
