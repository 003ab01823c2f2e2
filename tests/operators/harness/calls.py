"""What a winner's library launches and refuses, called through tvm-ffi over a driver that writes down what it is asked.
All calls of a library are made in one process.

`make test` builds a third of a module's libraries of an operator, one at least, others each time; `make test-long` the
rest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cukiln.types import Launch
from tests.operators.harness.declarations import Change, Declarations, Library, Whole
from tests.support.fixtures.library import Built, Child, build, calls, launches
from tests.support.kernels.random_cases import seed_of_this_run
from tests.support.run.each_run import SOME_ROWS, rows_using
from workers.compile.toolchain import Toolchain
from workers.processes.processes import Processes

DEFAULT = "the record's own call"
Answers = Mapping[tuple[str, str, str], tuple[Any, list[dict[str, Any]]]]
# `attempted` is what a call returned, or [error, message], and what the driver was asked meanwhile.
PRELUDE = """
import os
from math import inf, nan
def H(*shape, **where): return T(shape, 'float16', **where)
def F(*shape, **where): return T(shape, 'float32', **where)
def log():
    with open(os.environ['FAKE_CUDA_LOG']) as file: return file.read().splitlines()
def attempted(*arguments):
    before = len(log())
    return attempt('run', *arguments), log()[before:]
"""


def _of_libraries(rows: Callable[[Library], Mapping[str, Any]]) -> Callable[[Declarations], Mapping[str, Any]]:
    def table(declared: Declarations) -> Mapping[str, Any]:
        libraries = declared.calls or {}
        return {
            f"{name}, {call}": (name, call, row) for name, of in libraries.items() for call, row in rows(of).items()
        }

    return table


TABLES = {
    "library": lambda declared: declared.calls,
    "refused": _of_libraries(lambda library: library.refused),
    "taken": _of_libraries(lambda library: library.taken),
}


def names_of_each_run(declared: Declarations) -> list[str]:
    libraries = declared.calls or {}
    always = [name for name, library in libraries.items() if library.always]
    others = sorted(libraries.keys() - set(always))
    rng = random.Random(f"{seed_of_this_run()} {others}")
    return [*always, *rng.sample(others, -(-len(others) // 3))] if SOME_ROWS else []


def left_out(having: Sequence[Declarations]) -> set[tuple[str, str]]:
    """Of all tables, rows of the libraries that this run's seed leaves to others."""
    rows = set()
    for declared in having:
        others = set(declared.calls or {}) - set(names_of_each_run(declared))
        rows |= {(declared.operator, name) for name in others}
        for table in ("refused", "taken"):
            rows |= {(declared.operator, row) for row, (name, *_) in TABLES[table](declared).items() if name in others}
    return rows


LONG = dict.fromkeys(TABLES, left_out)


def asked_for(request: pytest.FixtureRequest) -> Mapping[tuple[str, str], Library]:
    """By operator and name, the libraries of this run's tests."""
    every = {
        (declared.operator, name): library
        for declared in request.module.DECLARED
        for name, library in (declared.calls or {}).items()
    }
    names = set()
    for row in rows_using("built", request):
        declared = row["declared"]
        names |= {
            (declared.operator, name) for name, library in declared.calls.items() if library is row.get("library")
        }
        names |= {(declared.operator, row[table][0]) for table in ("refused", "taken") if table in row}
    return {key: library for key, library in every.items() if library.always or key in names}


@pytest.fixture(scope="module")
def built(
    request: pytest.FixtureRequest,
    folder: Path,
    toolchain: Toolchain,
    processes: Processes,
) -> Mapping[tuple[str, str], Built]:
    return {
        key: build(library.candidate(), folder, toolchain, processes) for key, library in asked_for(request).items()
    }


def operands_of(launch: Launch, changed: Change) -> dict[str, str]:
    """The expression of each operand, in the order of a call; outputs overlap nothing."""
    expressions, outputs = {}, 0
    for operand in launch.operands:
        place = ""
        if operand.role == "out":
            place, outputs = f", address={0x50000000 + (outputs << 28):#x}", outputs + 1
        tensor = f"T({tuple(operand.shape)}, {operand.dtype!r}, strides={tuple(operand.strides)}{place})"
        expressions[operand.name] = changed.get(operand.name, tensor)
    return expressions


def arguments_of(launch: Launch, change: Change) -> str:
    """Operands by their names, an address of the workspace where there is one, then attributes and scalars."""
    assert {name for name in change if isinstance(name, str)} <= {"numbers", *(o.name for o in launch.operands)}, change
    operands = [change.get(operand.name, operand.name) for operand in launch.operands]
    operands += ["0x60000000"] if launch.workspace_bytes else []
    own = [change.get(index, value) for index, value in enumerate([*launch.attributes.values(), *launch.scalars])]
    numbers = change.get("numbers", own)
    return ", ".join([*(operand for operand in operands if operand is not None), *map(repr, numbers)])


@pytest.fixture(scope="module")
def answers(
    request: pytest.FixtureRequest, built: Mapping[tuple[str, str], Built], folder: Path, processes: Processes,
    fake_driver: Path,
) -> Answers:  # fmt: skip
    """By operator, library and call."""
    result = {}
    for (operator, name), library in asked_for(request).items():
        winner = built[operator, name]
        wanted = {call: change for call, (change, *_) in [*library.refused.items(), *library.taken.items()]}
        assert DEFAULT not in wanted
        wanted[DEFAULT] = {}
        operands = "\n".join(f"{o} = {words}" for o, words in operands_of(winner.launch, library.operands).items())
        attempts = ", ".join(
            f"{call!r}: attempted({arguments_of(winner.launch, change)})" for call, change in wanted.items()
        )
        body = f"{PRELUDE}\n{operands}\nanswer = {{{attempts}}}"
        answer, _ = Child(folder, processes)(calls(winner.path, body), driver=fake_driver)
        for call, (outcome, log) in answer.items():
            result[operator, name, call] = outcome, launches(log)
    return result


def test_the_record_describes_the_call(
    declared: Declarations, library: Library, built: Mapping[tuple[str, str], Built]
) -> None:
    (name,) = (name for name, each in (declared.calls or {}).items() if each is library)
    launch, record = built[declared.operator, name].launch, library.record
    described = {
        "operands": [operand.name for operand in launch.operands],
        "roles": [operand.role for operand in launch.operands],
        "extents": launch.extents,
        "some extents": {axis: launch.extents[axis] for axis in record.get("some extents", {})},
        "attributes": list(launch.attributes.values()),
        "scalars": launch.scalars,
    }
    assert {field: described[field] for field in record} == record


def test_a_call_launches_what_the_record_says(
    declared: Declarations, library: Library, built: Mapping[tuple[str, str], Built], answers: Answers
) -> None:
    (name,) = (name for name, each in (declared.calls or {}).items() if each is library)
    outcome, launched = answers[declared.operator, name, DEFAULT]
    assert outcome is None
    assert [(launch["grid"], launch["block"], launch["shared"]) for launch in launched] == [
        (function.grid, function.block, function.shared_bytes)
        for function in built[declared.operator, name].launch.functions
    ]


def test_a_call_that_fits_is_taken(
    declared: Declarations, taken: tuple[str, str, tuple[Change, Any]], answers: Answers
) -> None:
    name, call, (_, expected) = taken
    outcome, launched = answers[declared.operator, name, call]
    assert outcome is None
    assert expected in (len(launched), [launch["grid"] for launch in launched])


def test_a_call_that_cannot_be_right_is_refused(
    declared: Declarations, refused: tuple[str, str, tuple[Change, str, str]], answers: Answers
) -> None:
    name, call, (_, kind, said) = refused
    (got, message), launched = answers[declared.operator, name, call]
    assert (got, said == message if isinstance(said, Whole) else said in message) == (kind, True), message
    assert launched == []
