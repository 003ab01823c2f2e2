"""Comparing a kernel's result with a reference and its bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def within(out: npt.NDArray[Any], reference: npt.NDArray[Any], bound: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Per element: |out - reference| <= bound. 0 demands equality, inf forgives anything; NaN is wrong otherwise."""
    with np.errstate(invalid="ignore", over="ignore"):
        close = np.abs(out.astype(np.float64) - reference) <= bound
    return np.asarray(close | np.isposinf(bound), dtype=np.bool_)


def worst(out: npt.NDArray[Any], reference: npt.NDArray[Any], bound: npt.NDArray[Any]) -> tuple[float, float]:
    """The largest |out - reference| over what the bound judges, and the bound at its place; NaN counts as infinite."""
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(np.isposinf(bound), 0.0, np.abs(out.astype(np.float64) - reference))
    error = np.where(np.isnan(error), np.inf, error)
    place = int(np.argmax(error))
    return float(error.flat[place]), float(bound.flat[place])
