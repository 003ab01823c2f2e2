"""What the vendor's libraries need of a GPU, by NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def quiet(what: str) -> None:
    """A `workers.vendor.bench.Beat`."""


class NumpyBench:
    """Enough of a GPU for operands and for the kernel after cuDNN's, which `kernels` computes."""

    arrays = np
    stream = 7

    def __init__(self) -> None:
        self.memory: dict[int, np.ndarray[Any, Any]] = {}
        self.texts: list[str] = []

    def address(self, array: np.ndarray[Any, Any]) -> int:
        self.memory[array.ctypes.data] = array
        return int(array.ctypes.data)

    def synchronize(self) -> None: ...

    def faults(self) -> Any:
        return np.errstate()

    def kernel(self, text: str, name: str) -> Callable[..., None]:
        self.texts.append(text)
        return lambda grid, block, arguments: self.launches.append(arguments)

    @property
    def launches(self) -> list[Any]:
        return self.__dict__.setdefault("_launches", [])
