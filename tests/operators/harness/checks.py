"""The tests of a module, chosen by what it declares; each row of a table is a test of its own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import pytest

from tests.operators.harness import KINDS
from tests.operators.harness.declarations import Declarations
from tests.support.fixtures.compile import processes, toolchain
from tests.support.fixtures.library import fake_driver, folder

FIXTURES = {"processes": processes, "toolchain": toolchain, "fake_driver": fake_driver, "folder": folder}


def add_checks(namespace: dict[str, Any]) -> None:
    """Gives a module the tests and fixtures for its DECLARED. Raises where something is neither declared nor named in
    `without`, and where the module has a test of the same name, which would be lost."""
    declared = namespace["DECLARED"]
    for each in declared:
        require_complete(each)
    checks: dict[str, Any] = {"pytest_generate_tests": pytest_generate_tests, **FIXTURES}
    for kind in KINDS:
        having = [each for each in declared if getattr(each, kind) is not None]
        module = importlib.import_module(f"tests.operators.harness.{kind}")
        for name, value in vars(module).items() if having else ():
            is_fixture = type(value).__name__ == "FixtureFunctionDefinition"
            if is_fixture or (name.startswith("test_") and _cases(value, having)):
                checks[name] = value
    twice = sorted(name for name in checks if namespace.get(name, checks[name]) is not checks[name])
    assert not twice, f"{namespace['__name__']} has names of its own for {twice}"
    namespace.update(checks)


def require_complete(declared: Declarations) -> None:
    missing = {kind for kind in (*KINDS, "job") if getattr(declared, kind) is None}
    unnamed, needless = sorted(missing - set(declared.without)), sorted(set(declared.without) - missing)
    assert not unnamed, f"{declared.operator} does not declare {unnamed}: do, or say in `without` why not"
    assert not needless, f"{declared.operator} declares {needless}, and says in `without` why it does not"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    kind = metafunc.function.__module__.rpartition(".")[2]
    if "declared" in metafunc.fixturenames and kind in KINDS:
        having = [each for each in metafunc.module.DECLARED if getattr(each, kind) is not None]
        table = _table_of(metafunc.function)
        several = len(metafunc.module.DECLARED) > 1
        cases = _cases(metafunc.function, having)
        ids = [" ".join([each.operator] * several + [name] * bool(table)) or each.operator for each, name, _ in cases]
        long = getattr(_module_of(metafunc.function), "LONG", {}).get(table or metafunc.function.__name__)
        some = long(having) if long else ()
        rows = [
            pytest.param(each, *([row] * bool(table)), marks=pytest.mark.long if (each.operator, name) in some else ())
            for each, name, row in cases
        ]
        metafunc.parametrize(("declared", table) if table else "declared", rows, ids=ids)


@cache
def _table_of(function: Any) -> str:
    """The argument of the test that is a row of a table, where there is one."""
    tables = _module_of(function).TABLES
    return next((name for name in inspect.signature(function).parameters if name in tables), "")


def _cases(function: Any, declared: Sequence[Declarations]) -> list[tuple[Declarations, str, Any]]:
    table = _table_of(function)
    if not table:
        return [(each, "", None) for each in declared]
    rows_of = _module_of(function).TABLES[table]
    return [(each, name, row) for each in declared for name, row in _named(rows_of(each)).items()]


def _named(rows: Mapping[str, Any] | Sequence[Any]) -> Mapping[str, Any]:
    if isinstance(rows, Mapping):
        return rows
    return {f"{number} {_words(row)}": row for number, row in enumerate(rows)}


def _words(row: Any) -> str:
    first = row[0] if isinstance(row, tuple) else getattr(row, "said", row)
    return str(first)[:60]


def _module_of(function: Any) -> ModuleType:
    return importlib.import_module(function.__module__)
