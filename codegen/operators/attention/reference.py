"""Attention in float64 by its definition, and how far a kernel may be from it. Shares nothing with the kernel: all
scores of some queries of heads exist at once, and their greatest is found before anything is weighted.

With u = 2^-24, gamma(x) = x / (1 - x), n keys, scores t, their greatest T, weights w = e^(t - T) and W = Σw, a kernel
that goes over the keys in tiles has these errors:

- of a score: that of a sum of head_dim_qk products on tensor cores, gamma(4 head_dim_qk u) Σ|q||k| times the scale
  (`codegen/operators/matmul/reference.py` has the source); of a capped one besides 6 u |t|: tanhf's 2 ulp (CUDA C++
  Programming Guide, "Mathematical functions") and the roundings of its argument;
- of an exponent: the factor's rounding and the multiply-add's, and of the steps from a greatest so far to the next,
  which add up to no more than T - t: 4 u (T - t). What is subtracted is subtracted from all, so its rounding r, half an
  ulp of the exponent at most, makes all weights and their sum 2^r times as large, and is in no result while weights
  fit their 16 bits: of fp16 up to exponents of 2^28, where |r| is 8, of bf16 to 2^31. Beyond them out may be infinite,
  NaN or 0, and the bound is infinite from far smaller exponents on, by the errors of scores: below 2^20, where 2^r is
  1.03, of any head;
- of a power of 2: 2 ulp (PTX ISA, "ex2"), and a rounding of each product with one, for the weight itself and for each
  tile that brings a greater score: at most n / 16 of them, since no tile has fewer keys. Powers below 2^-126 are 0;
  Merging splits of the keys is a step more, from a split's greatest to that of all: the difference belongs to the same
  T - t, and a split of m tiles had m - 1 steps of its own, so that with a second split there are fewer than n / 16
  again; of the only split that sees a key, 2^0 and its products are exact (PTX ISA, "ex2": ex2 of 0 is 1);
- of a weight that meets v: half of an ulp of 16 bits (2^-11 of fp16, 2^-8 of bf16), of fp16 at least 2^-25, but no more
  than the weight;
- of a sum of weights gamma((n + 64) u), for any order, that of splits too (Higham, "Accuracy and Stability of Numerical
  Algorithms", 2nd ed., (4.4)), of their products with v gamma(4 (n + 16) u), on tensor cores;
- of the quotient 3 u; then out is rounded once, to nearest even.

lse = T + log W has the scores' error weighted by w / W, that of the sum, 2 u of T and of log W (log2f has 1 ulp) and
1 u of itself. Where the greatest score is exactly 0, all others vanish and W is a power of two, out is exact.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np

from codegen.arrays import EXACT_SUM, FINEST, Array, Float64, as_float64, joined, namespace_of, whole_after
from codegen.epilogue_reference import TINY, Bounded, U, gamma_of, stored_or_none
from codegen.operators.attention.problem import AttentionProblem
from codegen.operators.attention.seen import Seen
from codegen.operators.attention.special import with_values, without
from codegen.special_values import finite

# Of a weight that an mma takes: unit roundoff, and half of the smallest number.
WEIGHTS = {"float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}
SMALLEST_TILE = 16
EX2 = 4.0 * U  # 2 ulp
FLUSHED = 2.0**-126
# A weight of e^t is 0 in fp32 from here on: 2^-150.
NOTHING = -150.0 * math.log(2.0)
LARGEST_CHUNK = 2**24  # scores that exist at once


def reference(problem: AttentionProblem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
    """(result, bound) of out's logical shape; with `lse` of out's elements and then lse's, both as vectors."""
    parts = _ragged(problem, inputs, exact) if problem.ragged else dense(problem, inputs, exact)
    out, lse = parts
    return (joined([out.value, lse.value]), joined([out.error, lse.error])) if problem.lse else (out.value, out.error)


def _ragged(p: AttentionProblem, inputs: Mapping[str, Array], exact: bool) -> tuple[Bounded, Bounded]:
    """Each sequence by itself: those positions, or those pages, that the tables say."""
    tables = (_positions(inputs[name], p.batch) for name in ("qo_indptr", "kv_indptr"))
    xp = namespace_of(inputs["v"])
    rows = (p.total_q, p.heads_q)
    out, error = xp.zeros((*rows, p.head_dim_vo)), xp.zeros((*rows, p.head_dim_vo))
    lse, lse_error = xp.zeros((*rows, 1)) - np.inf, xp.zeros((*rows, 1))
    for number, ((first_q, end_q), (first_kv, end_kv)) in enumerate(zip(*tables, strict=True)):
        if end_q == first_q or end_kv == first_kv:  # no query, or none that sees a key
            continue
        of_q = slice(first_q, end_q)
        parts = {"q": inputs["q"][None, of_q, :, :]}
        for name in ("k", "v"):
            parts[name] = (
                _from_pages(p, inputs, name, first_kv, end_kv, number) if p.page_size
                else inputs[name][None, first_kv:end_kv, :, :]
            )  # fmt: skip
        own = p.sequence(end_q - first_q, int(parts["k"].shape[1]))
        of_out, of_lse = dense(own, parts, exact)
        at = (of_q, slice(None), slice(None))
        whole = (own.seq_q, own.heads_q)
        out[at], error[at] = (part.reshape(*whole, own.head_dim_vo) for part in (of_out.value, of_out.error))
        lse[at], lse_error[at] = (part.swapaxes(1, 2).reshape(*whole, 1) for part in (of_lse.value, of_lse.error))
    return Bounded(out, error), Bounded(lse, lse_error)


def _from_pages(
    p: AttentionProblem, inputs: Mapping[str, Array], name: str, first: int, end: int, number: int
) -> Array:
    """Keys or values of sequence `number`, whose pages are the entries from `first` to before `end`."""
    cache, size = inputs[name], p.page_size or 1
    keys = (end - first - 1) * size + int(inputs["kv_last_page_len"][number])
    pages = namespace_of(cache).take(cache, inputs["kv_indices"][first:end], 0)
    return pages.reshape(1, (end - first) * size, p.heads_kv, cache.shape[3])[:, :keys, :, :]


def _positions(table: Array, batch: int) -> list[tuple[int, int]]:
    """Where each sequence begins and ends."""
    begins = [int(table[i]) for i in range(batch + 1)]
    return list(pairwise(begins))


def dense(p: AttentionProblem, inputs: Mapping[str, Array], exact: bool) -> tuple[Bounded, Bounded]:
    """out in the problem's layout, and lse of (batch, heads, queries, 1)."""
    q, k, v = (_heads_first(p, as_float64(inputs[name], p.dtype)) for name in ("q", "k", "v"))
    xp, shape = namespace_of(q), (p.batch, p.heads_q, p.seq_q)
    out, error = xp.zeros((*shape, p.head_dim_vo)), xp.zeros((*shape, p.head_dim_vo))
    lse, lse_error = xp.zeros((*shape, 1)), xp.zeros((*shape, 1))
    shift = whole_after(finite(v))
    for first, end in _chunks(p):
        # The heads that share keys and values are more queries of these.
        seen, queries = _seen(p, first, end, q), p.group * (end - first)
        seen = xp.broadcast_to(seen.reshape(1, end - first, p.seq_kv), (p.group, end - first, p.seq_kv))
        seen = seen.reshape(queries, p.seq_kv)
        for batch in range(p.batch):
            for head in range(p.heads_kv):
                heads = slice(head * p.group, (head + 1) * p.group)
                of_batch, of_kv, rows = slice(batch, batch + 1), slice(head, head + 1), slice(first, end)
                head_q, head_k, head_v = (
                    q[of_batch, heads, rows, :].reshape(queries, p.head_dim_qk),
                    k[of_batch, of_kv, :, :].reshape(p.seq_kv, p.head_dim_qk),
                    v[of_batch, of_kv, :, :].reshape(p.seq_kv, p.head_dim_vo),
                )
                scores = _scores(p, head_q, head_k, exact)
                of_out, of_lse = _of_rows(p, scores, seen, head_v, shift)
                at = (of_batch, heads, rows, slice(None))
                whole = (1, p.group, end - first)
                out[at], error[at] = (part.reshape(*whole, p.head_dim_vo) for part in (of_out.value, of_out.error))
                lse[at], lse_error[at] = (part.reshape(*whole, 1) for part in (of_lse.value, of_lse.error))
    final = stored_or_none(p.dtype, Bounded(out, error))
    value, bound = (_heads_first(p, part) for part in (final.value, final.error))
    return Bounded(value, bound), Bounded(lse, lse_error)


def _heads_first(p: AttentionProblem, tensor: Array) -> Array:
    """From the layout to (batch, heads, positions, elements), and back."""
    return tensor.swapaxes(1, 2) if p.layout == "bshd" else tensor


def _chunks(p: AttentionProblem) -> Iterator[tuple[int, int]]:
    step = max(1, LARGEST_CHUNK // (p.seq_kv * p.group))
    for first in range(0, p.seq_q, step):
        yield first, min(first + step, p.seq_q)


def _seen(p: AttentionProblem, first: int, end: int, like: Array) -> Array:
    """1 where a query sees a key, else 0."""
    seen, of = namespace_of(like).zeros((end - first, p.seq_kv)), Seen.of(p)
    ones = namespace_of(like).zeros((1, p.seq_kv)) + 1.0
    for query in range(first, end):
        begin, stop = of.by(query)
        seen[query - first : query - first + 1, begin:stop] = ones[:, begin:stop]
    return seen != 0.0


def _scores(p: AttentionProblem, q: Float64, k: Float64, exact: bool) -> Bounded:
    xp = namespace_of(q)
    turned = k.swapaxes(0, 1)
    scale = p.scale
    with np.errstate(invalid="ignore"):  # of infinities NaN
        value = xp.matmul(q, turned) * scale
        error = gamma_of(4.0 * p.head_dim_qk) * scale * xp.matmul(xp.abs(q), xp.abs(turned)) + p.head_dim_qk * TINY
    error = xp.where(xp.isfinite(value), error, 0.0)
    if p.softcap is None or exact:
        return Bounded(value, error)
    value = p.softcap * xp.tanh(value / p.softcap)
    return Bounded(value, error + 6.0 * U * (1.0 + 2.0**-10) * xp.abs(value))


def _of_rows(
    p: AttentionProblem, scores: Bounded, seen: Array, v: Float64, shift: int | None
) -> tuple[Bounded, Bounded]:
    """`_weighted`, where scores and values may be none."""
    xp = namespace_of(v)
    if bool(xp.all(xp.isfinite(scores.value)) & xp.all(xp.isfinite(v))):
        return _weighted(p, scores, seen, v, shift)
    numbers, with_weight, nan = without(scores, seen)
    out, lse = _weighted(p, numbers, with_weight, finite(v), None)
    out = with_values(out, _weights(numbers.value, with_weight)[-1], seen, v)
    rows = [Bounded(xp.where(nan, np.nan, of.value), xp.where(nan, 0.0, of.error)) for of in (out, lse)]
    return rows[0], rows[1]


def _weighted(
    p: AttentionProblem, scores: Bounded, seen: Array, v: Float64, shift: int | None
) -> tuple[Bounded, Bounded]:
    """out and lse of some queries of one head, before out is rounded."""
    xp, n = namespace_of(v), p.seq_kv
    some, greatest, below, w = _weights(scores.value, seen)
    vanishes = below <= NOTHING
    rounding, smallest = WEIGHTS[p.dtype]
    ones = xp.zeros((n, 1)) + 1.0
    total = xp.matmul(w, ones)
    divisor = xp.where(some, total, 1.0)
    steps = 1.0 + n / SMALLEST_TILE
    exponent = scores.error - 4.0 * U * below
    of_weight = xp.where(vanishes, 0.0, xp.exp(xp.minimum(exponent + steps * (EX2 + U), 50.0)) - 1.0)
    size = xp.abs(v)
    flushed = seen.astype(np.float64) * FLUSHED
    narrow = xp.where(seen, xp.minimum(w + flushed, smallest), 0.0)
    summed = xp.matmul(w * (of_weight + rounding * (1.0 + of_weight)) + narrow + flushed, size)
    summed = summed + gamma_of(4.0 * (n + 16.0)) * xp.matmul(w * (1.0 + of_weight), size)
    lost = (xp.matmul(w * of_weight + flushed, ones) + gamma_of(n + 64.0) * total) / divisor
    left = xp.where(lost < 0.5, 1.0 - lost, 0.5)
    value = xp.matmul(w, v) / divisor
    error = (summed / divisor + xp.abs(value) * (lost + 3.0 * U)) / left * (1.0 + 2.0**-10) + TINY
    error = xp.where(lost < 0.5, error, np.inf)
    # Nothing rounds where all weights are 1 or 0, their number is a power of two and sums of v are whole numbers.
    mantissa, _ = xp.frexp(divisor)
    whole = xp.matmul((below == 0.0).astype(np.float64), ones) == total
    simple = some & whole & (greatest == 0.0) & (mantissa == 0.5) & (total < EXACT_SUM)
    simple = simple & (xp.matmul(w, size) * 2.0 ** (FINEST if shift is None else shift) <= EXACT_SUM)
    simple = simple & (shift is not None)
    once = value.astype(np.float32).astype(np.float64)
    out = Bounded(xp.where(simple, once, value), xp.where(simple, xp.zeros_like(error), error))
    out = Bounded(xp.where(some, out.value, 0.0), xp.where(some, out.error, 0.0))
    of_sum = xp.log(divisor)
    base = math.log(2.0)
    lse_error = (lost / left + 2.0 * U * (xp.abs(greatest) + xp.abs(of_sum))) / base
    lse = (greatest + of_sum) / base
    lse = xp.where(simple.any(1).reshape(-1, 1), xp.rint(lse), lse)
    lse_error = xp.where(lost < 0.5, lse_error + U * xp.abs(lse) + TINY, np.inf)
    return out, Bounded(xp.where(some, lse, -np.inf), xp.where(some, lse_error, 0.0))


def _weights(t: Float64, seen: Array) -> tuple[Array, Float64, Float64, Float64]:
    """Of each row whether it sees a key, its greatest score, how far scores are below, the weights."""
    xp, some = namespace_of(t), seen.max(1).reshape(-1, 1)
    t = xp.where(seen, t, -np.inf)
    greatest = xp.where(some, t.max(1).reshape(-1, 1), 0.0)
    below = xp.where(seen, t - greatest, NOTHING)
    return some, greatest, below, xp.where(below <= NOTHING, 0.0, xp.exp(below))
