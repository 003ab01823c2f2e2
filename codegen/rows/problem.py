"""Problems of operators that compute each row of a packed matrix from all of it: softmax and the norms."""

import math

from pydantic import Field, StrictBool, field_validator

from codegen.alignment import widest
from codegen.epilogue import Scalar
from codegen.problem import Float, FloatOut, Problem, Shape, require_elements, require_indexable


class RowProblem(Problem):
    """x and out are packed and of `shape`, whose last axis is a row; the axes before it become one, so that arrays with
    equally many rows are one problem. x is of `dtype`, out of `out_dtype`; sums are of float32."""

    shape: Shape
    dtype: Float = "float32"
    out_dtype: FloatOut = Field(default=None, validate_default=True)

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return self.shape[1]

    @property
    def align(self) -> int:
        """The alignment class: elements of the widest access of which a row is a whole number."""
        return widest(self.dtype, self.columns, quads=False)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the vectors that all rows share."""
        return ()

    @field_validator("shape", mode="after")
    @classmethod
    def _rows_of_columns(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        rows, columns = math.prod(value[:-1]), value[-1]
        require_indexable(rows, "rows (all axes but the last)")
        require_indexable(columns, "elements in a row (the last axis)")
        require_elements("x", rows * columns)
        return (rows, columns)


class NormProblem(RowProblem):
    """out = (x - centre) / sqrt(mean of (x - centre)^2 + epsilon), times gamma where `scale`, plus beta where `shift`.
    gamma and beta are vectors of a row's length and of `dtype`."""

    scale: StrictBool = True
    shift: StrictBool = False
    epsilon: Scalar = Field(default=1e-5, ge=0.0, description="What is added to the mean of the squares.")

    @property
    def vectors(self) -> tuple[str, ...]:
        return tuple(name for name, present in (("gamma", self.scale), ("beta", self.shift)) if present)
