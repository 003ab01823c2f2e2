"""Inputs of a matmul's tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from codegen.operator import InputKind, Operand


@dataclass(frozen=True)
class Integers:
    """A holds integers up to `a` times 2^-`shift`, B integers up to `b`. A sum of at most `terms` products is a whole
    number of quanta below 2^22, which leaves fp32 room for bias, residual and power-of-two scales."""

    a: int
    b: int
    shift: int

    @property
    def terms(self) -> int:
        return 2**22 // (self.a * self.b)


PLAIN = Integers(a=2, b=2, shift=0)
# For epilogues that cast: sums of this many quanta do not fit the 11 bits of float16, so that a missing cast shows, and
# they are small enough in value for the clips of the test problems.
FINE = Integers(a=32, b=16, shift=6)


def make_inputs(
    operands: tuple[Operand, ...], k: int, k_axis_of_a: int, casts: bool, kind: InputKind, rng: np.random.Generator
) -> dict[str, npt.NDArray[Any]]:
    """`integer`: small integers (of a power of two) of either sign, so that fp32 holds every partial sum exactly."""
    integers = FINE if casts else PLAIN
    made: dict[str, npt.NDArray[Any]] = {}
    for operand in operands:
        if operand.role == "in":
            # What a stride of 0 repeats is drawn once.
            shape = tuple(
                extent if stride else 1 for extent, stride in zip(operand.shape, operand.strides, strict=True)
            )
            made[operand.name] = np.broadcast_to(_draw(operand, shape, integers, kind, rng), operand.shape)
    if kind == "integer" and k > integers.terms:
        kept = np.zeros(k, dtype=np.float32)
        kept[rng.choice(k, integers.terms, replace=False)] = 1.0
        made["a"] = made["a"] * (kept if k_axis_of_a == -1 else kept[:, None])
    return made


def _draw(
    operand: Operand, shape: tuple[int, ...], integers: Integers, kind: InputKind, rng: np.random.Generator
) -> npt.NDArray[Any]:
    if operand.dtype == "uint8":
        # Any byte but 0 keeps a value: kernels that compare with 1 or look at one bit are wrong.
        return rng.choice(np.array([0, 0, 1, 2, 255], dtype=np.uint8), size=shape)
    if kind == "normal":
        return rng.standard_normal(shape, dtype=np.float32)
    limit = {"a": integers.a, "b": integers.b}.get(operand.name, 8)
    drawn = rng.integers(-limit, limit, size=shape, endpoint=True).astype(np.float32)
    return np.ldexp(drawn, -integers.shift) if operand.name == "a" else drawn
