"""Inputs of a matmul's tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from codegen.operator import InputKind, Operand

LARGEST = 2
# |sum| <= 2^20 * LARGEST^2 = 2^22 leaves room for bias, residual and power-of-two scales within fp32's 24 bits.
MOST_TERMS = 2**20


def make_inputs(
    operands: tuple[Operand, ...], k: int, k_axis_of_a: int, kind: InputKind, rng: np.random.Generator
) -> dict[str, npt.NDArray[Any]]:
    """`integer`: small integers of either sign, so that every partial sum is an integer that fp32 holds exactly."""
    made: dict[str, npt.NDArray[Any]] = {}
    for operand in operands:
        if operand.role == "in":
            # What a stride of 0 repeats is drawn once.
            shape = tuple(
                extent if stride else 1 for extent, stride in zip(operand.shape, operand.strides, strict=True)
            )
            made[operand.name] = np.broadcast_to(_draw(operand, shape, kind, rng), operand.shape)
    if kind == "integer" and k > MOST_TERMS:
        kept = np.zeros(k, dtype=np.float32)
        kept[rng.choice(k, MOST_TERMS, replace=False)] = 1.0
        made["a"] = made["a"] * (kept if k_axis_of_a == -1 else kept[:, None])
    return made


def _draw(operand: Operand, shape: tuple[int, ...], kind: InputKind, rng: np.random.Generator) -> npt.NDArray[Any]:
    if operand.dtype == "uint8":
        # Any byte but 0 keeps a value: kernels that compare with 1 or look at one bit are wrong.
        return rng.choice(np.array([0, 0, 1, 2, 255], dtype=np.uint8), size=shape)
    if kind == "normal":
        return rng.standard_normal(shape, dtype=np.float32)
    limit = LARGEST if operand.name in ("a", "b") else 8
    return rng.integers(-limit, limit, size=shape, endpoint=True).astype(np.float32)
