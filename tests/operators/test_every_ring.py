"""Over rings every dtype, place of truncation, algorithm and layout together passes the plan, tails among its problems;
of these the operators' own tables have any two or three."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from codegen.fixed_point import PLACES, Place
from codegen.kernel import Kernel
from codegen.operators.matmul.ring_space import LACKING
from tests.operators.conv2d.convolutions import LAYOUTS
from tests.operators.conv2d.kernels import ALIGNS, Kernels
from tests.operators.conv2d.ring_schedules import AHEAD, RINGS, SPLIT_AHEAD
from tests.operators.matmul.ring_kernels import ring_kernel
from tests.support.kernels.cpu_helpers import verify
from tests.support.kernels.random_cases import LAYOUTS as OF_MATMUL

BITS = {"int32": 9, "int64": 18}
# Of a way its algorithm, and where limbs are split.
PRODUCTS = (("imad", "fused"), ("limbs", "fused"), ("limbs", "ahead"))
WINOGRAD = (("imad", "fused"), ("limbs", "fused"), ("limbs", "ahead"), ("one launch", "fused"))
OPERATORS = ("matmul", *ALIGNS)


def products(name: str) -> Iterator[tuple[str, str, Place]]:
    """Algorithms of products, with each place where they truncate."""
    for (algorithm, split), place in product(PRODUCTS, PLACES):
        ahead = split == "ahead"
        of_planes = name in SPLIT_AHEAD and place == "once"  # tiles of planes have zeros of their own
        if (algorithm, place) != LACKING and (not ahead or name == "matmul" or of_planes):
            yield algorithm, split, place


def rounded(number: int, dtype: str) -> dict[str, Any]:
    return {"dtype": dtype, "bits": BITS[dtype], "rounding": ("floor", "nearest")[number % 2]}


def of_products(name: str, dtype: str) -> dict[str, Kernel]:
    layouts = OF_MATMUL if name == "matmul" else LAYOUTS
    made = {}
    for number, (layout, (algorithm, split, place)) in enumerate(product(layouts, products(name))):
        tunables = {"truncate": place, **(AHEAD if split == "ahead" else {})}
        words = {"layout": layout, **rounded(number // 2, dtype)}
        if name == "matmul":
            kernel = ring_kernel(**words, algorithm=algorithm, **tunables)
        else:
            kernel = getattr(Kernels(name), algorithm)(words, **tunables)
        made[f"{algorithm} {split} {place} {layout}"] = kernel
    return made


def of_winograd(name: str, dtype: str) -> dict[str, Kernel]:
    of, made = Kernels(name), {}
    for number, (layout, (way, split), outputs) in enumerate(product(LAYOUTS, WINOGRAD, (2, 4))):
        words = {"layout": layout, **rounded(number // 2, dtype)}
        if way == "one launch":
            kernel = of.exact_fused(words, output_tile=outputs)
        else:
            tunables = AHEAD if split == "ahead" else {}
            kernel = of.exact_winograd(way, words, output_tile=outputs, **tunables)
        made[f"{way} {split} F({outputs}) {layout}"] = kernel
    return made


def require_right(kernels: dict[str, Kernel]) -> None:
    verdicts = verify(list(kernels.values()))
    got = {name: (verdict.verdict, verdict.message) for name, verdict in zip(kernels, verdicts, strict=True)}
    assert got == dict.fromkeys(kernels, ("ok", ""))


@pytest.mark.long
@pytest.mark.parametrize("dtype", RINGS)
@pytest.mark.parametrize("name", OPERATORS)
def test_products_truncate_everywhere_in_every_layout(name: str, dtype: str) -> None:
    require_right(of_products(name, dtype))


@pytest.mark.long
@pytest.mark.parametrize("dtype", RINGS)
@pytest.mark.parametrize("name", SPLIT_AHEAD)
def test_winograd_is_exact_in_every_form_and_layout(name: str, dtype: str) -> None:
    require_right(of_winograd(name, dtype))
