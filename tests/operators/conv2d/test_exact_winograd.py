"""Winograd in a ring that is larger by the scale of its filters, by Python's integers: exact, where the ring itself is
not. The kernels' own arithmetic is in tests/operators/conv2d/test_conv2d_ring.py."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from codegen.operators.convolution.winograd_reference import FILTER_SCALE, FILTERS, IMAGE, INVERSE
from tests.support.random_cases import EACH_RUN, seed_of_this_run
from tests.support.ring_integers import each

# Outputs of a tile: bits by which the ring is larger, and what is left of the scale.
FORMS = {2: (2, 1), 4: (6, 9)}
CHANNELS = 5


def drawn(rng: random.Random, bits: int, *shape: int) -> Any:
    """Of the whole ring, its ends among them."""
    ends = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, -1, 0, 1)
    numbers = [
        rng.choice(ends) if rng.random() < 0.2 else rng.randrange(-(2 ** (bits - 1)), 2 ** (bits - 1))
        for _ in range(int(np.prod(shape)))
    ]
    return np.array(numbers, dtype=object).reshape(shape)


def convolved(image: Any, filters: Any, outputs: int) -> Any:
    """Of one tile, summed over the channels."""
    return sum(
        filters[c, r, s] * image[c, r : r + outputs, s : s + outputs]
        for c in range(CHANNELS)
        for r in range(3)
        for s in range(3)
    )


def by_winograd(image: Any, filters: Any, outputs: int, bits: int, more: int) -> Any:
    """All of it modulo 2^(bits + more), then divided by the scale modulo 2^bits: by its power of two that is the ring's
    own room, by 9 its inverse."""
    end, odd = 2 ** (bits + more), FORMS[outputs][1]
    b, g, a = (np.array(table[outputs], dtype=object) for table in (IMAGE, FILTERS, INVERSE))
    sums = sum((b.dot(image[c]).dot(b.T) % end) * (g.dot(filters[c]).dot(g.T) % end) for c in range(CHANNELS)) % end
    outer = a.dot(sums).dot(a.T) % end
    power = FILTER_SCALE[outputs] ** 2 // odd
    assert power * odd == FILTER_SCALE[outputs] ** 2
    return each(lambda y: y // power * pow(odd, -1, 2**bits) % 2**bits, outer)


def wrong(count: int, seed: int, outputs: int, bits: int, more: int) -> int:
    rng, differing = random.Random(seed), 0
    for _ in range(count):
        image = drawn(rng, bits, CHANNELS, outputs + 2, outputs + 2)
        filters = drawn(rng, bits, CHANNELS, 3, 3)
        expected = convolved(image, filters, outputs) % 2**bits
        differing += not np.array_equal(by_winograd(image, filters, outputs, bits, more), expected)
    return differing


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("outputs", FORMS)
def test_with_room_for_the_scale_no_output_is_wrong(outputs: int, bits: int) -> None:
    assert wrong(EACH_RUN, seed_of_this_run(), outputs, bits, FORMS[outputs][0]) == 0


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("outputs", FORMS)
def test_a_bit_less_is_too_few(outputs: int, bits: int) -> None:
    assert wrong(20, 1, outputs, bits, FORMS[outputs][0] - 1) > 10


@pytest.mark.long
@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("outputs", FORMS)
def test_of_five_thousand_none_is_wrong(outputs: int, bits: int) -> None:
    assert wrong(5000, seed_of_this_run(), outputs, bits, FORMS[outputs][0]) == 0
