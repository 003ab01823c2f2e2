"""Arrays of any namespace: NumPy's, or CuPy's in a GPU's memory. Functions take the namespace of their arguments.

What is used of a namespace is what NumPy and CuPy 13 and later share, which `tests/support/gpu/strict_arrays.py` lists.
Where a Python number decides what happens next it is taken by `float()`, `int()` or `bool()` of an array with one
element, which on a GPU synchronises with all that was queued before.

CuPy always compiles with `-ftz=true`: a subnormal number of float32 counts as 0 in its kernels. No verdict depends on
it. Sums, bounds and comparisons are of float64, which the option leaves alone, and bits are compared as integers; what
is left are conversions from and to float32. There a value below 2^-126 may become 0 of its sign. Whole numbers of the
exact cases are none, a normal is so small once in 10^37, subnormals of float16 are ordinary numbers of float32, an
activation's tail has a bound of 2^-126 or more there (`codegen.epilogue_reference`), and `special` inputs
(`codegen.special_inputs`) have one only where 0 in its place changes no output by more. So only the CPU sees a kernel
that takes them for 0.
"""

import importlib
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

# An array of any namespace, and one of float64: the two libraries share no static type.
Array = Any
Float64 = Any

SMALLEST_NORMAL = 2.0**-126  # of float32 and bfloat16

_numpy_erf = np.frompyfunc(math.erf, 1, 1)


def namespace_of(array: Array) -> Any:
    """The module whose functions take `array`: by the array API standard, else the package of its type.

    NumPy's arrays have `__array_namespace__` since 2.0; CuPy's (14.2) do not, but are `cupy.ndarray`.
    """
    method = getattr(array, "__array_namespace__", None)
    return sys.modules[type(array).__module__.partition(".")[0]] if method is None else method()


def joined(parts: Sequence[Array]) -> Array:
    """Several arrays as one vector, one behind the other; a single one as it is."""
    if len(parts) == 1:
        return parts[0]
    return namespace_of(parts[0]).concatenate([part.reshape(-1) for part in parts])


def compared(outputs: Sequence[tuple[Array, str]]) -> Array:
    """Of the outputs of a call with their element types, what is compared with a reference: all elements in float64,
    one output behind the other. A single one of int64 as it is: float64 does not hold its values."""
    if len(outputs) == 1 and outputs[0][1] == "int64":
        return outputs[0][0]
    return joined([as_float64(array, dtype) for array, dtype in outputs])


def as_float64(array: Array, dtype: str) -> Float64:
    """The values of an array of that element type (`codegen.dtypes`). Of bfloat16 the bits as uint16 are enough, for
    namespaces that have no such type."""
    if dtype == "bfloat16" and array.dtype == np.uint16:
        # The bits of a bfloat16 are the upper half of a float32's.
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def powers_of_two(exponents: Array) -> Float64:
    """2 to each of these whole numbers from -1022 to 1023: the exponent is what a float64 begins with. `ldexp` takes
    NumPy ten times as long, and types of its two operands that differ by namespace."""
    return ((exponents.astype(np.int64) + 1023) << 52).view(np.float64)


def erf(values: Float64) -> Float64:
    """The error function of each value; NumPy has none, CuPy's is in the package `cupyx`."""
    namespace = namespace_of(values)
    if namespace is np:
        return np.asarray(_numpy_erf(values), dtype=np.float64)
    return importlib.import_module(f"{namespace.__name__}x.scipy.special").erf(values)


# The largest integer up to which fp32 holds every integer: sums of integers below it are exact in any order, and on
# tensor cores, whose 24 bits reach down to the last one.
EXACT_SUM = 2.0**24
# Bits behind the binary point up to which values count as whole numbers of a power of two.
FINEST = 40


def whole_after(values: Float64) -> int | None:
    """By which power of two to multiply, so that all values are whole numbers; None where 2^FINEST does not do."""
    xp = namespace_of(values)
    scaled = xp.abs(values) * 2.0**FINEST
    if not bool(xp.all((scaled < 2.0**62) & (scaled == xp.rint(scaled)))):
        return None
    bits = scaled.astype(np.int64)
    del scaled  # of a large problem each copy is hundreds of megabytes
    # A number and the one before it differ in the last bit that is set and in those behind it; 0 and -1 in all.
    bits ^= bits - 1
    return FINEST + 1 - int(xp.min(bits.view(np.uint64))).bit_length()
