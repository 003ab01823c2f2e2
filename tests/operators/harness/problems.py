"""What is refused, and where; what is filled in; what a signature has; operands in the order of a call."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from codegen.operand import packed_strides
from tests.operators.harness.declarations import Declarations, Fields

TABLES = {
    "refused": lambda declared: declared.problems.refused,
    "default": lambda declared: declared.problems.defaults,
    "alike": lambda declared: declared.problems.alike,
    "aligned": lambda declared: declared.problems.aligned,
    "called": lambda declared: declared.problems.operands,
    "unspecialised": lambda declared: declared.problems.unspecialised,
    "in_schema": lambda declared: declared.problems.in_schema,
    "out_of_schema": lambda declared: declared.problems.out_of_schema,
}


def faults(declared: Declarations, fields: Fields) -> dict[str, str]:
    """Where the problem is refused, and the sentence."""
    with pytest.raises(ValidationError) as refused:
        declared.parse(fields)
    return {".".join(map(str, error["loc"])): error["msg"] for error in refused.value.errors()}


def test_what_cannot_be_computed_is_refused_by_name(declared: Declarations, refused: tuple[Fields, str, str]) -> None:
    fields, field, said = refused
    errors = faults(declared, fields)
    assert list(errors) == [field]
    assert said in errors[field]


def test_every_default_is_explicit(declared: Declarations, default: tuple[Fields, Fields]) -> None:
    problem = declared.parse(default[0])
    assert problem.canonical() == {"operator": declared.operator, **default[1]}
    assert declared.op.parse(problem.canonical()).digest == problem.digest


def test_what_means_the_same_has_one_key(declared: Declarations, alike: tuple[Fields, Fields]) -> None:
    first, second = map(declared.parse, alike)
    assert first.digest == second.digest


def test_alignment_classes(declared: Declarations, aligned: tuple[Fields, Fields]) -> None:
    signature = declared.op.signature(declared.parse(aligned[0]))
    assert {name: signature[name] for name in aligned[1]} == aligned[1]


def test_operands_are_in_order(declared: Declarations, called: tuple[Fields, list[tuple[Any, ...]]]) -> None:
    fields, expected = called
    operands = declared.op.operands(declared.parse(fields))
    assert [(operand.name, operand.dtype, operand.role, operand.shape) for operand in operands] == [
        row[:4] for row in expected
    ]
    for operand, row in zip(operands, expected, strict=True):
        assert operand.contiguous == (len(row) == 4)
        assert operand.strides == (row[4] if len(row) == 5 else packed_strides(row[3]))


def test_extents_and_numbers_are_no_part_of_a_signature(
    declared: Declarations, unspecialised: tuple[Fields, Fields, list[float]]
) -> None:
    *both, numbers = unspecialised
    first, second = map(declared.parse, both)
    assert declared.op.signature(first) == declared.op.signature(second)
    assert [*declared.op.attributes(second), *declared.op.scalars(second)] == numbers


def test_the_schema_accepts_what_the_model_does(declared: Declarations, in_schema: Fields) -> None:
    jsonschema.validate(dict(in_schema), declared.op.schema())
    declared.op.parse(in_schema)


def test_the_schema_refuses_what_the_model_does(declared: Declarations, out_of_schema: Fields) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(dict(out_of_schema), declared.op.schema())
    with pytest.raises(ValidationError):
        declared.op.parse(out_of_schema)
