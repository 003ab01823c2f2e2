"""Products for the vendor's libraries."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from codegen.operators.matmul.problem import MatmulProblem
from tests.support.fixtures.codegen import matmul
from workers.vendor.cublaslt import Layout

BIAS, BIAS_M = {"op": "bias", "axis": "n"}, {"op": "bias", "axis": "m"}


RESIDUAL, RELU, GELU = {"op": "residual"}, {"op": "relu"}, {"op": "gelu"}


HALF = {"op": "scale", "value": 0.5}


def small(fields: dict[str, Any]) -> MatmulProblem:
    return matmul(**{"m": 24, "n": 20, "k": 16, **fields})


def columns(flat: np.ndarray[Any, Any], layout: Layout, transpose: bool = False) -> np.ndarray[Any, Any]:
    """The matrices of a layout, as the library reads them: (batch, rows, columns), in float64."""
    assert layout.pitch >= layout.rows
    values = flat.view(ml_dtypes.bfloat16) if layout.dtype == "bfloat16" else flat
    size = values.itemsize
    steps = (layout.stride * size, size, layout.pitch * size)
    shape = (layout.batch, layout.rows, layout.columns)
    matrices = np.lib.stride_tricks.as_strided(values, shape, steps).astype(np.float64)
    return matrices.swapaxes(1, 2) if transpose else matrices
