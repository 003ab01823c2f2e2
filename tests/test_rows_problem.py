"""Softmax and the norms: what is refused, and where; what is filled in; rules, searches, costs, and the reference."""

from __future__ import annotations

from typing import Any

import jsonschema
import numpy as np
import pytest
from pydantic import ValidationError

from codegen.lower import lower
from codegen.operators import operator
from codegen.predict_before import predict_before
from codegen.problem import LARGEST_EXTENT
from codegen.row_reference import unit_of
from codegen.rules import Accepted, Rejected
from codegen.schedule import Schedule
from codegen.search import Search
from codegen.targets import target
from codegen.test_plan import judge
from tests.row_kernels import OPERATORS, problem
from tests.strict_arrays import on_device, on_host, strict_namespace

SM_90A = target("sm_90a")
NORMS = ("layer_norm", "rms_norm")


def faults(name: str, **fields: Any) -> dict[str, str]:
    """Where the problem is refused, and the sentence."""
    with pytest.raises(ValidationError) as refused:
        operator(name).parse({"operator": name, "shape": (6, 40), **fields})
    return {".".join(map(str, error["loc"])): error["msg"] for error in refused.value.errors()}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"shape": []}, "shape", "at least 1 item"),
        ({"shape": [2] * 9}, "shape", "at most 8 items"),
        ({"shape": [0, 4]}, "shape.0", "greater than or equal to 1"),
        ({"shape": [4, 0]}, "shape.1", "greater than or equal to 1"),
        ({"shape": [4, "5"]}, "shape.1", "valid integer"),
        ({"shape": [1, 2**31]}, "shape", f"2147483648 elements in a row (the last axis); at most {LARGEST_EXTENT}"),
        ({"shape": [2**16, 2**15, 4]}, "shape", f"2147483648 rows (all axes but the last); at most {LARGEST_EXTENT}"),
        ({"shape": [2**21, 2**20]}, "shape", f"x would span {2**41} elements"),
        ({"dtype": "int32"}, "dtype", "'float32', 'float16' or 'bfloat16'"),
        ({"out_dtype": "int32"}, "out_dtype", "'float32', 'float16' or 'bfloat16'"),
        ({"axis": 1}, "axis", "not permitted"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(name: str, fields: dict[str, Any], field: str, said: str) -> None:
    found = faults(name, **fields)
    assert list(found) == [field]
    assert said in found[field]


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"epsilon": -1e-5}, "epsilon", "greater than or equal to 0"),
        ({"epsilon": 1e39}, "epsilon", "must be finite and fit float32"),
        ({"scale": 1}, "scale", "valid boolean"),
    ],
)
def test_norms_refuse_what_they_have_no_meaning_for(name: str, fields: dict[str, Any], field: str, said: str) -> None:
    found = faults(name, **fields)
    assert list(found) == [field]
    assert said in found[field]


def test_every_default_is_explicit_and_leading_axes_become_one() -> None:
    assert problem("softmax", 8, 4, 40, dtype="float16").canonical() == {
        "operator": "softmax", "shape": [32, 40], "dtype": "float16", "out_dtype": "float16",
    }  # fmt: skip
    assert problem("layer_norm", 40).canonical() == {
        "operator": "layer_norm", "shape": [1, 40], "dtype": "float32", "out_dtype": "float32", "scale": True,
        "shift": True, "epsilon": 1e-5,
    }  # fmt: skip
    assert not problem("rms_norm").shift and problem("rms_norm").scale
    assert problem("softmax", 8, 4, 40).digest == problem("softmax", 32, 40).digest


@pytest.mark.parametrize(
    ("columns", "dtype", "align"),
    [
        (40, "float16", 8),
        (4, "float16", 4),
        (6, "bfloat16", 2),
        (7, "float16", 1),
        (40, "float32", 4),
        (6, "float32", 2),
    ],
)
def test_alignment_classes(columns: int, dtype: str, align: int) -> None:
    found = operator("softmax").signature(problem("softmax", 3, columns, dtype=dtype))
    assert found == {"dtype": dtype, "out_dtype": dtype, "align": align, "scale": False, "shift": False}


@pytest.mark.parametrize("name", NORMS)
def test_operands_are_in_order(name: str) -> None:
    own = operator(name)
    assert [one.name for one in own.operands(problem(name, scale=True, shift=True))] == ["x", "out", "gamma", "beta"]
    assert [one.name for one in own.operands(problem(name, scale=False, shift=True))] == ["x", "out", "beta"]
    assert [one.name for one in own.operands(problem(name, scale=False, shift=False))] == ["x", "out"]
    assert own.scalars(problem(name, epsilon=0.5)) == [0.5]


@pytest.mark.parametrize("name", OPERATORS)
def test_the_schema_accepts_what_the_model_does(name: str) -> None:
    schema = operator(name).schema()
    jsonschema.validate({"shape": [4, 5], "dtype": "float16"}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"shape": []}, schema)


WARP: dict[str, int | str] = {"algorithm": "registers", "row_threads": 32, "rows": 4, "vector": 4, "steps": 8}


@pytest.mark.parametrize(
    ("shape", "change", "rule", "said"),
    [
        ((100, 1000), {"rows": 64}, "threads", "64 rows of 32 threads are 2048; a block has 32 to 1024"),
        ((100, 1000), {"row_threads": 4, "rows": 4}, "threads", "4 rows of 4 threads are 16"),
        ((100, 1000), {"vector": 8}, "vector", "vector = 8 of 4 bytes; rows of 1000 elements allow up to 4"),
        ((100, 1001), {}, "vector", "rows of 1001 elements allow up to 1"),
        ((100, 40), {"steps": 1}, "row_threads", "32 threads for a row of 10 vectors are mostly idle"),
        ((2, 1000), {}, "rows", "4 rows of a block are mostly padding for 2"),
        ((100, 1000), {"steps": 7}, "steps", "room for 896 elements; a row has 1000 (8 steps)"),
        ((100, 1000), {"steps": 16}, "steps", "16 steps are mostly unused by 8"),
        ((100, 40000), {"steps": 313, "rows": 1}, "registers", "about 1284 registers; 255 are there"),
        (
            (100, 400_000),
            {"algorithm": "shared", "row_threads": 256, "rows": 1, "steps": 391, "loads": 2},
            "shared_memory",
            "1601664 bytes",
        ),
    ],
)
def test_rules_say_the_numbers(shape: tuple[int, ...], change: dict[str, Any], rule: str, said: str) -> None:
    own = operator("softmax")
    found = own.rules(problem("softmax", *shape), Schedule.of({**WARP, **change}), SM_90A)
    assert isinstance(found, Rejected)
    assert (found.rule, said in found.message) == (rule, True), found.message
    assert isinstance(own.rules(problem("softmax", 100, 1000), Schedule.of(WARP), SM_90A), Accepted)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("columns", [1, 10, 31, 100, 768, 1001, 4096, 16384, 50257, 128256, 2**20, 2**26])
def test_every_length_of_rows_has_schedules_at_every_level(name: str, columns: int, dtype: str) -> None:
    asked = problem(name, 64, columns, dtype=dtype)
    (default,) = lower(asked, SM_90A, Search(level=0)).candidates
    found = lower(asked, SM_90A, Search(level=1)).candidates
    assert len(found) >= 2
    assert default.schedule in [one.schedule for one in found]
    assert len(lower(asked, SM_90A, Search(level=2, limit=8)).candidates) == 8 or columns < 32
    algorithms = {one.schedule.get("algorithm") for one in found}
    assert "registers" in algorithms or columns > 10_000
    assert "shared" in algorithms or columns < 32 or columns > 30_000
    assert "online" in algorithms or columns < 32


def test_rows_that_are_read_twice_are_predicted_slower_than_those_read_once() -> None:
    asked = problem("softmax", 32768, 8192, dtype="float16")
    times: dict[Any, float] = {}
    for one in lower(asked, SM_90A, Search(level=1)).candidates:
        algorithm = one.schedule.get("algorithm")
        times[algorithm] = min(predict_before(one, SM_90A).us, times.get(algorithm, float("inf")))
    assert times["registers"] < times["online"]


def test_cost_is_one_read_and_one_write() -> None:
    found = operator("layer_norm").cost(
        problem("layer_norm", 6, 40, dtype="float16", out_dtype="float32"), Schedule.of({})
    )
    assert (found.bytes_read, found.bytes_written, found.launches, found.workspace_bytes) == (480 + 160, 960, 1, 0)


# ---- the reference


def by_definition(name: str, p: Any, inputs: dict[str, Any]) -> np.ndarray[Any, Any]:
    x = inputs["x"].astype(np.longdouble)
    if name == "softmax":
        power = np.exp(x - x.max(axis=1, keepdims=True))
        return power / power.sum(axis=1, keepdims=True)
    distances = x - x.mean(axis=1, keepdims=True) if name == "layer_norm" else x
    out = distances / np.sqrt((distances**2).mean(axis=1, keepdims=True) + np.float32(p.epsilon))
    out = out * inputs["gamma"].astype(np.longdouble) if p.scale else out
    return out + inputs["beta"].astype(np.longdouble) if p.shift else out


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("shape", [(5, 1), (4, 3), (3, 40), (7, 101)])
def test_the_reference_is_the_definition(name: str, shape: tuple[int, int]) -> None:
    p = problem(name, *shape)
    inputs = operator(name).make_inputs(p, "normal", np.random.default_rng(1))
    found, bound = operator(name).reference(p, inputs)
    np.testing.assert_allclose(found, by_definition(name, p, inputs).astype(float), rtol=1e-12, atol=1e-14)
    assert ((bound > 0.0).any() or shape[1] == 1) and np.isfinite(bound).all()


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("columns", [1, 2, 5, 64, 1001, 4096, 65537])
def test_integer_inputs_have_an_exact_result_that_differs_along_rows(name: str, dtype: str, columns: int) -> None:
    for epsilon in (12.0, 1e-5, 1e-6, 0.1):
        p = problem(name, 4, columns, dtype=dtype, **({} if name == "softmax" else {"epsilon": epsilon}))
        inputs = operator(name).make_inputs(p, "integer", np.random.default_rng(2))
        found, bound = operator(name).reference(p, inputs, exact=True)
        assert (bound == 0.0).all()
        if columns > 5:
            assert all(len(set(row)) > 1 for row in found.tolist())


def test_the_unit_of_exact_rows_makes_variance_and_epsilon_a_power_of_four() -> None:
    assert (unit_of(12.0), unit_of(0.0), unit_of(3.0), unit_of(1e-5)) == (1.0, 2.0**-8, 0.5, 8.0)
    assert unit_of(1e30) == 0.0


@pytest.mark.parametrize("name", OPERATORS)
def test_fp32_is_within_the_bound_and_a_lost_element_is_not(name: str) -> None:
    p = problem(name, 50, 300)
    inputs = operator(name).make_inputs(p, "normal", np.random.default_rng(3))
    expected, bound = operator(name).reference(p, inputs)

    def computed(lost: int) -> np.ndarray[Any, Any]:
        x, columns = inputs["x"], 300
        kept = x[:, : columns - lost]
        if name == "softmax":
            greatest = x.max(axis=1, keepdims=True)
            sums = np.exp(kept - greatest).sum(axis=1, keepdims=True, dtype=np.float32)
            return np.exp(x - greatest) * (np.float32(1) / sums)
        mean = kept.sum(axis=1, keepdims=True) / np.float32(columns) if name == "layer_norm" else np.float32(0)
        square = ((kept - mean) ** 2).sum(axis=1, keepdims=True) / np.float32(columns)
        out = (x - mean) * (np.float32(1) / np.sqrt(square + np.float32(p.epsilon))) * inputs["gamma"]
        return out + inputs["beta"] if p.shift else out

    assert judge(computed(0), expected, bound, exact=False).ok
    assert not judge(computed(1), expected, bound, exact=False).ok


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("kind", ["integer", "normal"])
def test_the_reference_on_a_device_has_the_values_of_numpy(name: str, kind: Any) -> None:
    own, p = operator(name), problem(name, 5, 33, dtype="float16")
    inputs = own.make_inputs(p, kind, np.random.default_rng(6))
    here = own.reference(p, inputs)
    with strict_namespace():
        there: Any = own.reference(p, {one: on_device(values) for one, values in inputs.items()})
        found = [on_host(one) for one in there]
    for one, other in zip(here, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-15)


@pytest.mark.parametrize("place", [0, 500, 999])
def test_an_outlier_where_online_looks_for_an_origin_costs_no_precision(place: int) -> None:
    p = problem("layer_norm", 1, 1000, scale=False, shift=False)
    inputs = operator("layer_norm").make_inputs(p, "normal", np.random.default_rng(1))
    inputs["x"][0, place] = 1e4
    found, bound = operator("layer_norm").reference(p, inputs)
    assert found[0, place] > 30.0
    assert bound.max() < 1e-4 * found[0, place]
