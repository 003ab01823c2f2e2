"""The matmul problem: out[b, m, n] = epilogue(sum over k of A[b, m, k] * B[b, k, n])."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from codegen.canonical import as_integer
from codegen.epilogue import AnyNode, Chain
from codegen.operators.matmul.fixed_point import (
    FUNCTIONS,
    NODES,
    RINGS,
    ExactOnce,
    Rounding,
    Tolerance,
    Truncation,
    bits_of,
    foreign_node,
    ring_name,
    squares,
)
from codegen.problem import (
    LARGEST_ELEMENTS,
    AllowTf32,
    Extent,
    Pitch,
    Problem,
    Stride,
    filled_in,
    refuse,
    require_elements,
)

Layout = Literal["nn", "nt", "tn", "tt"]
InputDtype = Literal["float32", "float16", "bfloat16", "int8", "int32", "int64"]
OutDtype = Literal["float32", "float16", "bfloat16", "int32", "int64"]
# Fields that problems over rings alone have: others are keyed without them.
FIXED_POINT = ("fraction_bits", "rounding", "truncation")
FLOATS: tuple[OutDtype, ...] = ("float32", "float16", "bfloat16")


def _derived(description: str) -> Any:
    return Field(default=None, validate_default=True, description=description, json_schema_extra=filled_in)


class MatmulProblem(Problem):
    """Row-major matrices; `layout`: first A (n: m x k is stored, t: k x m), then B (n: k x n, t: n x k).

    A and B are of `dtype`, sums of `acc_dtype`; out, biases and residuals of `out_dtype`. Sums of int8 products wrap
    around as int32 does. Over a ring (int32, int64) inputs, sums and out are of `dtype`, wrap around, and are truncated
    by `fraction_bits` (`fixed_point.py`). Leading dimensions and batch strides are in elements and default to packed. A
    batch stride of 0 repeats A or B.
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
    fraction_bits: Annotated[int, Field(strict=True, ge=0, le=63), BeforeValidator(as_integer)] = Field(
        default=0, description="Over a ring: by how many bits sums are shifted; below those of dtype."
    )
    rounding: Rounding | None = Field(
        default=None,
        validate_default=True,
        description="Of that shift: floor (default) or nearest, ties up. Rings alone have it.",
    )
    truncation: Truncation | None = Field(
        default=None,
        validate_default=True,
        description="exact_once (default): the wrapped sum is shifted once. tolerance: within ulp of that, where "
        "nothing wraps around; schedules may then truncate parts of a sum. Rings alone have it.",
    )
    epilogue: Chain = ()
    lda: Pitch = _derived("Elements from one stored row of A to the next.")
    ldb: Pitch = _derived("Elements from one stored row of B to the next.")
    ldc: Pitch = _derived("Elements from one row of out to the next.")
    stride_a: Stride = _derived("Elements from one A to the next of the batch; 0: all share one.")
    stride_b: Stride = _derived("Elements from one B to the next of the batch; 0: all share one.")
    stride_c: Stride = _derived("Elements from one out to the next of the batch.")

    def canonical(self) -> dict[str, Any]:
        """Without the fields of rings where there is none, so that what was known by its key stays known."""
        fields = super().canonical()
        return fields if self.dtype in RINGS else {name: fields[name] for name in fields if name not in FIXED_POINT}

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
        return sums if value is None else _of_dtype(value, info, [sums])

    @field_validator("out_dtype", mode="before")
    @classmethod
    def _like_the_inputs(cls, value: Any, info: ValidationInfo) -> Any:
        dtype = info.data.get("dtype", "float32")
        if value is None:
            return "int32" if dtype == "int8" else dtype
        if dtype in RINGS:
            return _of_dtype(value, info, [dtype])
        return _of_dtype(value, info, [*FLOATS, "int32"] if dtype == "int8" else FLOATS)

    @field_validator("fraction_bits", mode="after")
    @classmethod
    def _of_a_ring(cls, value: int, info: ValidationInfo) -> int:
        dtype = info.data.get("dtype")
        if dtype is None or value == 0:
            return value
        _require_ring(value, info)
        if value >= bits_of(dtype):
            raise refuse(
                "fraction_bits_out_of_range",
                f"is {value}; a shift of {ring_name(dtype)} leaves a bit: 0 to {bits_of(dtype) - 1} are allowed",
                allowed=bits_of(dtype) - 1,
            )
        return value

    @field_validator("rounding", mode="after")
    @classmethod
    def _of_a_shift(cls, value: Rounding | None, info: ValidationInfo) -> Rounding | None:
        if value is not None:
            _require_ring(value, info)
        # Without a shift all mean the same: one spelling, so that they share a key.
        floor: Rounding = "floor"
        return (value if value and info.data.get("fraction_bits") else floor) if _ring_of(info) else None

    @field_validator("truncation", mode="after")
    @classmethod
    def _of_sums(cls, value: ExactOnce | Tolerance | None, info: ValidationInfo) -> ExactOnce | Tolerance | None:
        if value is not None:
            _require_ring(value.policy, info)
        once = ExactOnce(policy="exact_once")
        return (value if value and info.data.get("fraction_bits") else once) if _ring_of(info) else None

    @field_validator("epilogue", mode="after")
    @classmethod
    def _exact_in_a_ring(cls, value: tuple[AnyNode, ...], info: ValidationInfo) -> tuple[AnyNode, ...]:
        ring = _ring_of(info)
        if ring and (foreign := foreign_node(value)):
            words = ", ".join(node for node in NODES if node != "masked_activation")
            raise refuse(
                "inexact_epilogue",
                f"{foreign}; {ring_name(ring)} computes {words} exactly, and masked_activation of "
                f"{' and '.join(FUNCTIONS)} alone",
                allowed=list(NODES),
            )
        if squares(value) and isinstance(info.data.get("truncation"), Tolerance):
            raise refuse(
                "unbounded_square",
                "has a square, which multiplies an error of the sum by the sum; allowed: without one, or truncation "
                "exact_once",
            )
        return value

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


def _ring_of(info: ValidationInfo) -> str | None:
    """The dtype of the problem, where it is a ring's."""
    dtype = info.data.get("dtype")
    return dtype if dtype in RINGS else None


def _require_ring(given: Any, info: ValidationInfo) -> None:
    """Refuses what floats and int8 have no use for."""
    if "dtype" in info.data and _ring_of(info) is None:
        raise refuse(
            "no_fixed_point",
            f"is {given}, but {info.data['dtype']} is no fixed point: dtype {' or '.join(RINGS)} is",
            allowed=list(RINGS),
        )


def _of_dtype(value: Any, info: ValidationInfo, allowed: Sequence[str]) -> Any:
    """The value, where it goes with the dtype of the inputs; what cannot be a dtype at all, its own type refuses."""
    if isinstance(value, str) and value.isalnum() and value not in allowed and "dtype" in info.data:
        raise refuse(
            "dtypes_do_not_fit",
            f"is {value[:40]}, which does not go with dtype {info.data['dtype']}; allowed: {', '.join(allowed)}",
            allowed=list(allowed),
        )
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
