"""Errors of codegen carry what a person needs, also from one process to another."""

from __future__ import annotations

import pickle

import pytest

from codegen.errors import (
    CannotKey,
    CodegenError,
    InvalidSearch,
    NotUnique,
    Unclassified,
    UnknownOperator,
    UnknownTarget,
)


@pytest.mark.parametrize("kind", [CannotKey, InvalidSearch, NotUnique, Unclassified, UnknownOperator, UnknownTarget])
def test_errors_survive_pickling_with_their_field_and_what_is_allowed(kind: type[CodegenError]) -> None:
    error = pickle.loads(pickle.dumps(kind("tile_m = 3 is not allowed", field="search.tile_m", allowed=[16, 32])))
    assert type(error) is kind
    assert isinstance(error, ValueError)
    assert (str(error), error.field, error.allowed) == ("tile_m = 3 is not allowed", "search.tile_m", [16, 32])
