"""The masked_activation problem: out[i] = where_set(x[i]) where the mask has bit i set, else where_clear(x[i])."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from codegen.epilogue import Function, Identity, MaskedActivation, node_of, words_of_mask
from codegen.fixed_point import FIELDS, Element, FractionBits, ShiftRounding, as_ring_node, exact_function, keyed
from codegen.problem import Pitch, Problem, Shape, filled_in, refuse, require_elements

MaskDtype = Literal["int32", "uint8"]
WRONG = "wrong_mask"


class MaskedActivationProblem(Problem):
    """Packed tensors of any shape; its axes become one, so that arrays with equally many elements are one problem.

    `mask` is `bits`: a vector of int32 words, bit i of word j (the lowest is 0) for element 32 j + i; or `bytes`: a
    uint8 for each element, set where it is not 0. `mask_dtype` and `mask_length` say the same of the mask that a caller
    has: they are filled in, and refused where they are not what `mask` and `shape` need. Over a ring (int32, int64)
    products are truncated by `fraction_bits` (`codegen/fixed_point.py`).
    """

    operator: Literal["masked_activation"] = "masked_activation"
    shape: Shape
    dtype: Element = "float32"
    fraction_bits: FractionBits = 0
    rounding: ShiftRounding = None
    where_set: Function
    where_clear: Function = Identity()
    mask: Literal["bits", "bytes"] = "bits"
    mask_dtype: MaskDtype = Field(
        default=None,
        validate_default=True,
        description="int32 for bits, uint8 for bytes.",
        json_schema_extra=filled_in,
    )
    mask_length: Pitch = Field(
        default=None,
        validate_default=True,
        description="Words of 32 bits, or bytes: as many as the shape needs.",
        json_schema_extra=filled_in,
    )

    _exact_in_a_ring = field_validator("where_set", "where_clear", mode="after")(exact_function)

    def canonical(self) -> dict[str, Any]:
        return keyed(super().canonical())

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def node(self) -> MaskedActivation:
        """What is done, as a node of an epilogue."""
        return MaskedActivation(mask=self.mask, where_set=self.where_set, where_clear=self.where_clear)

    @field_validator("shape", mode="after")
    @classmethod
    def _one_axis(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        elements = math.prod(value)
        require_elements("x", elements)
        return (elements,)

    @field_validator("mask_dtype", mode="before")
    @classmethod
    def _of_the_mask(cls, value: Any, info: ValidationInfo) -> Any:
        mask = info.data.get("mask")
        if mask is None:
            return "int32" if value is None else value  # another field is already at fault
        needed = "int32" if mask == "bits" else "uint8"
        if value != needed and value in ("int32", "uint8"):
            raise refuse(WRONG, f"is {value}, but a mask of {mask} is {needed}", allowed=needed)
        return needed if value is None else value

    @field_validator("mask_length", mode="before")
    @classmethod
    def _whole_mask(cls, value: Any, info: ValidationInfo) -> Any:
        if "shape" not in info.data or "mask" not in info.data:
            return 1 if value is None else value  # another field is already at fault
        (elements,), mask = info.data["shape"], info.data["mask"]
        needed = words_of_mask(elements) if mask == "bits" else elements
        if isinstance(value, int | float) and not isinstance(value, bool) and value != needed:
            unit = "words of 32 bits" if mask == "bits" else "bytes"
            raise refuse(WRONG, f"is {value}, but {elements} elements need {needed} {unit}", allowed=needed)
        return needed if value is None else value


def of_elements(signature: Mapping[str, Any], elements: int) -> MaskedActivationProblem:
    """A problem of a kernel's signature."""
    node, shift = node_of(signature["node"]), {name: signature[name] for name in FIELDS if name in signature}
    if shift:
        node = as_ring_node(node, signature["fraction_bits"])
    assert isinstance(node, MaskedActivation)
    return MaskedActivationProblem(
        shape=(elements,),
        dtype=signature["dtype"],
        where_set=node.where_set,
        where_clear=node.where_clear,
        mask=node.mask,
        **shift,
    )
