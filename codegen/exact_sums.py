"""Which sums of products are exact in fp32, whatever their order."""

import numpy as np

from codegen.arrays import Float64, namespace_of

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
