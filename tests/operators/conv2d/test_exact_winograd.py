"""Winograd in a ring that is larger by the scale of its filters, by Python's integers: exact, where the ring itself is
not. The kernels' own arithmetic is in tests/operators/conv2d/test_conv2d_ring.py; here kernels of one launch run on
numbers of the whole ring."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.operators.convolution.winograd_reference import FILTER_SCALE, FILTERS, IMAGE, INVERSE
from codegen.search.rules import Accepted
from codegen.search.schedule import Schedule
from codegen.targets import target
from tests.operators.conv2d import convolutions
from tests.operators.conv2d.kernels import EXACT_FUSED, convolution
from tests.support.kernels import ring_runs
from tests.support.kernels.cpu_helpers import SMALL_LIMBS
from tests.support.kernels.random_cases import EACH_RUN, seed_of_this_run
from tests.support.kernels.ring_integers import each

# Outputs of a tile: bits by which the ring is larger, and what is left of the scale.
FORMS = {2: (2, 1), 4: (6, 9)}
CHANNELS = 5
# Channels whose products of nine limbs the accumulators hold without a carry.
LONGEST = 13_210


def random_integers(rng: random.Random, bits: int, *shape: int) -> Any:
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
        image = random_integers(rng, bits, CHANNELS, outputs + 2, outputs + 2)
        filters = random_integers(rng, bits, CHANNELS, 3, 3)
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


# ---- kernels of one launch

CASES = tuple(product(("conv2d", "conv2d_dgrad"), FORMS, (32, 64), ("nhwc", "nchw")))
# Tiles cut off along both axes, padding of one side, channels and filters beside multiples of a block's.
SIZES = {"n": 2, "h": 7, "w": 9, "c": 5, "k": 10, "padding": [[0, 2], [1, 1]]}


def one_launch(name: str, outputs: int, bits: int, layout: str) -> Candidate:
    fields = {**SIZES, "layout": layout, "dtype": f"int{bits}", "fraction_bits": bits // 4 + 1, "rounding": "nearest"}
    problem = convolution(name, **fields, epilogue=[{"op": "residual"}])
    schedule = Schedule.of({**EXACT_FUSED, "output_tile": outputs})
    assert isinstance(operator(name).rules(problem, schedule, target("sm_80")), Accepted)
    return operator(name).candidate(problem, schedule)


def test_every_bit_is_that_of_pythons_integers(tmp_path: Path) -> None:
    """Of some kernels, others each time."""
    require_bits_of_integers(random.Random(seed_of_this_run()).sample(CASES, 4), tmp_path)


@pytest.mark.long
def test_every_bit_of_all_kernels_is_that_of_pythons_integers(tmp_path: Path) -> None:
    require_bits_of_integers(CASES, tmp_path)


def require_bits_of_integers(cases: Sequence[tuple[str, int, int, str]], tmp_path: Path) -> None:
    candidates = {case: one_launch(*case) for case in cases}
    built = ring_runs.built({str(case): each.kernel for case, each in candidates.items()}, tmp_path)
    rng = random.Random(seed_of_this_run())
    for (name, _, bits, _), candidate in candidates.items():
        op, p = operator(name), candidate.problem
        operands = [operand for operand in op.operands(p) if operand.role == "in"]
        inputs = {each.name: random_integers(rng, bits, *each.shape).astype(each.dtype) for each in operands}
        expected = convolutions.definition(p, inputs)  # type: ignore[arg-type]
        np.testing.assert_array_equal(built.call(candidate, inputs), expected, str(candidate.schedule.as_dict()))


@pytest.mark.long
@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("outputs", FORMS)
def test_of_five_thousand_none_is_wrong(outputs: int, bits: int) -> None:
    assert wrong(5000, seed_of_this_run(), outputs, bits, FORMS[outputs][0]) == 0


# ---- nine limbs at the ends of their accumulators


def nine_limbs(channels: int, **tunables: Any) -> Candidate:
    """F(2 x 2) of one tile and one filter."""
    problem = convolution("conv2d", n=1, h=4, w=4, c=channels, k=1, dtype="int64")
    own = {"algorithm": "winograd_limbs", "output_tile": 2, "transform_width": 1, "raster": 0}
    small = {name: value for name, value in SMALL_LIMBS.items() if name != "split"}
    tile = {"tile_m": 16, "tile_n": 16, "warps_m": 1, "warps_n": 1}
    return operator("conv2d").candidate(problem, Schedule.of({**small, **tile, **own, **tunables}))


@pytest.mark.long
@pytest.mark.parametrize("split", ["fused", "ahead"])
def test_nine_limbs_hold_the_longest_sum_and_carry_longer_ones(split: str, tmp_path: Path) -> None:
    """At a place of the tile every transformed number is -1, whose limbs are all 255."""
    tunables = {"limb_split": split} if split == "ahead" else {}
    chains = {0: LONGEST // 8 * 8, 512: LONGEST + 90, 8192: 2 * 8192 + 100}
    made = {chain: nine_limbs(channels, chain_k=chain, **tunables) for chain, channels in chains.items()}
    built = ring_runs.built({str(chain): each.kernel for chain, each in made.items()}, tmp_path)

    def run(candidate: Candidate, channels: int) -> Any:
        inputs = {"x": np.zeros((1, 4, 4, channels), np.int64), "w": np.zeros((1, 3, 3, channels), np.int64)}
        for values in inputs.values():
            values[:, 1, 1] = -1
        return built.call(candidate, inputs).ravel().tolist()

    for chain, channels in chains.items():
        assert isinstance(
            operator("conv2d").rules(made[chain].problem, made[chain].schedule, target("sm_80")), Accepted
        )
        assert run(made[chain], channels) == [channels, 0, 0, 0]
    longer = nine_limbs(LONGEST + 6, chain_k=0, **tunables)
    assert longer.kernel == made[0].kernel
    with pytest.raises(AssertionError, match="the number of launches is 0"):
        run(longer, LONGEST + 6)
