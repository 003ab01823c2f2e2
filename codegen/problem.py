"""The base of all problems, and the checked field types that problems share."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import PydanticCustomError, PydanticKnownError

from codegen.canonical import as_integer
from codegen.identity import problem_digest

# Kernels index tiles with int32 and add up to one tile (at most 1024) to an extent.
LARGEST_EXTENT = 2**31 - 1 - 1024
# 4 TiB of fp32: far over any device's memory, far under what a 64-bit byte offset can hold.
LARGEST_ELEMENTS = 2**40


Extent = Annotated[int, Field(strict=True, ge=1, le=LARGEST_EXTENT), BeforeValidator(as_integer)]
# Strides are in elements; 0 repeats a matrix over the batch where the field allows it.
Pitch = Annotated[int, Field(strict=True, ge=1, le=LARGEST_ELEMENTS), BeforeValidator(as_integer)]
Stride = Annotated[int, Field(strict=True, ge=0, le=LARGEST_ELEMENTS), BeforeValidator(as_integer)]

# The binding of a library reads tensors of at most so many axes.
LARGEST_RANK = 8


def _not_empty(value: tuple[int, ...]) -> tuple[int, ...]:
    # Not by `min_length`: pydantic counts the items that are right, so a wrong one alone would be two faults.
    if not value:
        raise PydanticKnownError("too_short", {"field_type": "Tuple", "min_length": 1, "actual_length": 0})
    return value


Shape = Annotated[
    tuple[Pitch, ...],
    Field(max_length=LARGEST_RANK, json_schema_extra={"minItems": 1}),
    AfterValidator(_not_empty),
]


def filled_in(field: dict[str, Any]) -> None:
    """The `json_schema_extra` of a field whose default is computed from others: null is what a missing one is."""
    field.pop("default", None)
    own = {name: field.pop(name) for name in set(field) - {"title", "description"}}
    field["anyOf"] = [own, {"type": "null"}]


def refuse(kind: str, message: str, allowed: Any = None) -> PydanticCustomError:
    """A validation error with a stable `kind`, a sentence that begins with the field's name, and what is allowed."""
    return PydanticCustomError(kind, "{message}", {"message": message, "allowed": allowed})


def require_indexable(number: int, what: str, allowed: int = LARGEST_EXTENT, makes: str = "makes") -> None:
    """Raises where a field makes more of something than a kernel counts."""
    if number > allowed:
        raise refuse("too_large", f"{makes} {number} {what}; at most {allowed} can be indexed", allowed)


def like_the_inputs(value: Any, info: ValidationInfo) -> Any:
    return info.data.get("dtype", "float32") if value is None else value


def of_dtype(value: Any, info: ValidationInfo, allowed: Sequence[str]) -> Any:
    """The value, where it goes with the dtype of the inputs; what cannot be a dtype at all, its own type refuses."""
    if isinstance(value, str) and value.isalnum() and value not in allowed and "dtype" in info.data:
        raise refuse(
            "dtypes_do_not_fit",
            f"is {value[:40]}, which does not go with dtype {info.data['dtype']}; allowed: {', '.join(allowed)}",
            allowed=list(allowed),
        )
    return value


Float = Literal["float32", "float16", "bfloat16"]
FloatOut = Annotated[
    Float,
    BeforeValidator(like_the_inputs),
    Field(description="Default: dtype.", json_schema_extra=filled_in),
]
"""The field `out_dtype` of problems on floats."""


def _of_float32_only(value: bool, info: ValidationInfo) -> bool:
    # One spelling for inputs that have no TF32, so that they share a key.
    return value and info.data.get("dtype", "float32") == "float32"


AllowTf32 = Annotated[
    StrictBool,
    AfterValidator(_of_float32_only),
    Field(
        description="Whether float32 inputs may lose their low 13 bits on the tensor cores. Means nothing for others."
    ),
]
"""The field `allow_tf32` of problems that tensor cores compute."""


def require_elements(name: str, elements: int) -> None:
    """Raises where an operand would span more elements than any index computation is meant for."""
    if elements > LARGEST_ELEMENTS:
        raise refuse(
            "too_many_elements",
            f"operand {name} would span {elements} elements; at most {LARGEST_ELEMENTS} are allowed",
            allowed=LARGEST_ELEMENTS,
        )


class Problem(BaseModel):
    """What is to be computed, never how. Frozen; unknown fields are refused; every default becomes explicit."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    operator: str

    def canonical(self) -> dict[str, Any]:
        """All fields with their values, as JSON types: what rows store and keys are made of."""
        return self.model_dump(mode="json")

    @property
    def sum_length(self) -> int | None:
        """How many products an output adds up, on which rounding depends; None where it adds none up."""
        return None

    @cached_property
    def digest(self) -> str:
        return problem_digest(self.canonical())


def indexable(kind: type[Problem], fields: Mapping[str, Any]) -> Any:
    """The problem; None where one of its operands would have more elements than any index is meant for."""
    try:
        return kind.model_validate(dict(fields))
    except ValidationError as error:
        if {each["type"] for each in error.errors()} != {"too_many_elements"}:
            raise
        return None
