"""What `special` inputs have beside normals: NaN, infinities, zeros of either sign, the smallest numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

NO_NUMBERS, ZEROS = (np.nan, np.inf, -np.inf), (-0.0, 0.0)
# Positive: CuPy's conversions take those of float32 for 0 of their sign (`codegen.arrays`), and relu makes of -0
# another zero than of a negative number.
SMALLEST = {"float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}


def with_special(
    values: npt.NDArray[Any], share: float, special: Sequence[float], rng: np.random.Generator
) -> npt.NDArray[Any]:
    """`values` with so many of `special` in their places, and of NaN always one: references look for it."""
    chosen = rng.choice(np.array(special, values.dtype), values.shape)
    made = np.where(rng.random(values.shape) < share, chosen, values)
    if special[0] != special[0] and made.size:
        made.reshape(-1)[rng.integers(made.size)] = np.nan
    return made
