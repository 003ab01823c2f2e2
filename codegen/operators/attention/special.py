"""NaN and infinities in attention: inputs of its `special` runs, and what becomes of them in a row.

A score that is NaN or +infinity makes its row NaN; one of -infinity has the weight 0, and a row of nothing else is one
that sees no key. A NaN in a value makes its element of each row that sees it NaN, an infinity infinite, or NaN beside
one of the other sign. What is promised ends where a weight may be 0, because nothing of it is left or because the row
does not see the key: 0 times an infinity is NaN, as it is where the tile that the key lies in is left out no more.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from codegen.arrays import Array, Float64, namespace_of
from codegen.epilogue_reference import Bounded
from codegen.operators.attention.problem import AttentionProblem
from codegen.special_inputs import NO_NUMBERS
from codegen.special_values import finite

Numbers = npt.NDArray[np.float32]
# Queries of each head, half of them at most, with an element that is none, side by side: the emulation takes longer
# for each 16 with one; columns of values, one of so many.
QUERIES, OF_COLUMNS = 4, 4
# Of values of float16, which are then subnormal.
SUBNORMAL = 2.0**-18
# A weight that is surely not 0 in 16 bits, however small the greatest score was when it was computed.
SURELY = 2.0**-20


def put_special(p: AttentionProblem, made: Mapping[str, Numbers], rng: np.random.Generator) -> None:
    """Into arrays of (batch, heads, positions, elements): into a few queries of each head; into the values of some
    columns; of every second head, the first or the second, into one key, the first, the last or any. Of float16 other
    columns of values are subnormal."""
    q, k, v = made["q"], made["k"], made["v"]
    for batch, head in np.ndindex(*q.shape[:2]):
        count = min(QUERIES, (p.seq_q + int(rng.integers(2))) // 2)
        rows = (rng.integers(0, p.seq_q) + np.arange(count)) % p.seq_q
        # At the last element keys are alike, so that all scores of a row are the same infinity (`inputs.SHIFT`).
        places = np.where(rng.random(count) < 0.5, p.head_dim_qk - 1, rng.integers(0, p.head_dim_qk, count))
        q[batch, head, rows, places] = rng.permutation(np.array((*NO_NUMBERS, -np.inf)))[:count]
    columns = rng.permutation(p.head_dim_vo)
    several = max(1, p.head_dim_vo // OF_COLUMNS)
    if p.dtype == "float16":
        v[..., columns[several : 2 * several]] *= np.float32(SUBNORMAL)
    second = int(rng.integers(2))
    for batch, head in np.ndindex(*k.shape[:2]):
        chosen = rng.choice(columns[:several], several)
        v[batch, head, rng.integers(0, p.seq_kv, several), chosen] = rng.choice(NO_NUMBERS, several)
        if (batch + head) % 2 == second:
            key = rng.choice((0, p.seq_kv - 1, int(rng.integers(0, p.seq_kv))))
            k[batch, head, key, rng.integers(0, p.head_dim_qk)] = rng.choice(NO_NUMBERS)


def without(scores: Bounded, seen: Array) -> tuple[Bounded, Array, Array]:
    """The scores with 0 in place of what is no number and of its error; which keys a row sees beside those of
    -infinity; which rows are NaN."""
    xp, none = namespace_of(seen), ~namespace_of(seen).isfinite(scores.value)
    least = scores.value == -np.inf
    lost = seen & none & ~least
    number = Bounded(finite(scores.value), xp.where(none, 0.0, scores.error))
    return number, seen & ~least, lost.max(1).reshape(-1, 1)


def with_values(out: Bounded, weights: Float64, seen: Array, v: Float64) -> Bounded:
    """`out` of finite values, with what NaN and infinities among `v` make of it. `weights`: relative to the greatest,
    0 where there is none."""
    xp = namespace_of(v)

    def some(rows: Array, values: Array) -> Array:
        return xp.matmul(rows.astype(np.float64), values.astype(np.float64)) > 0.0

    heavy, nothing = seen & (weights >= SURELY), ~xp.isfinite(v)
    above, below = some(heavy, v == np.inf), some(heavy, v == -np.inf)
    nan = some(seen, v != v) | (above & below)
    unsure = some(~heavy, nothing) & ~nan
    infinite = xp.where(above, np.inf, xp.where(below, -np.inf, out.value))
    value = xp.where(nan, np.nan, xp.where(unsure, out.value, infinite))
    return Bounded(value, xp.where(unsure, np.inf, xp.where(nan | above | below, 0.0, out.error)))
