"""The fused epilogue as a typed chain of nodes. Nothing of it is ever text from a request."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from codegen.dtypes import dtype
from codegen.problem import refuse

MAX_NODES = 8
LARGEST_FLOAT32 = float.fromhex("0x1.fffffep+127")


def _fits_float32(value: float) -> float:
    # The kernel holds scalars in fp32: a finite double beyond its range would become an infinity there.
    if not math.isfinite(value) or abs(value) > LARGEST_FLOAT32:
        raise refuse(
            "not_float32",
            f"must be finite and fit float32, so at most {LARGEST_FLOAT32} in magnitude",
            allowed=LARGEST_FLOAT32,
        )
    return value


Scalar = Annotated[float, Field(strict=True), AfterValidator(_fits_float32)]


class Node(BaseModel):
    """One node, named as its type in epilogue.cuh; `operand` is the dtype of its tensor (`out`: as the output's;
    `mask`: as the node says), None where it takes none."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    approximated: ClassVar[bool] = False
    scalar_names: ClassVar[tuple[str, ...]] = ()
    operand: ClassVar[Literal["out", "uint8", "mask"] | None] = None
    op: str

    @property
    def exact(self) -> bool:
        """Whether fp32 computes it without approximation."""
        return not self.approximated

    def operand_dtype(self, out_dtype: str) -> str | None:
        """The dtype of the node's tensor beside an output of `out_dtype`."""
        return out_dtype if self.operand == "out" else self.operand

    @property
    def operand_name(self) -> str:
        """What the node's tensor is called, where it has one."""
        return self.op

    @property
    def packed_mask(self) -> bool:
        """Whether its tensor has a bit for each output, in words of 32, and not a shape like the output's."""
        return False

    def cxx_type_of(self, element: str) -> str:
        """The node's C++ type; `element` is the C++ type of a bias or residual in memory."""
        return f"cukiln::{type(self).__name__}"

    @property
    def structure(self) -> str:
        """The node without its scalar values: what a signature holds."""
        return self.op

    @property
    def scalars(self) -> tuple[float, ...]:
        """Run-time scalars in launch order."""
        return tuple(getattr(self, name) for name in self.scalar_names)


class Bias(Node):
    operand = "out"
    op: Literal["bias"] = "bias"
    axis: Literal["m", "n"] = "n"

    def cxx_type_of(self, element: str) -> str:
        return f"cukiln::Bias<cukiln::Axis::{self.axis}, {element}>"

    @property
    def structure(self) -> str:
        return f"bias.{self.axis}"


class Residual(Node):
    operand = "out"
    op: Literal["residual"] = "residual"

    def cxx_type_of(self, element: str) -> str:
        return f"cukiln::Residual<{element}>"


class Mask(Node):
    operand = "uint8"
    op: Literal["mask"] = "mask"


class Scale(Node):
    scalar_names = ("value",)
    op: Literal["scale"] = "scale"
    value: Scalar


class Relu(Node):
    op: Literal["relu"] = "relu"


class LeakyRelu(Node):
    scalar_names = ("slope",)
    op: Literal["leaky_relu"] = "leaky_relu"
    slope: Scalar = 0.01


class Clip(Node):
    scalar_names = ("lo", "hi")
    op: Literal["clip"] = "clip"
    lo: Scalar
    hi: Scalar

    @model_validator(mode="after")
    def _ordered(self) -> "Clip":
        if self.lo > self.hi:
            raise refuse("empty_clip", f"lo is {self.lo} and hi is {self.hi}; lo must be at most hi")
        return self


class Gelu(Node):
    approximated = True
    op: Literal["gelu"] = "gelu"


class Silu(Node):
    approximated = True
    op: Literal["silu"] = "silu"


class Tanh(Node):
    approximated = True
    op: Literal["tanh"] = "tanh"


class Sigmoid(Node):
    approximated = True
    op: Literal["sigmoid"] = "sigmoid"


class Cast(Node):
    """Rounds to a narrower type and back: what storing and reading it in that type would do."""

    op: Literal["cast"] = "cast"
    dtype: Literal["float16", "bfloat16"]

    def cxx_type_of(self, element: str) -> str:
        return {"float16": "cukiln::CastHalf", "bfloat16": "cukiln::CastBfloat16"}[self.dtype]

    @property
    def structure(self) -> str:
        return f"cast.{self.dtype}"


class Identity(Node):
    op: Literal["identity"] = "identity"


class Square(Node):
    op: Literal["square"] = "square"


class Polynomial(Node):
    """Of degree 2 or 3: coefficients[0] + coefficients[1] x + …, by Horner's rule."""

    op: Literal["polynomial"] = "polynomial"
    coefficients: Annotated[tuple[Scalar, ...], Field(min_length=3, max_length=4)]

    @property
    def degree(self) -> int:
        return len(self.coefficients) - 1

    def cxx_type_of(self, element: str) -> str:
        return f"cukiln::Polynomial<{self.degree}>"

    @property
    def structure(self) -> str:
        return f"polynomial{self.degree}"

    @property
    def scalars(self) -> tuple[float, ...]:
        return self.coefficients


Function = Annotated[Relu | Gelu | Silu | Identity | Square | Polynomial, Field(discriminator="op")]


class MaskedActivation(Node):
    """One function where the mask is set, another elsewhere. `bits`: an int32 word for 32 neighbouring outputs, bit i
    of word j for output 32 j + i; `bytes`: a byte for each, set where it is not 0."""

    operand = "mask"
    op: Literal["masked_activation"] = "masked_activation"
    mask: Literal["bits", "bytes"] = "bits"
    where_set: Function
    where_clear: Function = Identity()

    @property
    def exact(self) -> bool:
        return self.where_set.exact and self.where_clear.exact

    def operand_dtype(self, out_dtype: str) -> str:
        return "int32" if self.packed_mask else "uint8"

    @property
    def operand_name(self) -> str:
        return "mask"

    @property
    def packed_mask(self) -> bool:
        return self.mask == "bits"

    def cxx_type_of(self, element: str) -> str:
        functions = ", ".join(function.cxx_type_of(element) for function in (self.where_set, self.where_clear))
        return f"cukiln::MaskedActivation<{'true' if self.packed_mask else 'false'}, {functions}>"

    @property
    def structure(self) -> str:
        return f"masked_activation.{self.mask}.{self.where_set.structure}.{self.where_clear.structure}"

    @property
    def scalars(self) -> tuple[float, ...]:
        return (*self.where_set.scalars, *self.where_clear.scalars)


def words_of_mask(elements: int) -> int:
    """Words of a packed mask of that many elements."""
    return -(-elements // 32)


# Those of any output, whatever its axes are and whether it is a layer's.
PlainNode = Scale | Residual | Mask | Relu | Gelu | Silu | Tanh | Sigmoid | LeakyRelu | Clip | Cast
AnyNode = Annotated[Bias | PlainNode | MaskedActivation, Field(discriminator="op")]
Chain = Annotated[tuple[AnyNode, ...], Field(max_length=MAX_NODES)]

# Scalars of the reduced test problems are powers of two or integers, so that exact inputs stay exact; both ends of the
# clip are near enough for their results to reach them.
_MASKS: tuple[Literal["bits", "bytes"], ...] = ("bits", "bytes")
_FUNCTIONS: tuple[Function, ...] = (
    Relu(), Gelu(), Silu(), Identity(), Square(), Polynomial(coefficients=(1.0, -2.0, 0.5)),
    Polynomial(coefficients=(-1.0, 0.5, 2.0, 0.25)),
)  # fmt: skip
_NODES: tuple[AnyNode, ...] = (
    Bias(axis="m"), Bias(axis="n"), Residual(), Mask(), Scale(value=0.5), Relu(), LeakyRelu(slope=0.25),
    Clip(lo=-6.0, hi=9.0), Gelu(), Silu(), Tanh(), Sigmoid(), Cast(dtype="float16"), Cast(dtype="bfloat16"),
    *(
        MaskedActivation(mask=mask, where_set=where_set, where_clear=where_clear)
        for mask, where_set, where_clear in product(_MASKS, _FUNCTIONS, _FUNCTIONS)
    ),
)  # fmt: skip
_STRUCTURES = {node.structure: node for node in _NODES}


def structures(chain: Sequence[Node]) -> tuple[str, ...]:
    return tuple(node.structure for node in chain)


def node_of(structure: str) -> AnyNode:
    """A representative node of a signature's structure; its scalars keep exact inputs exact."""
    return _STRUCTURES[structure]


def chain_type(structure: Sequence[str], operand_dtype: str = "float32") -> str:
    """The C++ type of a chain. `operand_dtype` is that of biases and residuals in memory."""
    element = dtype(operand_dtype).cxx
    return f"cukiln::Chain<{', '.join(node_of(part).cxx_type_of(element) for part in structure)}>"


def scalars(chain: Sequence[Node]) -> list[float]:
    """All run-time scalars in launch order."""
    return [scalar for node in chain for scalar in node.scalars]


def operand_names(chain: Sequence[Node]) -> list[str | None]:
    """For each node the name of its tensor, None where it has none: `bias`, or `bias_0`, `bias_3` for several."""
    names = [node.operand_name if node.operand else None for node in chain]
    return [name if name is None or names.count(name) == 1 else f"{name}_{index}" for index, name in enumerate(names)]


def tensor_nodes(chain: Sequence[Node], out_dtype: str) -> list[tuple[Node, str, str]]:
    """The nodes that read a tensor, each with its tensor's name and dtype beside an output of `out_dtype`."""
    return [
        (node, name, element)
        for node, name in zip(chain, operand_names(chain), strict=True)
        if name is not None and (element := node.operand_dtype(out_dtype)) is not None
    ]
