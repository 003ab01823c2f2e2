"""The float64 reference beside other ways of computing it, and its bound beside results in fp32."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from codegen.plan.verification_plan import check_output
from tests.operators.harness.declarations import Declarations, Fields, inputs_of
from tests.support.gpu.strict_arrays import on_device, on_host, strict_namespace

TABLES = {
    "defined": lambda declared: declared.references.defined,
    "bounded": lambda declared: declared.references.bounded,
    "by_torch": lambda declared: {
        name: fields
        for name, fields in declared.references.defined.items()
        if declared.references.by_torch and "epilogue" not in fields
    },
    "on_gpu": lambda declared: declared.references.on_device,
}


def test_the_reference_is_the_definition(declared: Declarations, defined: Fields) -> None:
    of, problem = declared.references, declared.parse(defined)
    assert of is not None and of.definition is not None
    inputs = inputs_of(declared, problem, "integer" if of.exact else "normal", 1)
    result, bound = declared.op.reference(problem, inputs, exact=of.exact)
    expected = of.definition(problem, inputs)
    if of.exact:
        np.testing.assert_array_equal(result, expected)
        assert (bound == 0.0).all(), "sums of integers are exact"
    else:
        np.testing.assert_allclose(result, expected.astype(float), rtol=of.rtol, atol=of.atol)
        assert np.isfinite(bound).all()


def test_fp32_is_within_the_bound_and_what_lost_a_part_is_not(declared: Declarations, bounded: Fields) -> None:
    of, problem = declared.references, declared.parse(bounded)
    assert of is not None and of.in_fp32 is not None
    inputs = inputs_of(declared, problem, "normal", 3)
    expected, bound = declared.op.reference(problem, inputs)
    assert check_output(of.in_fp32(problem, inputs, False), expected, bound, exact=False).ok
    lost = check_output(of.in_fp32(problem, inputs, True), expected, bound, exact=False)
    assert not lost.ok and lost.wrong >= of.wrong


def test_the_reference_on_a_device_has_the_values_of_numpy(declared: Declarations, on_gpu: tuple[str, Fields]) -> None:
    kind, fields = on_gpu
    problem = declared.parse(fields)
    inputs = inputs_of(declared, problem, kind, 6)
    here = declared.op.reference(problem, inputs)
    with strict_namespace():
        copied: Any = {name: on_device(values) for name, values in inputs.items()}
        there: Any = declared.op.reference(problem, copied)
        back = [on_host(array) for array in there]
    assert declared.references is not None
    for array, other in zip(here, back, strict=True):
        if declared.references.on_device_rtol:
            np.testing.assert_allclose(array, other, rtol=declared.references.on_device_rtol)
        else:
            np.testing.assert_array_equal(array, other)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_pytorch_computes_the_same(declared: Declarations, by_torch: Fields) -> None:
    of, problem = declared.references, declared.parse(by_torch)
    assert of is not None and of.by_torch is not None
    inputs = inputs_of(declared, problem, "normal", 5)
    expected, _ = declared.op.reference(problem, inputs)
    np.testing.assert_allclose(of.by_torch(problem, inputs), expected, rtol=1e-9, atol=1e-9)
