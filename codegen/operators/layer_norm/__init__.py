"""Layer normalisation: each row with mean 0 and variance 1."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files as packaged_files
from typing import Literal

import numpy as np
from pydantic import StrictBool

from codegen.operator import Array, Float64, InputKind
from codegen.problem import Problem
from codegen.rows.operator import RowOperator
from codegen.rows.problem import NormProblem
from codegen.rows.reference import make_inputs, reference


class LayerNormProblem(NormProblem):
    """out = (x - mean) / sqrt(variance + epsilon), of each row, times gamma where `scale`, plus beta where `shift`."""

    operator: Literal["layer_norm"] = "layer_norm"
    shift: StrictBool = True


class LayerNorm(RowOperator):
    """See LayerNormProblem."""

    name = "layer_norm"
    problem_type = LayerNormProblem
    folder = packaged_files("codegen.operators.layer_norm")
    flops = 8

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        return make_inputs(self.own(problem), kind, rng, centred=True)

    def reference(self, problem: Problem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
        return reference(self.own(problem), inputs, centred=True)


OPERATOR = LayerNorm()
