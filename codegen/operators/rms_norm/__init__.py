"""RMS normalisation: each row divided by its root mean square."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files as packaged_files
from typing import Literal

import numpy as np

from codegen.operator import Array, Float64, InputKind
from codegen.problem import Problem
from codegen.rows.operator import RowOperator
from codegen.rows.problem import NormProblem
from codegen.rows.reference import make_inputs, reference


class RmsNormProblem(NormProblem):
    """out = x / sqrt(mean of x^2 + epsilon), of each row, times gamma where `scale`, plus beta where `shift`."""

    operator: Literal["rms_norm"] = "rms_norm"


class RmsNorm(RowOperator):
    """See RmsNormProblem."""

    name = "rms_norm"
    problem_type = RmsNormProblem
    folder = packaged_files("codegen.operators.rms_norm")
    flops = 6

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        return make_inputs(self.own(problem), kind, rng, centred=False)

    def reference(self, problem: Problem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
        return reference(self.own(problem), inputs, centred=False)


OPERATOR = RmsNorm()
