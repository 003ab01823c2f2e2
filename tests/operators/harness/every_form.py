"""All that the operators' test modules declare, and of each operator, dtype and algorithm a kernel."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from codegen.kernel import Kernel
from tests.operators.harness.declarations import Declarations
from tests.operators.harness.verifications import PATH, kernels_of, seconds

FOLDER = Path(__file__).parents[1]
WITH_DECLARATIONS = sorted(path for path in FOLDER.glob("*/test_*.py") if "\nDECLARED" in path.read_text())
"""Modules, of which an operator may have several."""
RANDOM_CASES = 60  # random cases of a module, which have every form of its operators' kernels


def declared_in(module: Path) -> Sequence[Declarations]:
    found: Sequence[Declarations] = importlib.import_module(
        f"tests.operators.{module.parent.name}.{module.stem}"
    ).DECLARED
    return found


def declarations_of(name: str) -> list[Declarations]:
    """Of all modules that declare kernels of the operator."""
    return [declared for module in WITH_DECLARATIONS for declared in declared_in(module) if declared.operator == name]


def form(kernel: Kernel) -> tuple[object, ...]:
    """Operator, dtype and algorithm: names of tunables tell those apart that have no name."""
    signature, tunables = kernel.signature_dict, kernel.tunables.as_dict()
    of_call = [str(signature.get(name)) for name in ("dtype", "allow_tf32", "lengths")]
    return (kernel.operator, *of_call, "mma_k" in tunables, *(tunables.get(name) for name in (*PATH, "output_tile")))


def forms(module: Path) -> list[Kernel]:
    """Of every form of the module's kernels the one that compiles fastest."""
    fastest: dict[tuple[object, ...], Kernel] = {}
    for declared in declared_in(module):
        cases = declared.random_cases.cases(RANDOM_CASES, 7) if declared.random_cases is not None else []
        of = [*kernels_of([declared]).values(), *(candidate.kernel for _, candidate in cases)]
        for kernel in sorted(of, key=seconds):
            fastest.setdefault(form(kernel), kernel)
    return list(fastest.values())
