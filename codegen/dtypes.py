"""Element types by name: bytes, the C++ type in kernels, the NumPy dtype of references and tests."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class DType:
    """`cxx` is the type in kernels; `numpy` has the same bits."""

    name: str
    bytes: int
    cxx: str
    numpy: np.dtype[Any]


_DTYPES = {
    element.name: element
    for element in (
        DType("float32", 4, "float", np.dtype(np.float32)),
        DType("float16", 2, "cukiln::Half", np.dtype(np.float16)),
        DType("bfloat16", 2, "cukiln::BFloat16", np.dtype(ml_dtypes.bfloat16)),
        DType("int32", 4, "int", np.dtype(np.int32)),
        DType("int64", 8, "int64_t", np.dtype(np.int64)),
        # Rings of Winograd's products, of which 5 and 9 bytes count; no operand has them.
        DType("int40", 8, "int64_t", np.dtype(np.int64)),
        DType("int72", 16, "cukiln::Wide", np.dtype("V16")),
        DType("int8", 1, "signed char", np.dtype(np.int8)),
        DType("uint8", 1, "unsigned char", np.dtype(np.uint8)),
    )
}


def dtype(name: str) -> DType:
    """The element type of that name; KeyError where there is none."""
    return _DTYPES[name]
