"""The base of all problems, and the checked field types that problems share."""

from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo
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


def refuse(kind: str, message: str, **numbers: Any) -> PydanticCustomError:
    """A validation error with a stable `kind`, a sentence with `{placeholders}`, and the numbers it talks about."""
    return PydanticCustomError(kind, message, numbers)


def require_indexable(number: int, what: str, allowed: int = LARGEST_EXTENT, makes: str = "makes") -> None:
    """Raises where a field makes more of something than a kernel counts."""
    if number > allowed:
        message = makes + " {number} {what}; at most {allowed} can be indexed"
        raise refuse("too_large", message, number=number, what=what, allowed=allowed)


def like_the_inputs(value: Any, info: ValidationInfo) -> Any:
    return info.data.get("dtype", "float32") if value is None else value


Float = Literal["float32", "float16", "bfloat16"]
FloatOut = Annotated[
    Float,
    BeforeValidator(like_the_inputs),
    Field(description="Default: dtype.", json_schema_extra=filled_in),
]
"""The field `out_dtype` of problems on floats."""


def require_elements(name: str, elements: int) -> None:
    """Raises where an operand would span more elements than any index computation is meant for."""
    if elements > LARGEST_ELEMENTS:
        raise refuse(
            "too_many_elements",
            "operand {operand} would span {elements} elements; at most {allowed} are allowed",
            operand=name,
            elements=elements,
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


P = TypeVar("P", bound=Problem)


def require(kind: type[P]) -> Callable[[Problem], P]:
    """A function that returns its problem, which must be a `kind`; it raises TypeError."""
    name = kind.model_fields["operator"].default

    def checked(problem: Problem) -> P:
        if not isinstance(problem, kind):
            raise TypeError(f"{name} got a problem of operator {problem.operator!r}")
        return problem

    return checked
