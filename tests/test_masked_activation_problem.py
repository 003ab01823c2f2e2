"""Masked activations: what is refused, and where; what is filled in; rules, searches, costs, and the reference."""

from __future__ import annotations

from typing import Any

import jsonschema
import numpy as np
import pytest
from pydantic import ValidationError

from codegen.lower import lower
from codegen.operators import operator
from codegen.predict_before import predict_before
from codegen.problem import LARGEST_ELEMENTS
from codegen.rules import Rejected
from codegen.schedule import Schedule
from codegen.search import Search
from codegen.targets import target
from tests.masked_kernels import POLYNOMIAL, masked
from tests.strict_arrays import on_device, on_host, strict_namespace

OP, SM_90A = operator("masked_activation"), target("sm_90a")


def faults(*shape: Any, **fields: Any) -> dict[str, str]:
    """Where the problem is refused, and the sentence."""
    with pytest.raises(ValidationError) as refused:
        masked(*shape, **fields)
    return {".".join(map(str, error["loc"])): error["msg"] for error in refused.value.errors()}


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"shape": []}, "shape", "at least 1 item"),
        ({"shape": [2] * 9}, "shape", "at most 8 items"),
        ({"shape": [4, 0]}, "shape.1", "greater than or equal to 1"),
        ({"shape": [0]}, "shape.0", "greater than or equal to 1"),
        ({"shape": ["4"]}, "shape.0", "valid integer"),
        ({"shape": [4, 1.5]}, "shape.1", "valid integer"),
        ({"shape": [2**30, 2**30]}, "shape", f"x would span {2**60} elements; at most {LARGEST_ELEMENTS} are allowed"),
        ({"dtype": "int8"}, "dtype", "'float32', 'float16' or 'bfloat16'"),
        ({"mask": "words"}, "mask", "'bits' or 'bytes'"),
        ({"mask_dtype": "uint8"}, "mask_dtype", "is uint8, but a mask of bits is int32"),
        ({"mask": "bytes", "mask_dtype": "int32"}, "mask_dtype", "is int32, but a mask of bytes is uint8"),
        ({"mask_dtype": "float32"}, "mask_dtype", "'int32' or 'uint8'"),
        ({"mask_length": 31}, "mask_length", "is 31, but 1000 elements need 32 words of 32 bits"),
        ({"mask": "bytes", "mask_length": 32}, "mask_length", "is 32, but 1000 elements need 1000 bytes"),
        ({"mask_length": 0}, "mask_length", "is 0, but 1000 elements need 32"),
        ({"mask_length": "32"}, "mask_length", "valid integer"),
        ({"where_set": {"op": "tanh"}}, "where_set", "does not match any of the expected tags"),
        (
            {"where_set": {"op": "polynomial", "coefficients": [1, 2]}},
            "where_set.polynomial.coefficients",
            "at least 3",
        ),
        (
            {"where_set": {"op": "polynomial", "coefficients": [1, 2, 3, 4, 5]}},
            "where_set.polynomial.coefficients",
            "4",
        ),
        (
            {"where_set": {"op": "polynomial", "coefficients": [1, 2, 3, 1e39]}},
            "where_set.polynomial.coefficients.3",
            "float32",
        ),
        ({"layout": "nhwc"}, "layout", "not permitted"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(fields: dict[str, Any], field: str, said: str) -> None:
    found = faults(**fields)
    assert list(found) == [field]
    assert said in found[field]


def test_every_default_is_explicit_and_axes_become_one() -> None:
    assert masked(10, 5, 20).canonical() == {
        "operator": "masked_activation", "shape": [1000], "dtype": "float32", "where_set": {"op": "relu"},
        "where_clear": {"op": "identity"}, "mask": "bits", "mask_dtype": "int32", "mask_length": 32,
    }  # fmt: skip
    assert masked(10, 100).digest == masked(1000, mask_length=32).digest == OP.parse(masked(1000).canonical()).digest
    assert masked(1000, mask="bytes").mask_length == 1000


def test_extents_and_coefficients_are_no_part_of_a_signature() -> None:
    one, other = (masked(n, where_clear={**POLYNOMIAL, "coefficients": [n, 1, 2]}) for n in (5, 70))
    assert OP.signature(one) == OP.signature(other)
    assert OP.signature(one) == {"dtype": "float32", "node": "masked_activation.bits.relu.polynomial2"}
    assert OP.scalars(other) == [70.0, 1.0, 2.0]


def test_operands_are_vectors_in_order() -> None:
    found = OP.operands(masked(1000, dtype="float16"))
    assert [(one.name, one.dtype, one.role, one.shape) for one in found] == [
        ("x", "float16", "in", (1000,)), ("out", "float16", "out", (1000,)), ("mask", "int32", "in", (32,)),
    ]  # fmt: skip
    assert OP.operands(masked(1000, mask="bytes"))[2].shape == (1000,)


def test_the_schema_accepts_what_the_model_does() -> None:
    schema = OP.schema()
    jsonschema.validate({"shape": [4, 5], "where_set": POLYNOMIAL, "mask": "bytes"}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"shape": [], "where_set": {"op": "relu"}}, schema)


VECTORISED = {"algorithm": "vectorised", "threads": 256, "vector": 8, "loads": 4}
LISTS = {"algorithm": "gather_scatter", "threads": 256}


@pytest.mark.parametrize(
    ("fields", "schedule", "limit", "rule", "said"),
    [
        ({}, VECTORISED, None, "vector", "vector = 8 is 32 bytes; one access moves at most 16"),
        ({"dtype": "float16"}, VECTORISED, None, "padding", "a block of 8192 elements is mostly padding for 1000"),
        (
            {"shape": [2**40], "dtype": "float16"},
            {**VECTORISED, "threads": 64, "vector": 1, "loads": 1},
            None,
            "grid",
            "17179869184 blocks",
        ),
        (
            {"shape": [2**20]},
            {**VECTORISED, "threads": 1024, "vector": 4, "loads": 8},
            None,
            "registers",
            "about 88 registers; 1024 threads have 64 each",
        ),
        ({"shape": [2**31]}, LISTS, None, "index", "indices of 2147483648 elements; 32 bits count 2147483647"),
        ({"shape": [1000]}, LISTS, None, "padding", "a block of 8192 elements"),
        ({"shape": [2**20]}, LISTS, 4096, "workspace", "needs 4194816 bytes of workspace, the limit is 4096"),
    ],
)
def test_rules_say_the_numbers(
    fields: dict[str, Any], schedule: dict[str, Any], limit: int | None, rule: str, said: str
) -> None:
    found = OP.rules(masked(**fields), Schedule.of(schedule), SM_90A, limit)
    assert isinstance(found, Rejected)
    assert (found.rule, said in found.message) == (rule, True), found.message


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("elements", [1, 31, 32, 63, 64, 255, 256, 511, 1000, 2**20])
def test_every_level_has_schedules_and_that_of_level_0(elements: int, dtype: str) -> None:
    problem = masked(shape=[elements], dtype=dtype)
    zero, one, two = (
        {found.schedule for found in lower(problem, SM_90A, Search(level=level)).candidates} for level in (0, 1, 2)
    )
    assert len(zero) == 1
    assert zero <= one <= two


def test_a_sample_has_the_lists_to_compare_with() -> None:
    large = masked(shape=[2**24], dtype="float16")
    for level in (1, 2):
        sample = lower(large, SM_90A, Search(level=level, limit=2)).candidates
        assert [one.schedule.get("algorithm") for one in sample] == ["vectorised", "gather_scatter"]


def test_level_1_tries_one_pass_and_lists_and_predicts_that_lists_are_slow() -> None:
    problem = masked(2**24, dtype="float16", where_set={"op": "gelu"})
    found = lower(problem, SM_90A, Search(level=1)).candidates
    times = {one.schedule: predict_before(one, SM_90A).us for one in found}
    lists = [us for one, us in times.items() if one.get("algorithm") == "gather_scatter"]
    others = [us for one, us in times.items() if one.get("algorithm") == "vectorised"]
    assert lists and others
    assert min(lists) > 2 * max(others)


@pytest.mark.parametrize("elements", [1, 100, 5000, 2**30])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_level_0_is_one_pass_that_breaks_no_rule(elements: int, dtype: str) -> None:
    (found,) = lower(masked(elements, dtype=dtype), SM_90A, Search(level=0)).candidates
    assert found.schedule.get("algorithm") == "vectorised"


def test_cost_is_one_read_of_x_and_of_the_mask_and_one_write() -> None:
    problem = masked(1000, dtype="float16")
    one, other = OP.cost(problem, Schedule.of(VECTORISED)), OP.cost(problem, Schedule.of(LISTS))
    assert (one.bytes_read, one.bytes_written, one.launches, one.workspace_bytes) == (2000 + 128, 2000, 1, 0)
    assert (other.bytes_read, other.bytes_written, other.launches) == (2128, 2000, 3)
    assert OP.cost(masked(1000, mask="bytes"), Schedule.of(VECTORISED)).bytes_read == 5000


@pytest.mark.parametrize("mask", ["bits", "bytes"])
def test_the_reference_is_the_definition(mask: str) -> None:
    problem = masked(70, mask=mask, where_set=POLYNOMIAL, where_clear={"op": "square"})
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(3))
    found, bound = OP.reference(problem, inputs, exact=True)
    assert (bound == 0.0).all()
    for i, x in enumerate(inputs["x"].astype(float)):
        is_set = int(inputs["mask"][i // 32]) >> (i % 32) & 1 if mask == "bits" else inputs["mask"][i] != 0
        assert found[i] == (0.5 - x + 0.25 * x**2 + 0.125 * x**3 if is_set else x * x)


def test_the_reference_on_a_device_has_the_values_of_numpy() -> None:
    problem = masked(70, where_set={"op": "gelu"}, where_clear=POLYNOMIAL)
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(3))
    here = OP.reference(problem, inputs)
    with strict_namespace():
        there: Any = OP.reference(problem, {name: on_device(values) for name, values in inputs.items()})
        found = [on_host(one) for one in there]
    for one, other in zip(here, found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_inputs_of_large_problems_are_repeated_blocks() -> None:
    inputs = OP.make_inputs(masked(2**23), "normal", np.random.default_rng(3))
    assert (inputs["x"].shape, inputs["mask"].shape) == ((2**23,), (2**18,))
    assert not np.array_equal(inputs["x"][: 2**20], inputs["x"][2**22 : 2**22 + 2**20])
