"""Inputs of attention's tests.

`integer`: results are exact. A key has a class c, a query a class b, and their score is -(b - c)² times a number that
brings it to -256 or below as an exponent of 2 where the classes differ: 0, the greatest, comes of non-zero products
that cancel (a point of a parabola and its tangent, and pairs of numbers of either sign), and all other weights vanish.
Classes of keys follow the ruler sequence, in which the greatest of an interval stands there once: so every query has
classes of which it sees a power of two of keys, and takes one of those. Values are small integers.

`normal`: normals; scores of about 2 standard deviations by the problem's own scale are made by the size of q. Of each
three queries, and heads of one, one has all its scores that high, and one that low, that e to the power of them is no
number of fp32: the greatest must be subtracted, and it must be that query's own. Not where scores are capped.

`special`: normals with NaN and infinities (`codegen/operators/attention/special.py`).

Tensors of more than LARGEST_RANDOM elements repeat their first heads or matrices, those of ragged batches sequences of
the same lengths. Keys in pages are those of a ragged batch, in pages of any order; NaN is wherever there is no key.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from codegen.dtypes import dtype
from codegen.operator import InputKind
from codegen.operators.attention.problem import AttentionProblem, OfSequences, Tensor
from codegen.operators.attention.seen import Seen
from codegen.operators.attention.special import put_special

Numbers = npt.NDArray[Any]
CACHES: tuple[Tensor, ...] = ("k", "v")

LARGEST_RANDOM = 2**22
# Of a sequence without pages kv_last_page_len is anything.
OF_NO_PAGE = 99
# As an exponent of 2: the weight is 0 in fp32, whatever is subtracted first.
VANISHING = 256.0
LARGEST_VALUE = 8
# Coordinates of a class.
PLACES = 3
# Standard deviation of scores of normal inputs, as exponents of e.
SPREAD = 2.0
# What all scores of a query are shifted by, as an exponent of e: of fp32 88 is too much, and -104 too little.
SHIFT = 110.0
# Keys of which as many classes as that have enough: the ruler sequence of longer intervals ends with the greatest.
MOST_CLASSES = 31


def make_inputs(problem: AttentionProblem, kind: InputKind, rng: np.random.Generator) -> dict[str, Numbers]:
    """Arrays of the logical shapes of q, k and v, and the tables of a ragged batch."""
    if not problem.ragged:
        return dense(problem, kind, rng)
    ragged = one_behind_the_other(problem, kind, rng, ("q", *CACHES))
    paged = in_pages(problem, {name: ragged[name] for name in CACHES}, rng) if problem.page_size else {}
    return {**ragged, **paged}


def in_pages(p: OfSequences, keys: Mapping[Any, Numbers], rng: np.random.Generator) -> dict[str, Numbers]:
    """Caches of keys that lie one behind the other, and their tables."""
    shapes = {name: p.shape(name) for name in keys}
    count, size = next(iter(shapes.values()))[:2]
    caches: dict[str, Numbers] = {name: np.full(shapes[name], np.nan, keys[name].dtype) for name in keys}
    pages = rng.permutation(count)[: p.pages].astype(np.int32)
    counts = [-(-length // size) for _, length in p.sequences]
    entries = begins(counts)
    places = np.concatenate(
        [entries[number] * size + np.arange(length, dtype=np.int64) for number, (_, length) in enumerate(p.sequences)]
    )
    for name, cache in caches.items():
        cache[pages[places // size], places % size] = keys[name]
    last = [
        length - (count - 1) * size if count else OF_NO_PAGE
        for (_, length), count in zip(p.sequences, counts, strict=True)
    ]
    return {**caches, "kv_indptr": entries, "kv_indices": pages, "kv_last_page_len": np.array(last, np.int32)}


def one_behind_the_other(
    p: OfSequences, kind: InputKind, rng: np.random.Generator, names: Sequence[str]
) -> dict[str, Numbers]:
    """Tensors of all sequences, and where each begins. Sequences of the same lengths repeat where there are many
    elements."""
    drawn: dict[tuple[int, int], dict[str, Numbers]] = {}
    sequences, elements = [], 0
    for lengths in p.sequences:
        if elements < LARGEST_RANDOM or lengths not in drawn:
            # What has no length is drawn with one position and then left out.
            made = dense(p.sequence(*(max(1, length) for length in lengths)), kind, rng)
            of = {"q": lengths[0], "k": lengths[1], "v": lengths[1]}
            drawn[lengths] = {name: made[name][0, : of[name]] for name in names}
            elements += sum(array.size for array in drawn[lengths].values())
        sequences.append(drawn[lengths])
    tensors = {name: np.concatenate([sequence[name] for sequence in sequences]) for name in names}
    of_q, of_kv = zip(*p.sequences, strict=True)
    return {**tensors, "qo_indptr": begins(of_q), "kv_indptr": begins(of_kv)}


def begins(lengths: Sequence[int]) -> Numbers:
    """Where sequences of these lengths begin, and where the last one ends."""
    return np.cumsum([0, *lengths], dtype=np.int64).astype(np.int32)


def dense(problem: AttentionProblem, kind: InputKind, rng: np.random.Generator) -> dict[str, Numbers]:
    p, element = problem, dtype(problem.dtype).numpy
    made = _classes(p, rng) if kind == "integer" else _normals(p, rng)
    if kind == "special":
        put_special(p, made, rng)
    return {name: _in_layout(p, name, array.astype(element)) for name, array in made.items()}


def _in_layout(p: AttentionProblem, name: Any, array: Numbers) -> Numbers:
    """Of (batch, heads, positions, elements); what is missing of batch and heads repeats."""
    shape = _whole(p, name)
    batches, heads = (np.arange(n) % m for n, m in zip(shape, array.shape[:2], strict=False))
    whole = array[batches][:, heads]
    return np.ascontiguousarray(whole.swapaxes(1, 2) if p.layout == "bshd" else whole)


def _whole(p: AttentionProblem, name: Tensor) -> tuple[int, int, int, int]:
    shape = p.shape(name)
    return shape if p.layout == "bhsd" else (shape[0], shape[2], shape[1], shape[3])


def _drawn(p: AttentionProblem, positions: int, columns: int) -> tuple[int, int]:
    """Matrices of the batch and heads of k and v that are drawn; those of q follow."""
    of_head = positions * columns * max(1, p.group)
    heads = min(p.heads_kv, max(1, LARGEST_RANDOM // of_head))
    return min(p.batch, max(1, LARGEST_RANDOM // (of_head * heads))), heads


def _normals(p: AttentionProblem, rng: np.random.Generator) -> dict[str, Numbers]:
    longest = max(p.seq_q, p.seq_kv)
    batch, heads = _drawn(p, longest, max(p.head_dim_qk, p.head_dim_vo))
    # |q · k| is about the root of head_dim_qk; fp16 must hold it, and most of its digits.
    size = min(max(SPREAD / (p.scale * math.sqrt(p.head_dim_qk)), 2.0**-10), 2.0**10)
    q = size * rng.standard_normal((batch, heads * p.group, p.seq_q, p.head_dim_qk), dtype=np.float32)
    k = rng.standard_normal((batch, heads, p.seq_kv, p.head_dim_qk), dtype=np.float32)
    v = rng.standard_normal((batch, heads, p.seq_kv, p.head_dim_vo), dtype=np.float32)
    if p.softcap is None:
        of_k = 2.0 ** round(math.log2(SHIFT / p.scale) / 2)  # of the two factors neither is large
        k[..., -1] = of_k
        rows = np.arange(q.shape[1])[:, None] + np.arange(p.seq_q)
        q[..., -1] = SHIFT / p.scale / of_k * (1 - rows % 3)
    return {"q": q, "k": k, "v": v}


def _classes(p: AttentionProblem, rng: np.random.Generator) -> dict[str, Numbers]:
    longest = max(p.seq_q, p.seq_kv)
    batch, heads = _drawn(p, longest, max(p.head_dim_qk, p.head_dim_vo))
    size_q, size_k = _sizes(p)
    q = np.zeros((batch, heads * p.group, p.seq_q, p.head_dim_qk), np.float32)
    k = np.zeros((batch, heads, p.seq_kv, p.head_dim_qk), np.float32)
    seen = Seen.of(p)
    begins, ends = (np.array([seen.by(query)[i] for query in range(p.seq_q)]) for i in (0, 1))
    places = rng.permutation(p.head_dim_qk)
    for matrix in range(batch):
        for head in range(heads):
            classes = _ruler(p.seq_kv, int(rng.integers(1, 64)))
            counts = _counts(classes, begins, ends)
            values = _relabelled(classes, rng)
            labels = np.array([values[classes == c][0] if (classes == c).any() else 0 for c in range(MOST_CLASSES)])
            c = values.astype(np.float32)
            k[matrix, head] = _spread_out(places, np.stack([c * c, c, np.ones_like(c)], 1), p, rng, of_q=False)
            for own in range(head * p.group, (head + 1) * p.group):
                b = labels[_chosen(counts, rng)].astype(np.float32)
                # -(b - c)² = -c² + 2 b c - b²
                q[matrix, own] = _spread_out(places, np.stack([-np.ones_like(b), 2 * b, -b * b], 1), p, rng, of_q=True)
    v = rng.integers(-LARGEST_VALUE, LARGEST_VALUE, (batch, heads, p.seq_kv, p.head_dim_vo), endpoint=True)
    return {"q": q * size_q, "k": k * size_k, "v": v}


def _sizes(p: AttentionProblem) -> tuple[float, float]:
    """Powers of two, of q and of k, that make a difference of one class vanish."""
    bits = max(0, math.ceil(math.log2(VANISHING / (p.scale * math.log2(math.e)))))
    # fp16 ends at 65504, and squares of classes are below 2^8; bf16 ends where fp32 does.
    bits = min(bits, 16 if p.dtype == "float16" else 48)
    return 2.0 ** (bits - bits // 2), 2.0 ** (bits // 2)


def _ruler(count: int, start: int) -> Numbers:
    """The number of zeros behind the last one of `start` and the numbers that follow, in binary."""
    numbers = np.arange(start, start + count, dtype=np.int64)
    return np.minimum(np.log2((numbers & -numbers).astype(np.float64)).astype(np.int64), MOST_CLASSES - 1)


def _relabelled(classes: Numbers, rng: np.random.Generator) -> Numbers:
    """Distinct small numbers of either sign instead."""
    labels = rng.permutation(np.arange(MOST_CLASSES) - MOST_CLASSES // 2)
    order = np.argsort(np.abs(labels), kind="stable")  # the classes that there are get the smallest
    used = labels[order][: int(classes.max()) + 1]
    return rng.permutation(used)[classes]


def _counts(classes: Numbers, begins: Numbers, ends: Numbers) -> Numbers:
    """Of each query (rows) and class how many keys it sees."""
    before = np.zeros((MOST_CLASSES, classes.size + 1), np.int64)
    for c in range(int(classes.max()) + 1):
        before[c, 1:] = np.cumsum(classes == c)
    return (before[:, ends] - before[:, begins]).T


def _chosen(counts: Numbers, rng: np.random.Generator) -> Numbers:
    """Of each query a class of which it sees a power of two of keys; any, where it sees none."""
    powers = (counts > 0) & (counts & (counts - 1) == 0)
    chances = np.where(powers, rng.random(counts.shape), -1.0)
    chosen: Numbers = chances.argmax(1)
    return chosen


def _spread_out(
    places: Numbers, coordinates: Numbers, p: AttentionProblem, rng: np.random.Generator, *, of_q: bool
) -> Numbers:
    """Coordinates, at three places of the head's elements; elsewhere pairs whose products cancel: (u, u) and (w, -w).
    An odd place is 0 in k."""
    rows, columns = coordinates.shape[0], p.head_dim_qk
    out = np.zeros((rows, columns), np.float32)
    out[:, places[:PLACES]] = coordinates
    rest = places[PLACES:]
    pairs = rest.size // 2
    drawn = rng.choice(np.array([-2.0, -1.0, 1.0, 2.0], np.float32), (rows, pairs))
    out[:, rest[:pairs]] = drawn
    out[:, rest[pairs : 2 * pairs]] = drawn if of_q else -drawn
    if of_q and rest.size % 2:
        out[:, rest[-1]] = 1.0
    return out
