"""Modules of ours, with all that they import: as files that run anywhere, and as versions of a plan."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path

from codegen.canonical import digest
from codegen.identity import PlanVersions
from codegen.operator import Operator
from codegen.operators import operators
from codegen.plan import gpu_verification_plan, promised, verification_plan

OURS = ("codegen", "storage", "workers", "service", "cukiln")
# Packages of pure Python that are small enough to be carried along.
CARRIED = ("rfc8785",)
# What has to be installed there; ml_dtypes only where it is there anyway (see `workers.reproduce.driver`).
INSTALLED = ("numpy", "cupy", "ml_dtypes")
_HOLDS = (ast.stmt, ast.excepthandler, ast.match_case)  # what an import may stand in; most nodes are expressions


class NotSelfContained(Exception):
    """A module imports a package that can neither be carried along nor be asked for."""


def module_files(modules: Iterable[str]) -> dict[str, bytes]:
    """The files of the modules, and of all that they import, by path below the folder that is put into `sys.path`.
    Imports for type checkers alone do not count. Raises NotSelfContained."""
    files: dict[str, bytes] = {}
    waiting, seen = list(modules), set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        root = name.partition(".")[0]
        if root in CARRIED:
            files.update(_package_files(root))
        elif root in OURS and (path := source_of(name)) is not None:
            text = path.read_bytes()
            files[name.replace(".", "/") + ("/__init__.py" if path.name == "__init__.py" else ".py")] = text
            waiting += imports_of(name, ast.parse(text).body)
        elif root not in (*OURS, *INSTALLED) and root not in sys.stdlib_module_names:
            raise NotSelfContained(f"{name} is no part of Python, and cannot be carried along")
    return dict(sorted(files.items()))


def imports_of(module: str, body: Iterable[ast.AST]) -> Iterator[str]:
    """Modules that statements import, and what may be modules in them. Raises NotSelfContained."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module is None:
                raise NotSelfContained(f"{module} has a relative import")
            yield node.module
            # `from codegen import arrays` imports a module: a name that is none has no source, and is passed over.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield from imports_of(module, (inner for inner in ast.iter_child_nodes(node) if isinstance(inner, _HOLDS)))


def texts_of(*modules: str, packages: Collection[str]) -> dict[str, str]:
    """The texts of the modules, and of all in these packages that they import, by name; read, not run."""
    texts: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name in texts or name.partition(".")[0] not in packages or (read := text_and_imports(name)) is None:
            continue
        texts[name], imported = read
        waiting += [*imported, name.rpartition(".")[0]]  # and its package
    return texts


def module_of(own: Operator) -> str:
    """The module that an operator is made in."""
    return type(own).__module__


def operator_texts(module: str) -> dict[str, str]:
    """The Python of an operator's module with all of its own and of `codegen` that it imports, by name."""
    return texts_of(module, packages=("codegen", module.partition(".")[0]))


@cache
def text_and_imports(name: str) -> tuple[str, tuple[str, ...]] | None:
    if (path := source_of(name)) is None:
        return None
    text = path.read_text(encoding="utf-8")
    return text, tuple(imports_of(name, parsed_with_imports(text).body))


_DEFINITION = re.compile(r"^(?:@|(?:async )?def |class )", re.MULTILINE)


def parsed_with_imports(text: str) -> ast.Module:
    """All of a module's imports, and where they are all before its first definition nothing else: parsing takes most of
    the time that a plan's version takes."""
    first = _DEFINITION.search(text)
    if first is not None and re.search(r"\bimport\b", text[first.start() :]) is None:
        try:
            return ast.parse(text[: first.start()])
        except SyntaxError:  # that was in a string, or in a block
            pass
    return ast.parse(text)


def source_of(name: str) -> Path | None:
    """The file of a module; none for a folder without `__init__.py`, and for a name that is no module."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec and spec.origin else None


def _package_files(name: str) -> dict[str, bytes]:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise NotSelfContained(f"{name} is not installed here")
    folder = Path(spec.origin).parent
    files = {f"{name}/{path.name}": path.read_bytes() for path in folder.glob("*.py")}
    licences = [path for info in folder.parent.glob(f"{name}-*.dist-info") for path in info.rglob("LICENSE*")]
    return files | {f"{name}/{path.name}": path.read_bytes() for path in licences}


# Modules of the workers, by name: their texts are read, they are not imported.
CHILD, DRIVEN_BY = "workers.gpu.run_on_gpu", "workers.cuda.cupy_gpu"


def gpu_plans(names: Iterable[str] | None = None) -> PlanVersions:
    """By operator (all, or these) the digest of everything but the kernel that gives a GPU's verdict and its times
    their meaning: the cases, the whole of the child that runs, verifies and times them, and the Python of the operator
    with all that it imports (reduced problems, inputs, references, bounds)."""
    own = operators()
    versions = _gpu_plans(tuple((name, module_of(own[name])) for name in sorted(own)))
    return versions if names is None else {name: versions[name] for name in sorted(set(names))}


@cache
def _gpu_plans(modules: tuple[tuple[str, str], ...]) -> PlanVersions:
    shared = {
        module.__name__: inspect.getsource(module) for module in (gpu_verification_plan, promised, verification_plan)
    }
    shared |= texts_of(CHILD, DRIVEN_BY, packages=("workers",))
    schema, output_check = gpu_verification_plan.PLAN_SCHEMA, verification_plan.PLAN_SCHEMA
    return {
        name: digest(
            "gpu_plan", schema, output_check=output_check, operator=name, texts={**shared, **operator_texts(module)}
        )
        for name, module in modules
    }
