"""The operators: the packaged ones, and trusted folders from outside that were loaded explicitly."""

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from codegen.errors import InvalidOperator, UnknownOperator
from codegen.operator import Operator

_LOADED: dict[str, Operator] = {}


@cache
def _packaged() -> dict[str, Operator]:
    """Every folder beside this file with a kernel.cuh is an operator: adding one touches no list."""
    folders = sorted(kernel.parent.name for kernel in Path(__file__).parent.glob("*/kernel.cuh"))
    packaged = [importlib.import_module(f"{__name__}.{folder}").OPERATOR for folder in folders]
    return {operator.name: operator for operator in packaged}


def operators() -> dict[str, Operator]:
    """All operators by name."""
    return {**_packaged(), **_LOADED}


def operator(name: str) -> Operator:
    """The operator; raises UnknownOperator, which lists what is allowed."""
    loaded = _packaged().get(name) or _LOADED.get(name)
    if loaded is None:
        allowed = sorted(operators())
        raise UnknownOperator(
            f"unknown operator {name[:40]!r}; allowed: {', '.join(allowed)}", field="operator", allowed=allowed
        )
    return loaded


def load_operators(paths: Iterable[Path]) -> list[Operator]:
    """Loads operator folders (each an `__init__.py` with `OPERATOR`, a `kernel.cuh` and whatever else the operator's
    `files` name); they run as trusted code.

    Loading a folder again is harmless. Raises InvalidOperator, which says what a folder lacks.
    """
    checked = check_operators(paths)
    for loaded in checked:
        _LOADED.setdefault(loaded.name, loaded)
    return [_LOADED[loaded.name] for loaded in checked]


def check_operators(paths: Iterable[Path]) -> list[Operator]:
    """What `load_operators` would make known, and its errors."""
    checked: dict[str, Operator] = {}
    for path in paths:
        loaded = _load_folder(path.resolve())
        namesake = operators().get(loaded.name) or checked.get(loaded.name)
        if namesake is not None and namesake.folder != loaded.folder:
            raise InvalidOperator(f"{path}: an operator called {loaded.name!r} exists already, from {namesake.folder}")
        checked[loaded.name] = loaded
    return list(checked.values())


def _load_folder(folder: Path) -> Operator:
    _require_files(folder, ("__init__.py", "kernel.cuh"))
    module_name = f"cukiln_operator_{folder.name}"
    spec = importlib.util.spec_from_file_location(
        module_name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise InvalidOperator(f"{folder}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever its author's code raises
        raise InvalidOperator(f"{folder}: __init__.py fails with {type(error).__name__}: {error}") from error
    loaded = getattr(module, "OPERATOR", None)
    if not isinstance(loaded, Operator):
        raise InvalidOperator(f"{folder}: __init__.py must define OPERATOR, an instance of codegen.operator.Operator")
    _require_files(folder, loaded.files)
    return loaded


def _require_files(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        if not (folder / name).is_file():
            raise InvalidOperator(f"{folder}: an operator folder needs a file {name}")
