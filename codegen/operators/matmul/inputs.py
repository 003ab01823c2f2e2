"""Inputs of a matmul's tests.

An operand of more than LARGEST_RANDOM elements repeats a block of random numbers, row by row: generating a hundred
million takes longer than all that is done with them. Values below that are random one by one, and A apart from B. That
hides nothing. Elements which agree by repetition lie a multiple of the block's length apart, and that is a prime of
which no extent is a multiple: so no two rows, columns or matrices of a batch agree, by whatever stride a kernel
confuses them. Nor do tiles: the length is odd, so where rows have a multiple of 16 elements, elements that agree are 16
columns (or a multiple) apart only after 16 lengths, and then thousands of rows as well: no single mistake takes one for
the other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from codegen.dtypes import dtype
from codegen.epilogue import LeakyRelu, Node, Scale
from codegen.fixed_point import over_ring
from codegen.operator import InputKind, Operand
from codegen.operators.matmul import ring_inputs
from codegen.operators.matmul.problem import MatmulProblem
from codegen.special_inputs import NO_NUMBERS, ZEROS, with_special

# Up to which integers A and B hold every integer; of float32, what tf32 holds.
LARGEST = {"float32": 2**11, "float16": 2**11, "bfloat16": 2**8, "int8": 127}
# Sums of |products| stay below this many quanta: fp32 has the partial sums of any order exactly, with 2 bits to spare.
SUM_QUANTA = 2**22
# Quanta of a typical sum: as a power of two, and as how many more bits than a narrow type of an output or a cast has.
# Some sums then fit the narrow type, others are halfway between two of its values, others elsewhere between.
WIDE_BITS, BITS_TO_ROUND = 17, 4
# Of a sum's elements of A, or of B, how many are no number in `special` inputs: about half of the sums have one. Of the
# elements of biases and residuals.
OF_A_SUM, OF_OPERANDS = 0.6, 0.1
# Of the sums of `special` inputs of float16 so many have subnormal numbers: this many times smaller ones. Of fp32 sums
# a subnormal may become 0: red.add.f32 does that (PTX ISA, "atom").
SUBNORMAL_SUMS, SUBNORMAL = 0.15, 2.0**-16
# Above so many elements a block is repeated, of the first of these lengths that no extent is a multiple of: primes.
LARGEST_RANDOM = 2**22
BLOCKS = (3_999_971, 3_999_949)
SIGNIFICANT_BITS = {"float16": 11, "bfloat16": 8}
# Bits behind the binary point that fp32 has beside a sum of a few biases and residuals, each at most 8.
FRACTION_BITS = 18
# The size of a typical sum: the clips of the test problems and the bent parts of activations are within reach.
TYPICAL = 16.0
# Of int8 sums that become float16 unscaled: 16 standard deviations below its largest value.
TYPICAL_FLOAT16 = 4096.0


@dataclass(frozen=True)
class Integers:
    """A holds integers up to `a` times 2^-`shift`, B integers up to `b`."""

    a: int
    b: int
    shift: int

    @property
    def terms(self) -> int:
        """How many products a sum may have."""
        return SUM_QUANTA // (self.a * self.b)


def make_inputs(
    problem: MatmulProblem, operands: Sequence[Operand], kind: InputKind, rng: np.random.Generator
) -> dict[str, npt.NDArray[Any]]:
    """Arrays of the operands' dtypes and logical shapes.

    `integer`: integers (times a power of two) of either sign whose every partial sum fp32 holds exactly, as wide as
    that allows. `normal`: standard normals, rounded to the dtype; of int8 uniform integers. `positive`: their sizes, of
    A and B. `special`: normals, of A some NaN and infinities, and some rows of subnormal numbers; of biases and
    residuals some NaN, infinities and zeros of either sign.
    """
    made, terms = draw_inputs(problem, operands, kind, rng)
    if kind == "special" and problem.dtype == "float16":
        rows = np.where(rng.random(problem.m) < SUBNORMAL_SUMS, np.float16(SUBNORMAL), np.float16(1.0))
        made["a"] = made["a"] * (rows if problem.a_transposed else rows[:, None])
    if problem.k > terms:
        factors = kept_products(problem.k, terms, made["a"].dtype, rng)
        made["a"] = made["a"] * (factors[:, None] if problem.a_transposed else factors)
    return made


def kept_products(k: int, terms: int, element: Any, rng: np.random.Generator) -> npt.NDArray[Any]:
    """1 for `terms` of the k products of a sum, 0 for the others, which its exactness has no room for."""
    factors = np.zeros(k, dtype=element)
    factors[rng.choice(k, terms, replace=False)] = 1
    return factors


def draw_inputs(
    problem: MatmulProblem,
    operands: Sequence[Operand],
    kind: InputKind,
    rng: np.random.Generator,
    special: Literal["a", "b"] = "a",
) -> tuple[dict[str, npt.NDArray[Any]], int]:
    """The arrays, whatever their shapes, and how many products a sum may have to be exact, where integers must be.
    `special`: which operand has what is no number in inputs of that kind."""
    if over_ring(problem):
        return ring_inputs.draw_inputs(problem, operands, kind, rng)
    integers = _integers(problem, wide_a=bool(rng.integers(2)))
    made: dict[str, npt.NDArray[Any]] = {}
    for operand in operands:
        if operand.role == "in":
            # What a stride of 0 repeats is generated once.
            shape = tuple(
                extent if stride else 1 for extent, stride in zip(operand.shape, operand.strides, strict=True)
            )
            block = _block(shape)
            drawn = _draw(problem, operand, block or shape, integers, kind, rng)
            if kind == "special" and operand.name == special and drawn.dtype.kind == "f":
                drawn = with_special(drawn, OF_A_SUM / problem.k, NO_NUMBERS, rng)
            elif kind == "special" and operand.name.startswith(("bias", "residual")):
                drawn = with_special(drawn, OF_OPERANDS, (*NO_NUMBERS, *ZEROS), rng)
            drawn = drawn.astype(dtype(operand.dtype).numpy)
            made[operand.name] = np.broadcast_to(np.resize(drawn, shape) if block else drawn, operand.shape)
    return made, integers.terms if kind == "integer" else problem.k


def _block(shape: tuple[int, ...]) -> tuple[int] | None:
    """The shape of the random block that is repeated row by row; None where all of the operand is random."""
    if math.prod(shape) <= LARGEST_RANDOM:
        return None
    return (next((length for length in BLOCKS if all(extent % length for extent in shape)), BLOCKS[-1]),)


def _draw(
    problem: MatmulProblem,
    operand: Operand,
    shape: tuple[int, ...],
    integers: Integers,
    kind: InputKind,
    rng: np.random.Generator,
) -> npt.NDArray[Any]:
    if operand.dtype == "uint8":
        # Any byte but 0 keeps a value: kernels that compare with 1 or look at one bit are wrong.
        return rng.choice(np.array([0, 0, 1, 2, 255], dtype=np.uint8), size=shape)
    if operand.dtype == "int32":  # words of a packed mask, bits behind the last output included
        return rng.integers(-(2**31), 2**31 - 1, size=shape, dtype=np.int32, endpoint=True)
    if kind != "integer":
        if operand.dtype != "int8":
            normals = rng.standard_normal(shape, dtype=np.float32)
            return np.abs(normals) if kind == "positive" and operand.name in ("a", "b") else normals
        limit = int(min(LARGEST["int8"], max(2.0, math.sqrt(_spread(problem) * _int8_limit(problem)))))
        return rng.integers(-limit - (limit == LARGEST["int8"]), limit, size=shape, dtype=np.int32, endpoint=True)
    limit = {"a": integers.a, "b": integers.b}.get(operand.name, 8)
    # Half the memory of int64, and the same numbers.
    drawn = rng.integers(-limit, limit, size=shape, dtype=np.int32, endpoint=True)
    return np.ldexp(drawn.astype(np.float32), -integers.shift) if operand.name == "a" else drawn


def _integers(problem: MatmulProblem, *, wide_a: bool) -> Integers:
    """`wide_a`: A gets as many bits as it can hold, and B what that leaves; else the other way round."""
    largest, spread = LARGEST[problem.dtype], _spread(problem)
    if problem.dtype == "int8":  # which no power of two makes smaller
        product = spread * min(2 ** _bits_of_sums(problem), _int8_limit(problem))
    else:
        product = spread * 2 ** min(_bits_of_sums(problem), FRACTION_BITS + 4 - fraction_bits(problem.epilogue))
    product = int(max(4.0, min(product, SUM_QUANTA / problem.k, largest**2)))
    narrow = min(16, math.isqrt(product))
    wide = min(largest, product // narrow)
    narrow = product // wide
    shift = 0 if problem.dtype == "int8" else max(0, math.floor(math.log2(wide * narrow / spread / TYPICAL)))
    return Integers(wide, narrow, shift) if wide_a else Integers(narrow, wide, shift)


def _spread(problem: MatmulProblem) -> float:
    """The product of two limits between which uniform integers give sums with a standard deviation of 1."""
    return 3.0 / math.sqrt(problem.k)


def _bits_of_sums(problem: MatmulProblem) -> int:
    narrow = {node.dtype for node in problem.epilogue if node.op == "cast"} | {problem.out_dtype}
    return min([WIDE_BITS, *(SIGNIFICANT_BITS[name] + BITS_TO_ROUND for name in narrow if name in SIGNIFICANT_BITS)])


def fraction_bits(chain: Sequence[Node]) -> int:
    """How far the scalars of a chain move the last bit of what they multiply; more than 16 is not counted."""
    factors = [node.value for node in chain if isinstance(node, Scale)]
    factors += [node.slope for node in chain if isinstance(node, LeakyRelu)]
    return min(16, sum(factor.as_integer_ratio()[1].bit_length() - 1 for factor in factors))


def needs_small_sums(node: Node) -> bool:
    """Whether large values all leave a node as the same: clipped, on an activation's straight parts, overflowed."""
    return node.op in ("clip", "masked_activation") or not node.exact or node.structure == "cast.float16"


def _int8_limit(problem: MatmulProblem) -> float:
    """How large typical sums of int8 products may be, so that all that follows shows them: clips, activations and
    float16 need them small, unless a scale makes them so."""
    limit, factor = math.inf, 1.0
    for node in problem.epilogue:
        if isinstance(node, Scale):
            factor *= abs(node.value) or 1.0
        elif needs_small_sums(node):
            limit = min(limit, (TYPICAL_FLOAT16 if node.op == "cast" else TYPICAL) / factor)
    return min(limit, TYPICAL_FLOAT16 / factor) if problem.out_dtype == "float16" else limit
