"""Problems of operators that compute each row of a packed matrix from all of it: softmax and the norms."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, StrictBool, ValidationInfo, field_validator

from codegen.alignment import widest
from codegen.epilogue import Scalar
from codegen.problem import LARGEST_EXTENT, Problem, Shape, filled_in, refuse, require_elements

Float = Literal["float32", "float16", "bfloat16"]


class RowProblem(Problem):
    """x and out are packed and of `shape`, whose last axis is a row; the axes before it become one, so that arrays with
    equally many rows are one problem. x is of `dtype`, out of `out_dtype`; sums are of float32."""

    shape: Shape
    dtype: Float = "float32"
    out_dtype: Float = Field(
        default=None,
        validate_default=True,
        description="Default: dtype.",
        json_schema_extra=filled_in,
    )

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
        for name, extent in (("rows (all axes but the last)", rows), ("elements in a row (the last axis)", columns)):
            if extent > LARGEST_EXTENT:
                raise refuse(
                    "too_large",
                    "makes {extent} {name}; at most {allowed} can be indexed",
                    extent=extent,
                    name=name,
                    allowed=LARGEST_EXTENT,
                )
        require_elements("x", rows * columns)
        return (rows, columns)

    @field_validator("out_dtype", mode="before")
    @classmethod
    def _like_the_input(cls, value: Any, info: ValidationInfo) -> Any:
        return info.data.get("dtype", "float32") if value is None else value


class NormProblem(RowProblem):
    """out = (x - centre) / sqrt(mean of (x - centre)^2 + epsilon), times gamma where `scale`, plus beta where `shift`.
    gamma and beta are vectors of a row's length and of `dtype`."""

    scale: StrictBool = True
    shift: StrictBool = False
    epsilon: Scalar = Field(default=1e-5, ge=0.0, description="What is added to the mean of the squares.")

    @property
    def vectors(self) -> tuple[str, ...]:
        return tuple(name for name, present in (("gamma", self.scale), ("beta", self.shift)) if present)
