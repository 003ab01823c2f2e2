"""The matmul problem: out[b, m, n] = epilogue(sum over k of A[b, m, k] * B[b, k, n])."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from codegen.canonical import as_integer
from codegen.epilogue import AnyNode, Chain
from codegen.fixed_point import RINGS, FractionBits, ShiftRounding, Truncation, exact_in_a_ring, keyed
from codegen.problem import (
    LARGEST_ELEMENTS,
    AllowTf32,
    Extent,
    Pitch,
    Problem,
    Stride,
    filled_in,
    of_dtype,
    refuse,
    require_elements,
)

Layout = Literal["nn", "nt", "tn", "tt"]
InputDtype = Literal["float32", "float16", "bfloat16", "int8", "int32", "int64"]
OutDtype = Literal["float32", "float16", "bfloat16", "int32", "int64"]
FLOATS: tuple[OutDtype, ...] = ("float32", "float16", "bfloat16")


def _derived(description: str) -> Any:
    return Field(default=None, validate_default=True, description=description, json_schema_extra=filled_in)


class MatmulProblem(Problem):
    """Row-major matrices; `layout`: first A (n: m x k is stored, t: k x m), then B (n: k x n, t: n x k).

    A and B are of `dtype`, sums of `acc_dtype`; out, biases and residuals of `out_dtype`. Sums of int8 products wrap
    around as int32 does. Over a ring (int32, int64) inputs, sums and out are of `dtype`, wrap around, and are truncated
    by `fraction_bits` (`codegen/fixed_point.py`). Leading dimensions and batch strides are in elements and default to
    packed. A batch stride of 0 repeats A or B.
    """

    operator: Literal["matmul"] = "matmul"
    m: Extent
    n: Extent
    k: Extent
    batch: Extent = 1
    layout: Layout = "nn"
    dtype: InputDtype = "float32"
    acc_dtype: Literal["float32", "int32", "int64"] = _derived(
        "Of the sums: int32 for int8 inputs, dtype over a ring, else float32."
    )
    out_dtype: OutDtype = _derived("Default: dtype; int32 for int8, which then takes no epilogue.")
    allow_tf32: AllowTf32 = False
    fraction_bits: FractionBits = 0
    rounding: ShiftRounding = None
    truncation: Truncation = None
    epilogue: Chain = ()
    lda: Pitch = _derived("Elements from one stored row of A to the next.")
    ldb: Pitch = _derived("Elements from one stored row of B to the next.")
    ldc: Pitch = _derived("Elements from one row of out to the next.")
    stride_a: Stride = _derived("Elements from one A to the next of the batch; 0: all share one.")
    stride_b: Stride = _derived("Elements from one B to the next of the batch; 0: all share one.")
    stride_c: Stride = _derived("Elements from one out to the next of the batch.")

    def canonical(self) -> dict[str, Any]:
        return keyed(super().canonical())

    @property
    def sum_length(self) -> int:
        return self.k

    @property
    def a_transposed(self) -> bool:
        return self.layout[0] == "t"

    @property
    def b_transposed(self) -> bool:
        return self.layout[1] == "t"

    def stored(self, operand: Literal["a", "b", "c"]) -> tuple[int, int]:
        """Rows and contiguous columns of an operand as it lies in memory."""
        return _stored(self.__dict__, operand)

    @field_validator("acc_dtype", mode="before")
    @classmethod
    def _wide_sums(cls, value: Any, info: ValidationInfo) -> Any:
        dtype = info.data.get("dtype", "float32")
        sums = "int32" if dtype == "int8" else dtype if dtype in RINGS else "float32"
        return sums if value is None else of_dtype(value, info, [sums])

    @field_validator("out_dtype", mode="before")
    @classmethod
    def _like_the_inputs(cls, value: Any, info: ValidationInfo) -> Any:
        dtype = info.data.get("dtype", "float32")
        if value is None:
            return "int32" if dtype == "int8" else dtype
        if dtype in RINGS:
            return of_dtype(value, info, [dtype])
        return of_dtype(value, info, [*FLOATS, "int32"] if dtype == "int8" else FLOATS)

    _exact_in_a_ring = field_validator("epilogue", mode="after")(exact_in_a_ring)

    @field_validator("epilogue", mode="after")
    @classmethod
    def _no_fp32_between_integers(cls, value: tuple[AnyNode, ...], info: ValidationInfo) -> tuple[AnyNode, ...]:
        if value and info.data.get("dtype") == "int8" and info.data.get("out_dtype") == "int32":
            raise refuse(
                "inexact_epilogue",
                "is computed in float32, which cannot hold every int32; out_dtype int32 takes an empty epilogue, an "
                f"epilogue takes out_dtype {' or '.join(FLOATS)}",
                allowed={"maxItems": 0},
            )
        return value

    @field_validator("lda", "ldb", "ldc", mode="before")
    @classmethod
    def _packed_pitch(cls, value: Any, info: ValidationInfo) -> Any:
        shape = _known(info, info.field_name[-1] if info.field_name else "")
        if value is None:
            return shape[1] if shape else 1  # without a shape another field is already at fault
        return value

    @field_validator("lda", "ldb", "ldc", mode="after")
    @classmethod
    def _wide_enough(cls, value: int, info: ValidationInfo) -> int:
        operand = (info.field_name or "")[-1]
        shape = _known(info, operand)
        if shape is None:
            return value
        rows, columns = shape
        if value < columns:
            raise refuse(
                "rows_overlap",
                f"is {value}, but a stored row of {_spelled(operand)} has {columns} elements; at least {columns} is "
                "allowed",
                allowed=columns,
            )
        require_elements(_spelled(operand), (rows - 1) * value + columns)
        return value

    @field_validator("ldc", "stride_c", mode="after")
    @classmethod
    def _packed_where_a_mask_counts(cls, value: int, info: ValidationInfo) -> int:
        fields = info.data
        if not any(node.packed_mask for node in fields.get("epilogue", ())) or _known(info, "c") is None:
            return value
        packed = fields["n"] if info.field_name == "ldc" else fields["m"] * fields["n"]
        if value != packed and (info.field_name == "ldc" or fields["batch"] > 1):
            raise refuse(
                "gaps_beside_a_packed_mask",
                f"is {value}; a packed mask counts outputs without gaps: {packed} is allowed, or a mask of bytes",
                allowed=packed,
            )
        return value

    @field_validator("stride_a", "stride_b", "stride_c", mode="before")
    @classmethod
    def _packed_stride(cls, value: Any, info: ValidationInfo) -> Any:
        operand = (info.field_name or "")[-1]
        shape = _known(info, operand)
        if shape is None or f"ld{operand}" not in info.data:
            return 0
        value = as_integer(value)
        # A boolean is no stride, though Python takes it for an integer.
        is_stride = type(value) is int and 0 <= value <= LARGEST_ELEMENTS
        if value is None or (info.data["batch"] == 1 and is_stride):
            # With one matrix the stride is never used: one spelling for all of them, so that they share a key.
            packed = shape[0] * info.data[f"ld{operand}"]
            return min(packed, LARGEST_ELEMENTS) if info.data["batch"] == 1 else packed
        return value

    @field_validator("stride_a", "stride_b", "stride_c", mode="after")
    @classmethod
    def _no_overlap(cls, value: int, info: ValidationInfo) -> int:
        operand = (info.field_name or "")[-1]
        shape = _known(info, operand)
        if shape is None or f"ld{operand}" not in info.data:
            return value
        batch, span = info.data["batch"], (shape[0] - 1) * info.data[f"ld{operand}"] + shape[1]
        repeats = operand != "c" and value == 0
        if batch > 1 and not repeats and value < span:
            or_zero = "" if operand == "c" else " or 0 (every matrix is the same)"
            raise refuse(
                "matrices_overlap",
                f"is {value}, but one {_spelled(operand)} spans {span} elements; at least {span}{or_zero} is allowed",
                allowed=span,
            )
        require_elements(_spelled(operand), (batch - 1) * value + span)
        return value


def _spelled(operand: str) -> str:
    return "out" if operand == "c" else operand.upper()


def _stored(fields: Mapping[str, Any], operand: str) -> tuple[int, int]:
    transposed = operand != "c" and fields["layout"]["ab".index(operand)] == "t"
    rows, columns = {"a": ("m", "k"), "b": ("k", "n"), "c": ("m", "n")}[operand]
    return (fields[columns], fields[rows]) if transposed else (fields[rows], fields[columns])


_OF_SHAPE = frozenset(("m", "n", "k", "batch", "layout"))


def _known(info: ValidationInfo, operand: str) -> tuple[int, int] | None:
    """Stored rows and columns; None where a field they need was refused already."""
    if not info.data.keys() >= _OF_SHAPE:
        return None
    return _stored(info.data, operand)
