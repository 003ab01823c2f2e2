"""Fixed point over the rings Z/2^32 and Z/2^64: what a problem says of it, what it means, and how far a schedule may be
off that truncates more often.

Numbers are two's complement; sums and products wrap around. A number x with f fraction bits stands for x / 2^f, so a
sum of products has 2 f of them. With S the value of the wrapped sum, in [-2^(b-1), 2^(b-1)), the result is

- floor: ⌊S / 2^f⌋, an arithmetic shift;
- nearest: ⌊S / 2^f + 1/2⌋.

That is `exact_once`. Where a schedule truncates P parts of a sum instead, each of them once, S is the sum of the parts
S_1 to S_P **provided that neither they nor their partial sums wrap around**, for which Σ|a||b| < 2^(b-1) is enough.
The policy `tolerance` presupposes that, also of sums in the epilogue; inputs that do not keep to it have no bound.

- floor: S_i / 2^f - ⌊S_i / 2^f⌋ is in [0, 1), so the sum of the truncated parts is below S / 2^f by a number in [0, P),
  and ⌊S / 2^f⌋ by one in [0, 1). The two whole numbers differ by more than -1 and less than P: the parts give
  **0 to P - 1 less**;
- nearest: ⌊S_i / 2^f + 1/2⌋ - S_i / 2^f is in (-1/2, 1/2]. The sum of the truncated parts differs from S / 2^f by more
  than -P / 2 and at most P / 2, the exact result by more than -1/2 and at most 1/2. The whole numbers differ by less
  than (P + 1) / 2: **at most ⌊P / 2⌋ either way**.

One part is exact in both. P is ⌈k / tile_k⌉ where tiles are truncated, also where k is divided among blocks, and k
where products are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

from codegen.canonical import as_integer
from codegen.epilogue import MaskedActivation, Node, Polynomial
from codegen.problem import filled_in, like_the_inputs, of_dtype, refuse

N = TypeVar("N", bound=Node)
RINGS = ("int32", "int64")
# Those that Winograd's products are in, over each: with room for the scale of its filters.
WINOGRAD_RINGS = {"int32": "int40", "int64": "int72"}
# Integer multiply-adds of 32 bits for one in a ring: of Z/2^64 ptxas writes one of 32 x 32 bits to 64, which counts
# twice, and two for the upper half. Of 128 bits that is a product of 64 by 64, 8 of those that count twice, and two of
# the upper halves; an estimate.
IMADS = {"int32": 1, "int64": 4, "int40": 4, "int72": 24}
# Fields that problems over rings alone have: others are keyed without them.
FIELDS = ("fraction_bits", "rounding", "truncation")
Rounding = Literal["floor", "nearest"]
Place = Literal["once", "tile", "product"]
PLACES: tuple[Place, ...] = ("once", "tile", "product")
LARGEST_ULP = 2**31 - 1
# What an epilogue computes exactly in a ring, on truncated sums: sums, a choice by sign or mask, and a square or a
# polynomial, whose products are truncated as sums are, one after the other. The others have factors that are no numbers
# of the ring, or approximate.
NODES = ("bias", "mask", "masked_activation", "relu", "residual")
FUNCTIONS = ("identity", "polynomial", "relu", "square")


class ExactOnce(BaseModel):
    """The wrapped sum, truncated once: every bit is decided."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    policy: Literal["exact_once"]


class Tolerance(BaseModel):
    """Within `ulp` of what `exact_once` gives, in units of the last bit of out, where no partial sum wraps around."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    policy: Literal["tolerance"]
    ulp: Annotated[int, Field(strict=True, ge=0, le=LARGEST_ULP), BeforeValidator(as_integer)]


AnyTruncation = Annotated[ExactOnce | Tolerance, Field(discriminator="policy")]


class Shifted(Protocol):
    """A problem that says how products are shifted, where it is over a ring."""

    @property
    def dtype(self) -> str: ...
    @property
    def fraction_bits(self) -> int: ...
    @property
    def rounding(self) -> Rounding | None: ...


class InFixedPoint(Shifted, Protocol):
    """One whose sums may be truncated in several ways."""

    @property
    def truncation(self) -> ExactOnce | Tolerance | None: ...


class Sums(InFixedPoint, Protocol):
    """One whose sums are those of products of matrices."""

    @property
    def batch(self) -> int: ...
    @property
    def m(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def epilogue(self) -> Sequence[Node]: ...


def over_ring(problem: Shifted) -> bool:
    return problem.dtype in RINGS or problem.dtype in WINOGRAD_RINGS.values()


def shift_of(problem: Shifted) -> dict[str, Any]:
    """What a signature has of a ring."""
    return {"fraction_bits": problem.fraction_bits, "rounding": problem.rounding} if over_ring(problem) else {}


def bits_of(element: str) -> int:
    """b of Z/2^b."""
    return int(element.removeprefix("int"))


def ring_name(element: str) -> str:
    return f"Z/2^{bits_of(element)}"


def parts(k: int, tunables: Mapping[str, Any]) -> int:
    """How many parts of a sum a schedule truncates."""
    if tunables["truncate"] == "tile":
        return -(-k // int(tunables["tile_k"]))
    return k if tunables["truncate"] == "product" else 1


def largest_error(count: int, rounding: str) -> int:
    """Units of the last bit by which `count` truncated parts may differ from their truncated sum; see above."""
    return count - 1 if rounding == "floor" else count // 2


def allowed_ulp(problem: InFixedPoint) -> int:
    """What the problem's policy allows."""
    return problem.truncation.ulp if isinstance(problem.truncation, Tolerance) else 0


def truncated_numbers(problem: Sums, tunables: Mapping[str, Any]) -> int:
    """How many numbers of the problem a schedule truncates: parts of sums, and products of the epilogue. What tiles add
    to the matrices is none; `operators/matmul/truncations.py` counts what a run executes."""
    if not over_ring(problem) or problem.fraction_bits == 0:
        return 0
    return problem.batch * problem.m * problem.n * (parts(problem.k, tunables) + products(problem.epilogue))


def products(chain: Sequence[Node]) -> int:
    """How often a chain multiplies an output: by itself or, of a polynomial, by what Horner's rule has so far. Of a
    masked activation each element takes one function: the dearer one counts, as if it were that of all. Where both cost
    the same that is exact."""
    return sum(max(map(_products, _functions(node)), default=0) for node in chain)


def _products(function: Node) -> int:
    return function.degree if isinstance(function, Polynomial) else int(function.op == "square")


def whole_coefficients(function: Node, element: str, fraction_bits: int) -> bool:
    """Whether the coefficients of a polynomial are numbers of the ring: fp32 holds them, they have no more fraction
    bits, and the ring is large enough."""
    end = 2.0 ** (bits_of(element) - 1)
    scaled = [value * 2.0**fraction_bits for value in function.scalars]
    held = all(value == float(np.float32(value)) for value in function.scalars)
    return held and all(value.is_integer() and -end <= value < end for value in scaled)


def as_ring_node(node: N, fraction_bits: int) -> N:
    """A representative node for tests over a ring: the coefficients of polynomials are a few units of the last bit."""
    if isinstance(node, Polynomial):
        scaled = tuple(4.0 * value * 2.0**-fraction_bits for value in node.coefficients)
        return node.model_copy(update={"coefficients": scaled})
    if isinstance(node, MaskedActivation):
        functions = (as_ring_node(function, fraction_bits) for function in _functions(node))
        return node.model_copy(update=dict(zip(("where_set", "where_clear"), functions, strict=True)))
    return node


def _functions(node: Node) -> tuple[Node, ...]:
    return (node.where_set, node.where_clear) if isinstance(node, MaskedActivation) else ()


def foreign_node(chain: Sequence[Node]) -> str | None:
    """The name of a node that no ring computes exactly; None where there is none."""
    for index, node in enumerate(chain):
        if node.op not in NODES:
            return f"node {index} is {node.op}"
        for place, function in zip(("where_set", "where_clear"), _functions(node), strict=False):
            if function.op not in FUNCTIONS:
                return f"{place} of node {index} is {function.op}"
    return None


def _require_whole(function: Node, element: str, info: ValidationInfo, where: str = "") -> None:
    bits = info.data.get("fraction_bits", 0)
    if not whole_coefficients(function, element, bits):
        raise refuse(
            "no_numbers_of_the_ring",
            f"has the coefficients {', '.join(map(str, function.scalars))}{where}; numbers of {ring_name(element)} "
            f"with {bits} fraction bits are allowed, as far as float32 holds them",
            allowed=f"multiples of 2^-{bits} that {ring_name(element)} and float32 hold",
        )


# ---- fields of problems


def _ring_of(info: ValidationInfo) -> str | None:
    """The dtype of the problem, where it is a ring's."""
    element = info.data.get("dtype")
    return element if element in RINGS else None


def _require_ring(given: Any, info: ValidationInfo) -> None:
    """Refuses what floats and int8 have no use for."""
    if "dtype" in info.data and _ring_of(info) is None:
        raise refuse(
            "no_fixed_point",
            f"is {given}, but {info.data['dtype']} is no fixed point: dtype {' or '.join(RINGS)} is",
            allowed=list(RINGS),
        )


def _leaves_a_bit(value: int, info: ValidationInfo) -> int:
    element = info.data.get("dtype")
    if element is None or value == 0:
        return value
    _require_ring(value, info)
    if value >= bits_of(element):
        raise refuse(
            "fraction_bits_out_of_range",
            f"is {value}; a shift of {ring_name(element)} leaves a bit: 0 to {bits_of(element) - 1} are allowed",
            allowed=bits_of(element) - 1,
        )
    return value


def _of_a_shift(value: Rounding | None, info: ValidationInfo) -> Rounding | None:
    if value is not None:
        _require_ring(value, info)
    # Without a shift all mean the same: one spelling, so that they share a key.
    floor: Rounding = "floor"
    return (value if value and info.data.get("fraction_bits") else floor) if _ring_of(info) else None


def _of_sums(value: ExactOnce | Tolerance | None, info: ValidationInfo) -> ExactOnce | Tolerance | None:
    if value is not None:
        _require_ring(value.policy, info)
    bits, element = info.data.get("fraction_bits", 0), _ring_of(info)
    if element and isinstance(value, Tolerance) and bits > (most := bits_of(element) - 2):
        raise refuse(
            "no_bit_of_a_sum",
            f"is tolerance with {bits} fraction bits: a sum of {ring_name(element)} that must not wrap around then has "
            f"a sign and nothing more; allowed: exact_once, or at most {most} fraction bits",
            allowed=["exact_once"],
        )
    once = ExactOnce(policy="exact_once")
    return (value if value and info.data.get("fraction_bits") else once) if _ring_of(info) else None


def _sums_of(value: Any, info: ValidationInfo) -> Any:
    ring = _ring_of(info)
    sums = ring or "float32"
    return sums if value is None else of_dtype(value, info, [sums])


def _like_the_inputs(value: Any, info: ValidationInfo) -> Any:
    ring = _ring_of(info)
    return like_the_inputs(value, info) if value is None else of_dtype(value, info, [ring] if ring else FLOATS)


Element = Literal["float32", "float16", "bfloat16", "int32", "int64"]
FLOATS = ("float32", "float16", "bfloat16")
SumDtype = Annotated[
    Literal["float32", "int32", "int64"],
    BeforeValidator(_sums_of),
    Field(
        validate_default=True,
        description="Of the sums: dtype over a ring, else float32.",
        json_schema_extra=filled_in,
    ),
]
"""The field `acc_dtype` of problems on floats and over rings."""
ElementOut = Annotated[
    Element,
    BeforeValidator(_like_the_inputs),
    Field(validate_default=True, description="Default: dtype.", json_schema_extra=filled_in),
]
"""The field `out_dtype` of problems on floats and over rings."""
FractionBits = Annotated[
    int,
    Field(
        strict=True, ge=0, le=63, description="Over a ring: by how many bits sums are shifted; below those of dtype."
    ),
    BeforeValidator(as_integer),
    AfterValidator(_leaves_a_bit),
]
"""The field `fraction_bits`; `dtype` stands before it, and the next two behind it."""
ShiftRounding = Annotated[
    Rounding | None,
    AfterValidator(_of_a_shift),
    Field(
        validate_default=True, description="Of that shift: floor (default) or nearest, ties up. Rings alone have it."
    ),
]
"""The field `rounding`."""
Truncation = Annotated[
    AnyTruncation | None,
    AfterValidator(_of_sums),
    Field(
        validate_default=True,
        description="exact_once (default): the wrapped sum is shifted once. tolerance: within ulp of that, where "
        "nothing wraps around; schedules may then truncate parts of a sum. Rings alone have it.",
    ),
]
"""The field `truncation`."""
Chain = TypeVar("Chain", bound=Sequence[Node])


def exact_in_a_ring(chain: Chain, info: ValidationInfo) -> Chain:
    """Of the field `epilogue`, behind those: refuses what a ring does not compute exactly, and squares of sums that are
    off."""
    ring = _ring_of(info)
    if ring and (foreign := foreign_node(chain)):
        words = ", ".join(node for node in NODES if node != "masked_activation")
        raise refuse(
            "inexact_epilogue",
            f"{foreign}; {ring_name(ring)} computes {words} exactly, and masked_activation of "
            f"{' and '.join(FUNCTIONS)} alone",
            allowed=list(NODES),
        )
    if products(chain) and isinstance(info.data.get("truncation"), Tolerance):
        raise refuse(
            "unbounded_square",
            "has a square or a polynomial, which multiplies an error of the sum by the sum; allowed: without one, or "
            "truncation exact_once",
            allowed="without a square or a polynomial, or truncation exact_once",
        )
    for index, node in enumerate(chain if ring else ()):
        for place, function in zip(("where_set", "where_clear"), _functions(node), strict=False):
            _require_whole(function, info.data["dtype"], info, f" in {place} of node {index}")
    return chain


def exact_function(function: N, info: ValidationInfo) -> N:
    """Of a field that is a function of one number, behind those."""
    if ring := _ring_of(info):
        if function.op not in FUNCTIONS:
            raise refuse(
                "inexact_function",
                f"is {function.op}; {ring_name(ring)} computes {', '.join(FUNCTIONS)} exactly",
                allowed=list(FUNCTIONS),
            )
        _require_whole(function, ring, info)
    return function


def keyed(fields: dict[str, Any]) -> dict[str, Any]:
    """A problem's canonical form: without the fields of rings where there is none, so that what was known by its key
    stays known."""
    return fields if fields["dtype"] in RINGS else {name: fields[name] for name in fields if name not in FIELDS}
