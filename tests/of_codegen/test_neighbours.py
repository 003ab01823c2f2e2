"""Which problems are near each other, and which offsets a neighbour has shown to be right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from codegen.neighbours import Extents, distance, place_of, reaches_no_further
from codegen.operand import Operand
from codegen.operators import operator


def extents(name: str = "matmul", **fields: Any) -> Extents:
    kind = operator(name)
    whole = (
        {"operator": name, "m": 64, "n": 64, "k": 64, **fields} if name == "matmul" else {"operator": name, **fields}
    )
    return Extents.of(kind, kind.parse(whole))


@pytest.mark.parametrize(
    ("fields", "far"),
    [
        ({}, 0.0),
        ({"m": 128}, 2.0),  # an axis of a and of the output
        ({"m": 32}, 2.0),
        ({"m": 128, "n": 32}, 4.0),
        ({"k": 256}, 4.0),
        ({"batch": 4}, 6.0),  # of all three, which have no such axis otherwise
    ],
)
def test_the_distance_is_of_the_ratios_of_all_axes(fields: dict[str, Any], far: float) -> None:
    assert distance(extents(), extents(**fields)) == pytest.approx(far)
    assert distance(extents(**fields), extents()) == pytest.approx(far)


def test_empty_axes_have_a_distance() -> None:
    """An operator from outside may have some."""

    def of(rows: int) -> Extents:
        operand = Operand("x", "float32", "in", (rows, 8), (8, 1))
        kind: Any = SimpleNamespace(operands=lambda problem: (operand,))
        return Extents.of(kind, kind)

    assert distance(of(0), of(1)) == 0.0 and distance(of(0), of(2)) == 1.0 and of(0).bytes == (0,)


@pytest.mark.parametrize(
    ("beside", "right"), [({"m": 64}, False), ({"m": 2**23}, True), ({"m": 2**24}, True), ({"n": 2**24}, False)]
)
def test_an_operand_of_2_gib_needs_one_that_is_no_smaller(beside: dict[str, Any], right: bool) -> None:
    assert reaches_no_further(extents(m=2**23), extents(**beside)) is right  # a and the output have 2 GiB
    assert reaches_no_further(extents(m=2**23 - 16), extents(**beside))


def test_pitches_count_for_offsets_and_not_for_the_distance() -> None:
    wide = extents(m=2**16, lda=2**14)
    assert distance(wide, extents(m=2**16)) == 0.0
    assert not reaches_no_further(wide, extents(m=2**16)) and reaches_no_further(extents(m=2**16), wide)


def test_what_makes_another_kernel_makes_another_signature() -> None:
    kind = operator("matmul")
    signatures = {
        place_of(kind, kind.parse({"operator": "matmul", "m": 64, "n": 64, "k": 64, **fields})).signature
        for fields in ({}, {"m": 8}, {"dtype": "float16"}, {"n": 63}, {"epilogue": [{"op": "relu"}]})
    }
    assert len(signatures) == 4  # m alone changes none
