"""The reduce problem: a function of the values along some axes of an array, after a map of one element or of two.

out[kept axes] = epilogue(fn over the reduced axes of map(x)), or of map(dy, x). `out` is packed; its axes are
those that are left, in their order.
"""

import math
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, StrictBool, ValidationInfo, field_validator

from codegen.canonical import as_integer
from codegen.dtypes import dtype
from codegen.epilogue import MAX_NODES, PlainNode
from codegen.operand import packed_strides
from codegen.operators.reduce.axes import MAX_AXES
from codegen.problem import Problem, Stride, filled_in, refuse, require_elements, require_indexable

# The kernel counts outputs, and values of an output, with 32 bits, and adds a block's steps to them.
LARGEST_COUNT = 2**30

Fn = Literal["sum", "mean", "sum_of_squares", "max", "min", "argmax", "variance", "logsumexp"]
Map = Literal[
    "identity", "square", "multiply", "relu_grad", "gelu_grad", "silu_grad", "tanh_grad", "sigmoid_grad"
]  # fmt: skip
# Their numbers in kernel.cuh are their places here.
FUNCTIONS: tuple[Fn, ...] = get_args(Fn)
MAPS: tuple[Map, ...] = get_args(Map)
OF_TWO = MAPS[2:]
# Maps that fp32 only approximates: exact runs have dy times x in their place.
APPROXIMATE = MAPS[4:]
# What no values have a value of: 0, 0 and minus infinity.
OF_NOTHING: tuple[Fn, ...] = ("sum", "sum_of_squares", "logsumexp")
# Of Z/2^64.
OF_INT64: tuple[Fn, ...] = ("sum", "max", "min")
FLOATS = ("float32", "float16", "bfloat16")

Node = Annotated[PlainNode, Field(discriminator="op")]
Chain = Annotated[tuple[Node, ...], Field(max_length=MAX_NODES)]


Size = Annotated[int, Field(strict=True, ge=0, le=LARGEST_COUNT), BeforeValidator(as_integer)]
Axis = Annotated[int, Field(strict=True), BeforeValidator(as_integer)]


class ReduceProblem(Problem):
    """`axes` count from the end where they are negative; `strides` are in elements. With two inputs (`map` is
    `multiply` or `…_grad`) both have this shape and these strides, and so has `dx`, the mapped values, where
    `write_map` asks for it.

    Floats are folded in fp32; int32 in int64 (sum, mean, sum_of_squares), as themselves (max, min, argmax) or as fp32;
    int64 as itself, where sums wrap around: Z/2^64. A sum of int32 as int32 wraps around too: Z/2^32.
    """

    operator: Literal["reduce"] = "reduce"
    shape: Annotated[tuple[Size, ...], Field(min_length=1, max_length=MAX_AXES)]
    axes: Annotated[tuple[Axis, ...], Field(min_length=1, max_length=MAX_AXES)]
    strides: Annotated[tuple[Stride, ...], Field(min_length=1, max_length=MAX_AXES)] = Field(
        default=None, validate_default=True, description="Default: packed.", json_schema_extra=filled_in
    )
    dtype: Literal["float32", "float16", "bfloat16", "int32", "int64"] = "float32"
    fn: Fn = "sum"
    map: Map = "identity"
    write_map: StrictBool = Field(default=False, description="Whether mapped values are written too, as dx of dtype.")
    out_dtype: Literal["float32", "float16", "bfloat16", "int32", "int64"] = Field(
        default=None,
        validate_default=True,
        description="Default: dtype; int32 for argmax; of int32 int64 for sums, float32 for what is no whole number.",
        json_schema_extra=filled_in,
    )
    epilogue: Chain = ()

    @property
    def two_inputs(self) -> bool:
        return self.map in OF_TWO

    @property
    def kept(self) -> tuple[int, ...]:
        """The axes of the output."""
        return tuple(axis for axis in range(len(self.shape)) if axis not in self.axes)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """One element where all axes are reduced."""
        return tuple(self.shape[axis] for axis in self.kept) or (1,)

    @property
    def outputs(self) -> int:
        return math.prod(self.out_shape)

    @property
    def count(self) -> int:
        """Values of an output."""
        return math.prod(self.shape[axis] for axis in self.axes)

    @field_validator("axes", mode="after")
    @classmethod
    def _of_the_shape(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        shape = info.data.get("shape")
        if shape is None:
            return value  # the shape is already at fault
        rank = len(shape)
        for axis in value:
            if not -rank <= axis < rank:
                raise refuse(
                    "axis_out_of_range", f"has {axis}, and the shape has {rank} axes; {-rank} to {rank - 1} are allowed"
                )
        from_start = sorted(axis % rank for axis in value)
        for axis, following in pairwise(from_start):
            if axis == following:
                raise refuse("repeated_axis", f"names axis {axis} more than once; each is allowed once")
        outputs = math.prod(extent for axis, extent in enumerate(shape) if axis not in from_start)
        count = math.prod(shape[axis] for axis in from_start)
        if outputs == 0:
            raise refuse(
                "empty_output",
                "leave an axis of extent 0, so that there is nothing to compute; an axis of extent 0 must be reduced",
            )
        require_indexable(outputs, "outputs", LARGEST_COUNT, "make")
        require_indexable(count, "values of an output", LARGEST_COUNT, "make")
        return tuple(from_start)

    @field_validator("strides", mode="before")
    @classmethod
    def _packed_unless_given(cls, value: Any, info: ValidationInfo) -> Any:
        # Where the shape is at fault, that is enough said.
        return packed_strides(info.data.get("shape", (1,))) if value is None else value

    @field_validator("strides", mode="after")
    @classmethod
    def _apart(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        shape = info.data.get("shape")
        if shape is None:
            return value
        if len(value) != len(shape):
            raise refuse("wrong_rank", f"has {len(value)} strides for {len(shape)} axes; one for each axis is allowed")
        if 0 in shape:
            return packed_strides(shape)  # no element is anywhere
        span = 1
        for stride, extent, axis in sorted((value[a], shape[a], a) for a in range(len(shape)) if shape[a] > 1):
            if stride < span:
                raise refuse(
                    "overlapping",
                    f"of axis {axis} is {stride}, less than the {span} elements that axes of smaller strides span; "
                    "elements must not overlap",
                )
            span += (extent - 1) * stride
        require_elements("x", span)
        # The stride of an extent of 1 says nothing: one spelling for it, so that problems share a key.
        strides = list(value)
        for axis in reversed(range(len(shape))):
            if shape[axis] == 1:
                strides[axis] = shape[axis + 1] * strides[axis + 1] if axis + 1 < len(shape) else 1
        return tuple(strides)

    @field_validator("fn", mode="after")
    @classmethod
    def _has_a_value(cls, value: Fn, info: ValidationInfo) -> Fn:
        if info.data.get("dtype") == "int64" and value not in OF_INT64:
            raise refuse(
                "not_in_a_ring",
                f"is {value}, which divides, multiplies without a shift, or tells where a value is; of int64 (Z/2^64) "
                f"{', '.join(OF_INT64)} are allowed",
                allowed=list(OF_INT64),
            )
        shape, axes = info.data.get("shape"), info.data.get("axes")
        if shape is not None and axes is not None and 0 in (shape[a] for a in axes) and value not in OF_NOTHING:
            raise refuse(
                "of_nothing",
                f"is {value}, which has no value where a reduced axis has extent 0; allowed there: "
                f"{', '.join(OF_NOTHING)}",
                allowed=list(OF_NOTHING),
            )
        return value

    @field_validator("map", mode="after")
    @classmethod
    def _of_floats(cls, value: Map, info: ValidationInfo) -> Map:
        if value == "identity":
            return value
        if (element := info.data.get("dtype")) in ("int32", "int64"):
            raise refuse("map_of_int32", f"is {value}; of {element} only identity is allowed", allowed=["identity"])
        if info.data.get("fn") == "argmax":
            raise refuse("map_of_argmax", f"is {value}; with argmax only identity is allowed", allowed=["identity"])
        return value

    @field_validator("write_map", mode="after")
    @classmethod
    def _of_a_map(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("map") == "identity":
            raise refuse("nothing_to_write", "would copy the input: it is allowed with a map other than identity")
        return value

    @field_validator("out_dtype", mode="before")
    @classmethod
    def _by_default(cls, value: Any, info: ValidationInfo) -> Any:
        allowed = allowed_outs(info.data.get("dtype", "float32"), info.data.get("fn", "sum"))
        return allowed[0] if value is None else value

    @field_validator("out_dtype", mode="after")
    @classmethod
    def _can_hold_it(cls, value: str, info: ValidationInfo) -> str:
        allowed = allowed_outs(info.data.get("dtype", "float32"), info.data.get("fn", "sum"))
        if value not in allowed:
            raise refuse(
                "out_dtype",
                f"is {value}; of {info.data.get('fn')} of {info.data.get('dtype')} allowed are {', '.join(allowed)}",
                allowed=list(allowed),
            )
        return value

    @field_validator("epilogue", mode="after")
    @classmethod
    def _of_floats_only(cls, value: Chain, info: ValidationInfo) -> Chain:
        if value and info.data.get("out_dtype", "float32") not in FLOATS:
            raise refuse(
                "epilogue_of_whole_numbers",
                f"is computed in fp32; with out_dtype {info.data['out_dtype']} it must be empty",
            )
        return value


def allowed_outs(element: str, fn: str) -> tuple[str, ...]:
    """The output's element types, the default first."""
    if fn == "argmax":
        return ("int32", "int64")
    if element == "int64":
        return ("int64",)
    if element != "int32":
        return (element, *(name for name in FLOATS if name != element))
    if fn in ("sum", "sum_of_squares"):
        return ("int64", "int32", "float32")
    return ("int32", "int64", "float32") if fn in ("max", "min") else FLOATS


def size_of(problem: ReduceProblem) -> int:
    """Bytes of an element."""
    return dtype(problem.dtype).bytes
