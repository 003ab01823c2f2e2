"""Element types: NumPy, C++ and DLPack mean the same bits by a name, and outputs of every type are checked."""

from __future__ import annotations

import re
from importlib.resources import files

import numpy as np
import pytest

from codegen.dtypes import dtype
from codegen.plan.verification_plan import check_output, differing

NAMES = ("float32", "float16", "bfloat16", "int32", "int8", "uint8")


@pytest.mark.parametrize("name", NAMES)
def test_numpy_holds_the_bytes_that_kernels_hold(name: str) -> None:
    element = dtype(name)
    assert (element.name, element.numpy.name) == (name, name)
    assert element.numpy.itemsize == element.bytes


@pytest.mark.parametrize("name", NAMES)
def test_launch_code_has_the_c_type_by_the_same_name(name: str) -> None:
    header = (files("codegen") / "device" / "launch.h").read_text()
    spelled = dtype(name).cxx.removeprefix("cukiln::")
    assert re.search(rf"element_type<{spelled}> = ElementType::{name};", header)


def test_a_name_that_is_no_type_is_none() -> None:
    with pytest.raises(KeyError):
        dtype("float64")


def test_bfloat16_is_the_upper_half_of_float32() -> None:
    values = np.float32([1.0, -2.5, 2.0**-130, np.inf, 1.5 * 2.0**127])
    halves = values.astype(dtype("bfloat16").numpy).view(np.uint16)
    assert np.array_equal(halves.astype(np.uint32) << 16, values.view(np.uint32))


@pytest.mark.parametrize(
    ("name", "values", "other"),
    [
        ("float16", [1.0, 65504.0, -0.25], 2.0), ("bfloat16", [1.0, 3.0e38, -0.25], 2.0),
        ("int32", [1, 2**31 - 1, -(2**31)], 2), ("float32", [1.0, 2.0**100, -0.25], 2.0),
    ],
)  # fmt: skip
def test_outputs_of_every_type_are_compared_with_the_bound_and_bit_by_bit(
    name: str, values: list[float], other: float
) -> None:
    out = np.array(values).astype(dtype(name).numpy)
    expected, zero = out.astype(np.float64), np.zeros(3)
    assert check_output(out, expected, zero, exact=True).ok
    assert check_output(out, expected, zero, exact=False).ok
    wrong = out.copy()
    wrong[0] = other
    output_check = check_output(wrong, expected, zero, exact=True)
    assert (output_check.wrong, output_check.index, output_check.got, output_check.expected) == (1, (0,), other, 1.0)
    assert differing(out, wrong) == 1
    assert differing(out, out.copy()) == 0


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_poison_is_no_number(name: str) -> None:
    poison = np.full(4, 0xFF, np.uint8).view(dtype(name).numpy)
    assert np.all(np.isnan(poison.astype(np.float64)))
    assert check_output(poison, np.zeros(2), np.full(2, 1e300), exact=False).wrong == 2
