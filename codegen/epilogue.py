"""The fused epilogue as a typed chain of nodes. Nothing of it is ever text from a request."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
            "not_float32", "must be finite and fit float32, so at most {allowed} in magnitude", allowed=LARGEST_FLOAT32
        )
    return value


Scalar = Annotated[float, Field(strict=True), AfterValidator(_fits_float32)]


class Node(BaseModel):
    """One node. `cxx` is its type in epilogue.cuh; `exact` says that fp32 computes it without approximation; `operand`
    is the dtype of its tensor (`out`: as the output's), None where it takes none."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    cxx: ClassVar[str]
    exact: ClassVar[bool] = True
    operand: ClassVar[Literal["out", "uint8"] | None] = None
    op: str

    def operand_dtype(self, out_dtype: str) -> str | None:
        """The dtype of the node's tensor beside an output of `out_dtype`."""
        return out_dtype if self.operand == "out" else self.operand

    def cxx_type_of(self, element: str) -> str:
        """The node's C++ type; `element` is the C++ type of a bias or residual in memory."""
        return f"cukiln::{self.cxx}"

    @property
    def structure(self) -> str:
        """The node without its scalar values: what a signature holds."""
        return self.op

    @property
    def scalars(self) -> tuple[float, ...]:
        """Run-time scalars in launch order."""
        return ()


class Bias(Node):
    cxx = "Bias"
    operand = "out"
    op: Literal["bias"] = "bias"
    axis: Literal["m", "n"] = "n"

    def cxx_type_of(self, element: str) -> str:
        return f"cukiln::Bias<cukiln::Axis::{self.axis}, {element}>"

    @property
    def structure(self) -> str:
        return f"bias.{self.axis}"


class Residual(Node):
    cxx = "Residual"
    operand = "out"
    op: Literal["residual"] = "residual"

    def cxx_type_of(self, element: str) -> str:
        return f"cukiln::Residual<{element}>"


class Mask(Node):
    cxx = "Mask"
    operand = "uint8"
    op: Literal["mask"] = "mask"


class Scale(Node):
    cxx = "Scale"
    op: Literal["scale"] = "scale"
    value: Scalar

    @property
    def scalars(self) -> tuple[float, ...]:
        return (self.value,)


class Relu(Node):
    cxx = "Relu"
    op: Literal["relu"] = "relu"


class LeakyRelu(Node):
    cxx = "LeakyRelu"
    op: Literal["leaky_relu"] = "leaky_relu"
    slope: Scalar = 0.01

    @property
    def scalars(self) -> tuple[float, ...]:
        return (self.slope,)


class Clip(Node):
    cxx = "Clip"
    op: Literal["clip"] = "clip"
    lo: Scalar
    hi: Scalar

    @model_validator(mode="after")
    def _ordered(self) -> Clip:
        if self.lo > self.hi:
            raise refuse("empty_clip", "lo is {lo} and hi is {hi}; lo must be at most hi", lo=self.lo, hi=self.hi)
        return self

    @property
    def scalars(self) -> tuple[float, ...]:
        return (self.lo, self.hi)


class Gelu(Node):
    cxx = "Gelu"
    exact = False
    op: Literal["gelu"] = "gelu"


class Silu(Node):
    cxx = "Silu"
    exact = False
    op: Literal["silu"] = "silu"


class Tanh(Node):
    cxx = "Tanh"
    exact = False
    op: Literal["tanh"] = "tanh"


class Sigmoid(Node):
    cxx = "Sigmoid"
    exact = False
    op: Literal["sigmoid"] = "sigmoid"


class Cast(Node):
    """Rounds to a narrower type and back: what storing and reading it in that type would do."""

    cxx = "Cast"
    op: Literal["cast"] = "cast"
    dtype: Literal["float16", "bfloat16"]

    def cxx_type_of(self, element: str) -> str:
        return {"float16": "cukiln::CastHalf", "bfloat16": "cukiln::CastBfloat16"}[self.dtype]

    @property
    def structure(self) -> str:
        return f"cast.{self.dtype}"


AnyNode = Annotated[
    Bias | Scale | Residual | Mask | Relu | Gelu | Silu | Tanh | Sigmoid | LeakyRelu | Clip | Cast,
    Field(discriminator="op"),
]
Chain = Annotated[tuple[AnyNode, ...], Field(max_length=MAX_NODES)]

# Scalars of the reduced test problems are powers of two or integers, so that exact inputs stay exact; both ends of the
# clip are near enough for their results to reach them.
_STRUCTURES: dict[str, AnyNode] = {
    node.structure: node
    for node in (
        Bias(axis="m"), Bias(axis="n"), Residual(), Mask(), Scale(value=0.5), Relu(), LeakyRelu(slope=0.25),
        Clip(lo=-6.0, hi=9.0), Gelu(), Silu(), Tanh(), Sigmoid(), Cast(dtype="float16"), Cast(dtype="bfloat16"),
    )
}  # fmt: skip


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
    ops = [node.op if node.operand else None for node in chain]
    return [op if op is None or ops.count(op) == 1 else f"{op}_{index}" for index, op in enumerate(ops)]
