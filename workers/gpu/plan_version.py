"""The version of all that gives a GPU's verdicts and times their meaning: who changes it, measures everything anew."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from importlib.resources.abc import Traversable

from codegen import arrays, epilogue_reference, gpu_plan, test_plan
from codegen.canonical import digest
from codegen.operators import operators
from workers.gpu.interface import DEFAULT_MODULE
from workers.reproduce.self_contained import imports_of, source_of

CHILD = "workers.gpu.run_on_gpu"
_OURS = "workers"


def gpu_plan_version() -> str:
    """Digest of everything but the kernel that gives a GPU's verdict and its times their meaning: the cases, the whole
    of the child that runs, judges and times them, and the operators' own Python (reduced problems, inputs, references,
    bounds)."""
    return _plan_version(tuple(sorted((op.name, op.folder) for op in operators().values())))


@cache
def _plan_version(known: tuple[tuple[str, Traversable], ...]) -> str:
    texts = {
        f"{name}/{file.name}": file.read_text(encoding="utf-8")
        for name, folder in known
        for file in folder.iterdir()
        if file.name.endswith(".py")
    }
    for module in (arrays, epilogue_reference, gpu_plan, test_plan):
        texts[module.__name__] = inspect.getsource(module)
    texts |= texts_of(CHILD, DEFAULT_MODULE)
    return digest("gpu_plan", gpu_plan.PLAN_SCHEMA, judgement=test_plan.PLAN_SCHEMA, texts=texts)


def texts_of(*modules: str, package: str = _OURS) -> dict[str, str]:
    """The texts of the modules, and of all below `package` that they import, by name; read, not run."""
    texts: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name in texts or name.partition(".")[0] != package or (path := source_of(name)) is None:
            continue
        texts[name] = path.read_text(encoding="utf-8")
        waiting += imports_of(name, ast.parse(texts[name]).body)
    return texts
