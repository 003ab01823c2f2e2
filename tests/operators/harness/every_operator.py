"""What all operators declare."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from tests.operators.harness.declarations import Declarations

FOLDER = Path(__file__).parents[1]
MODULES = sorted(path for path in FOLDER.glob("*/test_*.py") if path.stem == f"test_{path.parent.name}")


def declared_in(modules: Sequence[Path]) -> list[Declarations]:
    """Of all modules that have any."""
    imported = [importlib.import_module(f"tests.operators.{path.parent.name}.{path.stem}") for path in modules]
    return [declared for module in imported for declared in getattr(module, "DECLARED", ())]


DECLARED: dict[str, Declarations] = {declared.operator: declared for declared in declared_in(MODULES)}
