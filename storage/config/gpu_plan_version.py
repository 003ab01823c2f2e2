"""The versions of all that gives a GPU's verdicts and times their meaning: a change of one has everything of its
operator measured anew."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cache

from codegen.canonical import digest
from codegen.identity import PlanVersions
from codegen.operators import operators
from codegen.plan import gpu_verification_plan, verification_plan
from storage.config.module_texts import module_of, operator_texts, texts_of

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
    shared = {module.__name__: inspect.getsource(module) for module in (gpu_verification_plan, verification_plan)}
    shared |= texts_of(CHILD, DRIVEN_BY, packages=("workers",))
    schema, output_check = gpu_verification_plan.PLAN_SCHEMA, verification_plan.PLAN_SCHEMA
    return {
        name: digest(
            "gpu_plan", schema, output_check=output_check, operator=name, texts={**shared, **operator_texts(module)}
        )
        for name, module in modules
    }
